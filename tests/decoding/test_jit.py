"""Compiled and plain functions do the same, wherever compiled code can or cannot be kept."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import os
import pickle
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pytest

from outrider.decoding import jit
from outrider.decoding.drafters.auto import AutoDrafter
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.replay import known_rows
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import DraftTree
from outrider.decoding.verify.exact import verify_exact

ROOT = Path(__file__).resolve().parents[2]


def drafted() -> list[list[list[float]]]:
    """What some drafters propose in a short script, and its parts, past the end of a small log.

    The largest tokens overflow 32-bit products.
    """
    rng = np.random.default_rng(0)
    texts = rng.choice([0, 1, 7, 60_000, 250_000], (3, 70)).tolist()
    found = []
    options: list[tuple[str, dict[str, object]]] = [
        ("auto", {"history_tokens": 128, "all_rows": True}),
        ("trie", {"capacity": 128, "min_input": 2}),
        ("trie", {"layout": "single", "max_query_length": 3}),
    ]
    for strategy, chosen in options:
        drafter = build_drafter(strategy, chosen)
        if isinstance(drafter, AutoDrafter):
            drafter.num_frequent = 0
        assert drafter.histories is not None
        drafter.histories.public.extend(0, 0, [*texts[2][:40], *texts[0][30:]], final=True)
        for number, text in enumerate(texts):
            request = Request(str(number), text[:25], SamplingParams(max_tokens=45), [text[3:30][::-1]], tenant="local")
            tree = DraftTree.chain(request.root, ())
            while True:
                upcoming = iter(text[request.num_tokens :])
                acceptance = verify_exact(tree, lambda row, upcoming=upcoming: next(upcoming), request.remaining, frozenset())
                request.commit([*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token])
                if not request.remaining:
                    break
                drafter.observe(request, tree, known_rows(tree, acceptance), acceptance)
                (tree,) = drafter.propose([request], [12])
                half = DraftTree(tree.tokens, tree.parents, tree.sources, (len(tree) + 1) // 2)
                for part in (tree, *(part.tree for part in half.partition(3))):
                    found.append([part.tokens.tolist(), part.parents.tolist(), part.sources.tolist(), [part.num_candidates]])
            drafter.finish(request)
    return found


def python(program: str, **environment: str) -> str:
    """What a program prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning:outrider.decoding.tree_rows", "-c", program],
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not jit.NATIVE, reason="numba is not installed")
def test_plain_python_proposes_the_same_trees() -> None:
    program = (
        "import sys; sys.modules['numba'] = None; sys.argv = ['plain']\n"
        f"import runpy; runpy.run_path({str(Path(__file__))!r}, run_name='__main__')"
    )
    plain = json.loads(python(program))
    assert plain == drafted() and len(plain) > 200 and any(len(tree[0]) > 10 for tree in plain)


@pytest.mark.skipif(not jit.NATIVE, reason="numba is not installed")
def test_without_a_folder_to_write_to_each_process_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.compiles_first()
    blocked = tmp_path / "file"
    blocked.write_text("")
    beside = ROOT / "decoding" / "__pycache__"
    kept = set(beside.glob("*.nb*"))
    program = (
        "import numpy as np\n"
        "from outrider.decoding.budget.candidates import push\n"
        "heap, keys = np.zeros(4, np.int32), np.array([1.0, 3.0, 2.0])\n"
        "size = 0\n"
        "for candidate in range(3): size = push(heap, size, keys, candidate)\n"
        "print(size, heap[0], len(push.signatures), type(push._cache).__name__)"
    )
    assert python(program, XDG_CACHE_HOME=str(blocked)).split() == ["3", "1", "1", "NullCache"]
    assert set(beside.glob("*.nb*")) == kept  # there code would outlive a change in what it calls
    assert python(program, XDG_CACHE_HOME=str(tmp_path)).split() == ["3", "1", "1", "FunctionCache"]
    (folder,) = (tmp_path / "outrider").iterdir()
    assert folder.name == f"native-{jit._version()}" and list(folder.rglob("*.nbi"))
    assert not jit.compiles_first()


def test_where_things_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.cache_folder() == tmp_path / "outrider"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert jit.cache_folder() == tmp_path / ".cache" / "outrider"


