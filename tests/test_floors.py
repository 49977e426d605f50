"""Imports go down only, each room keeps to its libraries, docstrings are plain English, and documents name what exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# A room may import itself and these.
BELOW: dict[str, set[str]] = {
    "decoding": set(),
    "configs": set(),
    "engine": {"decoding", "configs"},
    "cache_service": {"decoding", "configs"},
    "actors": {"engine", "cache_service", "decoding", "configs"},
    "cluster": {"actors", "engine", "cache_service", "decoding", "configs"},
    "experiments": {"cluster", "actors", "engine", "cache_service", "decoding", "configs"},
}

_NUMBERS = {"numpy", "torch"}
_MODELS = _NUMBERS | {"transformers", "huggingface_hub", "tokenizers", "safetensors", "flash_attn", "jinja2"}
_SERVING = _MODELS | {"ray", "redis", "deepspeed", "accelerate", "psutil", "msgpack", "prometheus_client"}
LIBRARIES: dict[str, set[str]] = {
    "decoding": _NUMBERS | {"numba"},
    "configs": {"pydantic", "pydantic_core", "yaml"},
    "engine": _MODELS | {"gguf", "numba", "llvmlite", "pynvml", "llguidance", "triton", "pypdf", "bs4", "markdownify"},
    "cache_service": {"numpy", "redis", "pybreaker"},
    "actors": _SERVING,
    "cluster": _SERVING
    | {"fastapi", "starlette", "httptools", "uvicorn", "grpc", "pydantic", "pydantic_core", "typer", "rich", "markdown_it"}
    | {"httpx", "yaml", "opentelemetry"},
    "experiments": (_SERVING - {"ray"})
    | {"typer", "rich", "gguf", "numba", "httpx", "openai", "yaml", "matplotlib", "playwright", "simpy", "markupsafe"}
    | {"langchain_core", "langchain_openai", "langchain_postgres", "langchain_qdrant", "langchain_text_splitters"}
    | {"llama_index", "qdrant_client", "sqlalchemy", "rouge_score", "triton"},
}

WITHOUT_PYDANTIC = {"decoding", "engine", "cache_service"}

# Files of the standard library alone: the engine's slices load where pydantic and yaml are not installed.
STANDARD_LIBRARY_ONLY = {"configs/slices.py", "configs/__init__.py"}


def violations(file: str, source: str) -> list[str]:
    """Return the bad imports of a file, ``engine/engine.py`` for example, wherever in it they stand."""
    room = file.split("/")[0]
    allowed = LIBRARIES[room] | BELOW[room] | {room} if file not in STANDARD_LIBRARY_ONLY else set()
    found = []
    for line, name in imported(ast.parse(source), file):
        top, _, own = name.partition(".")
        if top == "outrider":
            bad = own.split(".")[0] not in allowed & BELOW.keys()
            # Other modules of configs need pydantic.
            bad |= room in WITHOUT_PYDANTIC and own.startswith("configs") and not own.startswith("configs.slices")
        else:
            bad = top not in (allowed - BELOW.keys()) | sys.stdlib_module_names
        if bad:
            found.append(f"{file}:{line} imports {name}")
    return found


def imported(tree: ast.AST, file: str) -> list[tuple[int, str]]:
    """Return line and full name of every import: ``from outrider.configs import schema`` is ``outrider.configs.schema``."""
    names = []
    package = ["outrider", *file.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                names.append((node.lineno, name.value))
    return names


def _called(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def sources() -> dict[str, str]:
    """Return the text of each source by its path from the repository."""
    paths = (path for room in BELOW for path in sorted((REPOSITORY / room).rglob("*.py")))
    own = (path for path in paths if path.parent.name != "client_scripts")  # run where nothing of ours is installed
    return {path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8") for path in own}


SOURCES = sources()


@pytest.mark.parametrize("file", SOURCES)
def test_imports_go_down_only(file: str) -> None:
    assert violations(file, SOURCES[file]) == []


README_LINES = 150
# Docstrings of the product are plain English: a sentence in the imperative, or a noun phrase (ruff's D401 sees the first alone).
FIRST_WORDS = {"What", "Of", "Who", "Whose", "As", "Has", "Says", "Where"}
BANNED = re.compile(r"\b(told|nobody|of its own|in place of|is there)\b", re.IGNORECASE)


def test_every_folder_and_module_has_a_docstring() -> None:
    folders = {file.rpartition("/")[0] for file in SOURCES}
    assert {f"{folder}/__init__.py" for folder in folders} <= SOURCES.keys()
    assert [file for file, source in SOURCES.items() if not ast.get_docstring(ast.parse(source))] == []


def product() -> Iterator[tuple[str, ast.Module]]:
    return ((file, ast.parse(source)) for file, source in SOURCES.items() if not file.startswith("experiments/"))


def faults_of(docstring: str) -> list[str]:
    first = re.match(r"\W*([A-Za-z]+)", docstring)
    return [word for word in FIRST_WORDS if first is not None and first[1] == word] + BANNED.findall(docstring)


def test_docstrings_are_plain_english() -> None:
    found = {}
    for file, tree in product():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                faults = faults_of(ast.get_docstring(node) or "")
                if faults:
                    found[f"{file}: {getattr(node, 'name', '')}"] = faults
    assert found == {}


def test_private_english_in_docstrings_is_found() -> None:
    assert faults_of("What is told of a request.") == ["What", "told"]
    assert faults_of("Return the tokens of a request. None in place of them.") == ["in place of"]
    assert faults_of("Return what the model computes. Of several, the last.") == []


def test_classes_of_the_product_have_different_names() -> None:
    nodes = (node for _, tree in product() for node in tree.body)
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert [name for name, times in names.items() if times > 1] == []


def test_the_readme_is_read_in_minutes() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            if "://" in target:
                continue
            if not linked.exists() or (anchor and anchor not in anchors(linked)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_files_that_documents_name_are_there() -> None:
    missing = []
    for page in [REPOSITORY / "README.md", REPOSITORY / "SECURITY.md", *(REPOSITORY / "docs").glob("*.md")]:
        rooms = "|".join((*BELOW, "tests", "k8s", "docs"))
        for name in re.findall(rf"`((?:{rooms})/[\w./-]*\.\w+)`", page.read_text(encoding="utf-8")):
            if not (REPOSITORY / name).exists() and name != "decoding/drafters/repeat.py":
                missing.append(f"{page.name}: {name}")
        for module in re.findall(rf"python -m ((?:outrider|{rooms})\.[\w.]+\w)", page.read_text(encoding="utf-8")):
            if importlib.util.find_spec(module) is None:
                missing.append(f"{page.name}: {module}")
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_rooms_have_no_cycle() -> None:
    for room, below in BELOW.items():
        assert room not in below
        assert all(room not in BELOW[other] for other in below)
        assert all(BELOW[other] <= below for other in below)


def test_modules_of_decoding_have_no_import_cycle() -> None:
    """Imports of packages count, and those within functions and for type checks."""
    names = {
        file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file
        for file in SOURCES
        if file.startswith("decoding/")
    }
    waiting = {}
    for name, file in names.items():
        used = [name, *(full.removeprefix("outrider.") for _, full in imported(ast.parse(SOURCES[file]), file))]
        parts = (each.split(".") for each in used)
        waiting[name] = {".".join(part[:length]) for part in parts for length in range(1, len(part) + 1)} & names.keys() - {name}
    while waiting:
        left = {name: below for name, below in waiting.items() if below & waiting.keys()}
        assert len(left) < len(waiting), sorted(left)
        waiting = left


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("decoding/a.py", "import outrider.engine.forward.batch"),
        ("decoding/a.py", "from outrider.configs.schema import Config"),
        ("decoding/a.py", "import redis"),
        ("decoding/a.py", "import transformers"),
        ("decoding/a.py", "def f():\n    import ray"),
        ("decoding/drafters/a.py", "from ...engine import batch"),
        ("decoding/a.py", "import importlib\nimportlib.import_module('ray')"),
        ("engine/a.py", "import ray"),
        ("engine/a.py", "from pydantic import BaseModel"),
        ("engine/a.py", "from outrider.configs.schema import load_config"),
        ("engine/a.py", "from outrider.configs import schema"),
        ("engine/a.py", "from decoding import tree"),
        ("engine/a.py", "from outrider.cache_service.store.embedded import EmbeddedRedis"),
        ("engine/a.py", "if True:\n    from outrider.actors import replica"),
        ("cache_service/a.py", "import outrider.engine"),
        ("cache_service/a.py", "import ray"),
        ("cache_service/a.py", "import torch"),
        ("actors/a.py", "from outrider.cluster.app import build_app"),
        ("actors/a.py", "import fastapi"),
        ("cluster/a.py", "import outrider.experiments.bench.record"),
        ("cluster/a.py", "import requests"),
        ("experiments/a.py", "from ray import serve"),
        ("configs/slices.py", "import pydantic"),
        ("configs/slices.py", "import yaml"),
        ("configs/slices.py", "from outrider.configs.schema import Config"),
        ("configs/schema.py", "import torch"),
        ("configs/schema.py", "import outrider.decoding.tree"),
    ],
)
def test_checker_sees_a_bad_import(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("decoding/drafters/a.py", "from ..tree import DraftTree\nimport numpy as np\nimport torch"),
        ("engine/a.py", "from outrider.configs.slices import EngineOptions\nimport transformers\nimport outrider.decoding.tree"),
        ("cache_service/a.py", "import redis, socket\nimport numpy"),
        ("actors/a.py", "import ray\nfrom outrider.engine.engine import Engine\nimport outrider.cache_service.store.embedded"),
        (
            "cluster/a.py",
            "import ray, fastapi, httpx\nfrom outrider.configs.schema import Config\nimport outrider.actors.replica",
        ),
        ("configs/schema.py", "import yaml\nfrom pydantic import BaseModel\nfrom outrider.configs.slices import ModelOptions"),
        ("configs/slices.py", "from __future__ import annotations\nfrom dataclasses import dataclass"),
    ],
)
def test_checker_lets_good_imports_pass(file: str, source: str) -> None:
    assert violations(file, source) == []
