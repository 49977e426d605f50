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

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.lookahead.wire import WireError
from actors.ranks import GroupError
from actors.sharded.pipeline_parallel import bounds
from actors.sharded.shard import Shard, ShardMode
from actors.sharded.shared_sums import alone_in
from actors.sharded.tensor_parallel import take_part
from actors.sharded.wire import Failed, Join, Ready, ShardedStep, ShardMessage, decode_shard, encode_shard, encode_step
from engine.forward.batch import Batch, Segment
from engine.forward.sharded import Compaction, Copy
from tests import waiting
from tests.models import tiny_model
from tests.parts import Answers, whole

REPOSITORY = Path(__file__).resolve().parents[2]
has_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install 'outrider[baselines]'"
)
eventually = functools.partial(waiting.eventually, timeout_s=30.0)


has_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler for DeepSpeed's sums")


@contextlib.contextmanager
def leading(mode: ShardMode, family: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Answers]]:
    """A leader that has answered, and goes on."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.parts", mode, family],
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


def buffers() -> set[str]:
    """What DeepSpeed's ranks have left in shared memory."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("deepspeed_*")} if folder.is_dir() else set()


def check_answers(answers: Answers) -> None:
    assert answers.given == answers.expected
    assert answers.accepted > 20 and answers.reused > 40
    assert all(psutil.pid_exists(pid) for pid in answers.pids)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@has_deepspeed
@pytest.mark.parametrize(
    "compiler", [pytest.param("none", id="gloo"), pytest.param("c++", marks=[pytest.mark.slow, has_compiler], id="shared memory")]
)
def test_slices_say_what_the_whole_says_and_a_killed_rank_ends_the_group(compiler: str) -> None:
    before = buffers()
    with leading("tensor", "llama", CXX=compiler) as (leader, answers):
        check_answers(answers)
        assert (answers.layers, answers.kv_heads) == ([2, 2], [1, 2])
        assert buffers() == before  # already while they compute
        os.kill(answers.pids[0], signal.SIGKILL)
        assert leader.wait(30) == 1  # which may have been spinning
        eventually(lambda: gone(answers.pids))
    assert buffers() == before


def test_a_pipeline_says_what_the_whole_says_and_ends_with_its_leader() -> None:
    with leading("pipeline", "gemma2") as (leader, answers):
        check_answers(answers)
        assert (answers.layers, answers.kv_heads) == ([1, 2], [2, 2])
        leader.kill()
        eventually(lambda: gone(answers.pids))


@pytest.mark.slow
@has_deepspeed
def test_an_architecture_that_deepspeed_splits_wrongly_is_refused() -> None:
    """Phi3's projections hold queries, keys and values in one."""
    command = [sys.executable, "-m", "tests.parts", "tensor", "phi3"]
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


def test_layers_are_dealt_evenly() -> None:
    assert bounds(10, 4) == [range(2), range(2, 4), range(4, 7), range(7, 10)]
    assert bounds(3, 3) == [range(1), range(1, 2), range(2, 3)]
    with pytest.raises(GroupError, match="3 layers cannot be partitioned among 4 ranks"):
        bounds(3, 4)


def test_what_deepspeed_would_get_wrong_is_refused() -> None:
    with pytest.raises(GroupError, match="2 KV heads of LlamaForCausalLM cannot be partitioned among 3 ranks"):
        take_part(whole("llama"), Shard("tensor", 0, 3, "cpu"))
    with pytest.raises(GroupError, match="no float64"):
        take_part(tiny_model("llama", "float64").stock, Shard("tensor", 0, 2, "cpu"))


@pytest.mark.parametrize("message", [Join("127.0.0.1", 4242, 8, 512), Ready("cpu"), Failed("no memory")])
def test_messages_arrive_as_they_were(message: Join | Ready | Failed) -> None:
    assert decode_shard(encode_shard(message)) == message


def a_step() -> bytes:
    mask = np.tril(np.ones((5, 5), np.bool_))
    mask[4, 3] = False
    segments = (Segment(3, 17, 0, 5, mask), Segment(0, 2, 5, 2, None))
    rows = np.arange(7)
    return encode_step([Compaction(3, 12, (0, 2, 4)), Copy(1, 2, 30, 14)], Batch(rows + 40, rows, segments, rows[2:], (0, None)))


def test_a_step_arrives_as_it_was() -> None:
    step = decode_shard(a_step())
    assert isinstance(step, ShardedStep)
    assert step.moves == (Compaction(3, 12, (0, 2, 4)), Copy(1, 2, 30, 14))
    batch = step.batch
    assert batch.token_ids.tolist() == list(range(40, 47)) and batch.positions.tolist() == list(range(7))
    assert batch.logit_rows.tolist() == [2, 3, 4, 5, 6]
    first, second = batch.segments
    assert (first.slot, first.start, first.offset, first.rows) == (3, 17, 0, 5)
    assert first.mask is not None and first.mask.dtype == np.bool_ and not first.mask[4, 3] and first.mask.sum() == 14
    assert (second.slot, second.start, second.offset, second.rows, second.mask) == (0, 2, 5, 2, None)


def decoded(data: bytes) -> ShardMessage | None:
    try:
        return decode_shard(data)
    except WireError:
        return None


@given(st.binary(max_size=64), st.integers(0, 200), st.integers(0, 255))
def test_whatever_arrives_is_a_message_or_refused(noise: bytes, at: int, value: int) -> None:
    data = bytearray(a_step())
    data[at % len(data)] = value
    for sent in (noise, bytes(data), bytes(data[:at])):
        message = decoded(sent)
        if isinstance(message, ShardedStep):
            total = len(message.batch.token_ids)
            assert all(0 <= one.offset < one.offset + one.rows <= total for one in message.batch.segments)