@pytest.mark.skipif(not jit.NATIVE, reason="numba is not installed")
def test_processes_that_compile_at_once_do_not_take_each_others_code(tmp_path: Path) -> None:
    module = tmp_path / "halves.py"
    module.write_text("from outrider.decoding.jit import compiled\n\n@compiled\ndef half(x):\n    return x / 2\n")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "kept"), "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}

    def half(number: str) -> float:
        return float(python(f"import numpy as np, halves; print(halves.half({number}))", **environment))

    assert half("5") == 2.5
    (index,) = (tmp_path / "kept").rglob("*.nbi")
    first = index.read_bytes()
    index.unlink()  # as a process sees it that began before the first one was done
    assert half("np.float32(3)") == 1.5
    index.write_bytes(first)
    assert len(list(index.parent.glob("*.nbc"))) == 2
    assert half("5") == 2.5  # of the first one's code, not of the other's for other types


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Makes a compiled function, as a process does that starts and has ``tmp_path/kept`` for its cache."""
    pytest.importorskip("numba")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    module = tmp_path / "halves.py"
    module.write_text("def half(x):\n    return x / 2\n")
    spec = importlib.util.spec_from_file_location("halves", module)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)

    def start() -> Any:
        if (files := sys.modules.get("outrider.decoding.compiled_files")) is not None:
            files._warned.clear()
        started = jit.compiled(made.half)
        assert started(5) == 2.5
        return started

    return start


def is_a_directory(path: Path) -> None:
    path.unlink()
    (path / "inner").mkdir(parents=True)


def is_a_link(path: Path) -> None:
    shutil.move(path, path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def has_a_bit_turned(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "garbage": lambda path: path.write_bytes(b"\x80\x04garbage" * 99),
    "no pickle of ours": lambda path: path.write_bytes(pickle.dumps([1, 2])),
    "a bit turned": has_a_bit_turned,
    "a directory": is_a_directory,
    "a link": is_a_link,
    "writable by others": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_compiled_code_is_compiled_anew(
    half: Callable[[], Any], tmp_path: Path, damage: str, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    half()
    assert half().stats.cache_hits and not caplog.records
    (path,) = tmp_path.rglob(f"*.{suffix}")
    DAMAGE[damage](path)
    assert half().stats.cache_misses
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "one line"
    assert half().stats.cache_hits and len(caplog.records) == 1, "and it is kept again"


def test_code_of_a_process_that_was_killed_before_it_wrote_it(half: Callable[[], Any], tmp_path: Path) -> None:
    half()
    for path in tmp_path.rglob("*.nbc"):
        path.unlink()
    assert half().stats.cache_misses and half().stats.cache_hits


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_what_others_may_have_written_is_not_unpickled(half: Callable[[], Any], tmp_path: Path) -> None:
    half()
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(pickle.dumps(Bomb(tmp_path / "harm")))
    index.chmod(0o666)
    half()
    assert not (tmp_path / "harm").exists()


@pytest.mark.skipif(not jit.NATIVE, reason="numba is not installed")
def test_a_full_disk_costs_the_cache_alone(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(
        "from outrider.decoding.jit import compiled\n\n@compiled\ndef half(x):\n    return x / 2\n"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path / "kept"), "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    limit = f"import resource; resource.setrlimit({resource.RLIMIT_FSIZE}, (9, 9))"  # no file grows beyond nine bytes
    assert python(f"{limit}\nimport halves\nprint(halves.half(5), halves.half(5.0))", **environment).split() == ["2.5", "2.5"]
    assert not list(tmp_path.rglob("*.nb*"))


KIND = next(iter(jit.kinds_of_processor()), "")
COUNTED = """
import sys
sys.prefix = sys.argv[1]
{first}
from outrider.decoding import jit
from outrider.decoding.budget.candidates import push
import numpy as np
heap, keys = np.zeros(4, np.int32), np.array([1.0, 3.0, 2.0])
size = 0
for candidate in range(3): size = push(heap, size, keys, candidate)
stats = push.stats
name = "none" if jit.BROUGHT is None else jit.BROUGHT.name
print(size, heap[0], name, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def started(prefix: Path, home: Path, first: str = "", **environment: str) -> list[str]:
    """What a process has that starts in an image's environment with a home of its own: a result, and where its code came from."""
    program = f"import sys; sys.argv = ['', {str(prefix)!r}]\n{COUNTED.format(first=first)}"
    return python(program, XDG_CACHE_HOME=str(home), **environment).split()


@pytest.mark.slow
@pytest.mark.skipif(not KIND or not jit.NATIVE, reason="no numba, or no kind of processor that an image compiles for")
def test_what_an_image_brings_is_not_compiled_again(tmp_path: Path) -> None:
    prefix = tmp_path / "environment"
    image = prefix / "share" / "outrider" / KIND
    assert started(prefix, tmp_path / "made", **jit.compile_for(KIND)) == ["3", "1", "none", "0", "1"]
    image.parent.mkdir(parents=True)
    (tmp_path / "made" / "outrider").rename(image)
    brought = sorted(path.relative_to(image) for path in image.rglob("*.nbc"))
    assert started(prefix, tmp_path / "home") == ["3", "1", KIND, "1", "0"]
    assert sorted(path.relative_to(tmp_path / "home" / "outrider") for path in (tmp_path / "home").rglob("*.nbc")) == brought
    assert started(prefix, tmp_path / "home") == ["3", "1", KIND, "1", "0"]  # from the home, where it is now
    assert started(prefix, tmp_path / "second", "import numba.core.registry") == ["3", "1", KIND, "1", "0"]
    assert started(prefix, tmp_path / "third", NUMBA_CPU_NAME="generic") == ["3", "1", "none", "0", "1"]  # who says so decides
    image.rename(image.with_name("another"))  # it was built on a lesser processor
    assert started(prefix, tmp_path / "fourth") == ["3", "1", "none", "0", "1"]


def test_the_kind_of_a_processor_is_the_best_that_it_has_all_features_of() -> None:
    rome = "fpu sse2 abm avx avx2 bmi1 bmi2 f16c fma movbe popcnt"
    skylake = f"{rome} avx512f avx512bw avx512cd avx512dq avx512vl"
    assert jit.kinds_of_processor(rome) == ["avx2"]
    assert jit.kinds_of_processor(skylake) == ["avx512", "avx2"]
    assert jit.kinds_of_processor(f"{skylake} avx512_bf16") == ["avx512", "avx2"]
    assert jit.kinds_of_processor(f"{skylake} avx512_bf16 avx512_vnni") == ["avx512bf16", "avx512", "avx2"]
    sapphire = f"{skylake} avx512_bf16 avx512_vnni amx_tile amx_bf16"
    assert jit.kinds_of_processor(sapphire) == ["amx", "avx512bf16", "avx512", "avx2"]
    assert jit.kinds_of_processor(rome.replace("fma ", "")) == [] == jit.kinds_of_processor("")
    assert "+avx512bf16" in jit.compile_for("avx512bf16")[jit.FEATURES_VARIABLE].split(",")


def test_tiles_are_used_where_the_kernel_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else numba is told of a processor without: it would compile for what would end the process."""
    flags = "abm avx2 bmi1 bmi2 f16c fma movbe popcnt avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16 avx512_vnni"
    monkeypatch.setattr(jit, "_flags", lambda: {*flags.split(), "amx_tile", "amx_bf16"})
    for name in (jit.NAME_VARIABLE, jit.FEATURES_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    numba = pytest.importorskip("numba")
    for name in ("CPU_NAME", "CPU_FEATURES"):
        monkeypatch.setattr(numba.config, name, None)
    monkeypatch.setattr(jit, "_may_use_tiles", lambda: True)
    assert jit.kinds_of_processor()[0] == "amx" and jit._brought() is None and numba.config.CPU_NAME is None
    monkeypatch.setattr(jit, "_may_use_tiles", lambda: False)
    assert jit.kinds_of_processor()[0] == "avx512bf16" and jit._brought() is None
    assert numba.config.CPU_NAME == "x86-64-v4" and "amx" not in numba.config.CPU_FEATURES


def arrays_let_go(source: str) -> list[str]:
    """Return compiled functions that take the address of an array that may be freed: neither a parameter nor memory of others.

    An array from before a loop lives as long as the loop, since the next turn may use it.
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not function.decorator_list:
            continue
        kept = {argument.arg for argument in function.args.args}
        for statement in ast.walk(function):
            if isinstance(statement, ast.Assign) and ast.unparse(statement.value).startswith("carray("):
                kept |= {ast.unparse(target) for target in statement.targets}
        looped = {
            name
            for loop in ast.walk(function)
            if isinstance(loop, ast.For | ast.While)
            for name in addressed(loop)
            if name.partition("[")[0] not in {node.id for node in ast.walk(loop) if is_set(node)}
        }
        found += [f"{function.name}: {name}" for name in sorted(addressed(function) - kept - looped)]
    return found


def addressed(tree: ast.AST) -> set[str]:
    """Return the arrays whose addresses are taken."""
    return {
        ast.unparse(node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.value, ast.Attribute)
        if node.value.attr == "ctypes"
    }


def is_set(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def test_compiled_code_keeps_the_arrays_whose_addresses_it_takes() -> None:
    """Compiled code lets go of an array after the last line that names it: what is written to its address then is another's."""
    assert arrays_let_go("@compiled\ndef f(a):\n    b = np.empty(3)\n    c = a.ctypes.data\n    g(b.ctypes.data)") == ["f: b"]
    checked = {path.name: arrays_let_go(path.read_text()) for path in (ROOT / "engine" / "cpu").glob("*.py")}
    assert len(checked) > 4 and not any(checked.values()), checked


if __name__ == "__main__":
    assert not jit.NATIVE
    warnings.simplefilter("error")  # numbers that overflow warn
    print(json.dumps(drafted()))
