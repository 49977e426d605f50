"""Ranks that hold parts of one model say what one process says, under every strategy, and leave nothing behind when one dies."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from outrider.actors.ranks import GroupError
from outrider.actors.sharded import shared_sums
from outrider.actors.sharded.pipeline_parallel import bounds
from outrider.actors.sharded.shard import ShardMode, ShardSpec
from outrider.actors.sharded.shared_sums import alone_in
from outrider.actors.sharded.tensor_parallel import take_part
from tests.helpers import waiting
from tests.helpers.models import tiny_model
from tests.helpers.parts import Answers, shared_buffers, whole

REPOSITORY = Path(__file__).resolve().parents[2]
has_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install -e '.[baselines]'"
)
eventually = functools.partial(waiting.eventually, timeout_s=30.0)


has_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler for DeepSpeed's sums")


@contextlib.contextmanager
def leading(mode: ShardMode, family: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Answers]]:
    """A leader that has answered, and goes on."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.parts", mode, family],
        cwd=REPOSITORY, env=os.environ | environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        answers = process.stdout.readline()
        assert answers, f"the leader ended with {process.wait(30)}"
        yield process, Answers(**json.loads(answers))
    finally:
        process.kill()
        process.communicate()


def check_answers(answers: Answers) -> None:
    assert answers.given == answers.expected
    assert answers.accepted > 20 and answers.reused > 40
    assert all(psutil.pid_exists(pid) for pid in answers.pids)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.mark.slow
@has_deepspeed
@pytest.mark.parametrize(
    "compiler",
    [pytest.param("none", id="gloo", marks=pytest.mark.proof), pytest.param("c++", marks=has_compiler, id="shared memory")],
)
def test_slices_say_what_the_whole_says_and_a_killed_rank_ends_the_group(compiler: str) -> None:
    with leading("tensor", "llama", CXX=compiler) as (leader, answers):
        check_answers(answers)
        assert (answers.layers, answers.kv_heads) == ([2, 2], [1, 2])
        buffers = shared_buffers([leader.pid, *answers.pids])
        assert bool(buffers) == (compiler != "none")
        assert not any(buffer.exists() for buffer in buffers)  # already while they compute
        os.kill(answers.pids[0], signal.SIGKILL)
        assert leader.wait(30) == 1  # which may have been spinning
        eventually(lambda: gone(answers.pids))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param("gemma2", marks=pytest.mark.proof), "phi3_long"]
)  # texts of the second cross the border of its frequencies
def test_a_pipeline_says_what_the_whole_says_and_ends_with_its_leader(family: str) -> None:
    with leading("pipeline", family) as (leader, answers):
        check_answers(answers)
        assert (answers.layers, answers.kv_heads) == ([1, 2], [2, 2])
        leader.kill()
        eventually(lambda: gone(answers.pids))


@pytest.mark.slow
@has_deepspeed
def test_an_architecture_that_deepspeed_splits_wrongly_is_refused() -> None:
    """Phi3's projections hold queries, keys and values in one."""
    command = [sys.executable, "-m", "tests.helpers.parts", "tensor", "phi3"]
    environment = os.environ | {"CXX": "none"}
    found = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 1 and not found.stdout
    assert "GroupError: Phi3ForCausalLM cannot compute in 2 parts" in found.stderr, found.stderr[-2000:]


def test_a_lock_of_a_killed_compiler_is_taken_away(tmp_path: Path) -> None:
    left = tmp_path / "deepspeed_shm_comm" / "lock"  # for which torch would wait for ever
    left.parent.mkdir()
    left.touch()
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    with alone_in(tmp_path):
        assert not left.exists() and os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path)
    assert os.environ.get("TORCH_EXTENSIONS_DIR") == before


def test_a_module_that_is_not_as_it_was_loaded_is_compiled_anew(tmp_path: Path) -> None:
    library = tmp_path / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"
    library.parent.mkdir()
    library.write_bytes(b"machine code")
    shared_sums._seal(tmp_path)
    with alone_in(tmp_path):
        assert library.exists()
    os.truncate(library, 5)  # a power cut
    with alone_in(tmp_path):
        assert not library.parent.exists()


def test_layers_are_dealt_evenly() -> None:
    assert bounds(10, 4) == [range(2), range(2, 4), range(4, 7), range(7, 10)]
    assert bounds(3, 3) == [range(1), range(1, 2), range(2, 3)]
    with pytest.raises(GroupError, match="3 layers cannot be partitioned among 4 ranks"):
        bounds(3, 4)


def test_what_deepspeed_would_get_wrong_is_refused() -> None:
    with pytest.raises(GroupError, match="2 KV heads of LlamaForCausalLM cannot be partitioned among 3 ranks"):
        take_part(whole("llama"), ShardSpec("tensor", 0, 3, "cpu"))
    with pytest.raises(GroupError, match="does not support float64"):
        take_part(tiny_model("llama", "float64").stock, ShardSpec("tensor", 0, 2, "cpu"))
