"""Ranks of a lookahead-parallel group that die, stop, fail, hang or disagree: real processes, real signals. Whatever happens, and
whenever, every output is plain decoding's."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from outrider.actors.description import GroupState
from outrider.actors.lookahead.link import LINK_ERRORS, connect
from outrider.configs.slices import ParallelismOptions
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from tests.helpers import models
from tests.helpers.models import VOCAB, engine_over, tiny_model
from tests.helpers.ranks import SECRET, BranchingDrafter, Fault, RankProcess, TinyGroup
from tests.helpers.waiting import eventually

FAMILY = "llama"
MAX_TOKENS = 40  # 14 steps
# Busy machines make a rank late, not lost, except where losing it by the clock is what a test is about.
STEADY = ParallelismOptions(mode="lookahead", rank_timeout_s=30.0, step_timeout_s=120.0, adaptive=False)
IMPATIENT = replace(STEADY, rank_timeout_s=1.5)
LOSSES = pytest.mark.parametrize(
    ("number", "options"), [(signal.SIGKILL, STEADY), (signal.SIGSTOP, IMPATIENT)], ids=["kill", "stop"]
)
_RNG = np.random.default_rng(3)
CASES = (
    ([1, 2, 3, 4] * 6, SamplingParams(MAX_TOKENS, ignore_eos=True)),
    (_RNG.integers(1, VOCAB, 60).tolist(), SamplingParams(MAX_TOKENS, temperature=0.8, seed=4, ignore_eos=True)),
    ([7], SamplingParams(MAX_TOKENS, temperature=0.4, seed=9, ignore_eos=True, repetition_penalty=1.1, logprobs=1)),
    (_RNG.integers(1, VOCAB, 80).tolist(), SamplingParams(MAX_TOKENS, ignore_eos=True, presence_penalty=0.3)),
)


def requests() -> list[Request]:
    return [Request(str(at), prompt, params) for at, (prompt, params) in enumerate(CASES)]


@cache
def plain() -> list[list[int]]:
    return models.run(engine_over(tiny_model(FAMILY, "float32").runner, build_drafter("autoregressive", {}), 1), *requests())


def leader(options: ParallelismOptions, step_tokens: int = 256) -> TinyGroup:
    drafter = BranchingDrafter({str(at): output for at, output in enumerate(plain())})
    return TinyGroup(FAMILY, drafter, options=options, step_tokens=step_tokens)


@pytest.fixture(scope="module")
def sound() -> Iterator[Callable[[ParallelismOptions], RankProcess]]:
    """A rank that survives, for one group after another: one process for each set of options."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda options: stack.enter_context(RankProcess(FAMILY, options=options)))


Sound = Callable[[ParallelismOptions], RankProcess]


@contextlib.contextmanager
def group_of_three(
    sound: Sound, options: ParallelismOptions, fault: Fault | None = None, step_tokens: int = 256
) -> Iterator[tuple[TinyGroup, RankProcess]]:
    """A leader, a sound rank 1, and rank 2 in a process of its own, which is the second of the pair."""
    with RankProcess(FAMILY, options=options, fault=fault) as victim, leader(options, step_tokens) as group:
        group.join(1, sound(options))
        group.join(2, victim)
        yield group, victim


def run(group: TinyGroup, between: Callable[[int], None] = lambda step: None) -> list[list[int]]:
    outputs = group.run(requests(), between)
    assert all(len(output) == MAX_TOKENS for output in outputs)
    return outputs


def check_group(group: TinyGroup, lost: Sequence[int], ready: Sequence[int], reason: str) -> None:
    """Who is left, and what is told of the lost."""
    state, told = group.state, group.executor.take_lost()
    assert (state.losses, state.ready, state.refilling) == (len(lost), tuple(ready), ())
    assert sorted(one.rank for one in told) == sorted(lost)
    assert state.last_loss is not None and told[-1].reason in state.last_loss
    assert all(re.search(reason, one.reason) and not one.detached for one in told), told
    assert group.executor.take_lost() == []


def test_the_cases_differ() -> None:
    assert len({tuple(output) for output in plain()}) == len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 6])
@LOSSES
def test_a_rank_that_dies_or_stops_between_two_steps(
    sound: Sound, number: signal.Signals, options: ParallelismOptions, step: int
) -> None:
    """The first time in the middle of the prefill, which takes several steps here."""
    with group_of_three(sound, options, step_tokens=64) as (group, victim):

        def between(done: int) -> None:
            if done == step:
                assert group.state.ready == (0, 1, 2)
                victim.signal(number)

        assert run(group, between) == plain()
        check_group(group, [2], (0, 1), "nothing received" if number is signal.SIGSTOP else "connection ended|sending a message")


@pytest.mark.slow
@LOSSES
def test_all_ranks_at_once(number: signal.Signals, options: ParallelismOptions) -> None:
    with (
        RankProcess(FAMILY, options=options) as one,
        RankProcess(FAMILY, options=options) as other,
        leader(options) as group,
    ):
        group.join(1, one)
        group.join(2, other)

        def between(done: int) -> None:
            if done == 5:
                assert group.state.ready == (0, 1, 2)
                one.signal(number)
                other.signal(number)

        assert run(group, between) == plain()
        check_group(group, [1, 2], (0,), ".")
        assert group.executor.begin_step() == 1


@pytest.mark.slow
@LOSSES
def test_a_rank_lost_while_nothing_runs(sound: Sound, number: signal.Signals, options: ParallelismOptions) -> None:
    with group_of_three(sound, options) as (group, victim):
        assert run(group) == plain()
        victim.signal(number)
        eventually(lambda: tended(group).losses == 1)
        assert run(group) == plain()
        check_group(group, [2], (0, 1), ".")


def tended(group: TinyGroup) -> GroupState:
    group.executor.check_liveness()
    return group.state


@pytest.mark.slow
@LOSSES
def test_a_rank_lost_in_the_middle_of_a_step(sound: Sound, number: signal.Signals, options: ParallelismOptions) -> None:
    """It has the step's message and is held up in its forward until the signal comes; the leader waits for it meanwhile."""
    with group_of_three(sound, options, Fault("hang", at=6)) as (group, victim):
        timer = threading.Timer(0.5, victim.signal, [number])

        def between(done: int) -> None:
            if done == 4:
                assert group.state.ready == (0, 1, 2)
                timer.start()

        assert run(group, between) == plain()
        timer.join()
        check_group(group, [2], (0, 1), ".")


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_forward_that_raises(sound: Sound, at: int) -> None:
    with group_of_three(sound, STEADY, Fault("raise", at), step_tokens=64) as (group, victim):
        assert run(group) == plain()
        check_group(group, [2], (0, 1), "RuntimeError: DefaultCPUAllocator: can't allocate memory")
        assert victim.alive  # it is for whoever supervises the ranks to end it


def test_a_rank_with_too_little_memory_for_the_texts() -> None:
    with RankProcess(FAMILY, options=STEADY, capacity=60) as small, leader(STEADY) as group:
        group.join(1, small)
        assert run(group) == plain()
        check_group(group, [1], (0,), "Error: .+")


def test_a_forward_that_hangs(sound: Sound) -> None:
    """The rank lives and says so: only the step's own limit tells."""
    options = replace(STEADY, step_timeout_s=1.0)
    with group_of_three(sound, options, Fault("hang", 4)) as (group, victim):
        assert run(group) == plain()
        check_group(group, [2], (0, 1), "one step")
        assert victim.alive


def test_a_text_that_is_not_the_leaders(sound: Sound, caplog: pytest.LogCaptureFixture) -> None:
    with group_of_three(sound, STEADY, Fault("corrupt", 5)) as (group, _):
        assert run(group) == plain()
        assert group.state.disagreements == 1
        check_group(group, [2], (0, 1), "hash")
        hashes = set(re.findall(r"\b[0-9a-f]{16}\b", group.state.last_loss or ""))
        assert len(hashes) == 2
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert any(all(one in error for one in hashes) for error in errors)


@pytest.mark.slow
@LOSSES
def test_a_rank_lost_while_it_computes_what_it_missed(sound: Sound, number: signal.Signals, options: ParallelismOptions) -> None:
    with RankProcess(FAMILY, options=options, fault=Fault("hang", 2)) as late, leader(options, step_tokens=16) as group:
        group.join(1, sound(options))

        def between(done: int) -> None:
            if done == 20:
                group.join(2, late)
            if done == 23:
                assert group.state.refilling == (2,)
                late.signal(number)
                eventually(lambda: tended(group).losses == 1)

        assert run(group, between) == plain()
        check_group(group, [2], (0, 1), ".")


def test_a_lost_rank_is_made_anew_and_takes_part_again(sound: Sound) -> None:
    with RankProcess(FAMILY, options=STEADY) as anew, group_of_three(sound, STEADY) as (group, victim):

        def between(done: int) -> None:
            if done == 3:
                victim.signal(signal.SIGKILL)
            if done == 5:
                eventually(lambda: tended(group).ready == (0, 1))
                group.join(2, anew)
            if done > 5:
                group.catch_up()

        assert run(group, between) == plain()
        check_group(group, [2], (0, 1, 2), ".")
        assert sum(len(step.rank_s) == 3 for step in group.times[5:]) > 3


def test_ranks_that_come_and_are_lost_one_after_another() -> None:
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(RankProcess(FAMILY, options=STEADY)) for _ in range(3)]
        group = stack.enter_context(leader(STEADY, step_tokens=32))

        def between(done: int) -> None:
            at, turn = divmod(done, 4)
            if at < len(processes) and turn == 0:
                group.join(1 + at, processes[at])
            if at < len(processes) and turn == 3:
                processes[at].signal(signal.SIGKILL)

        assert run(group, between) == plain()
        eventually(lambda: tended(group).losses == len(processes))
        check_group(group, [1, 2, 3], (0,), ".")


def test_a_rank_that_is_stopped_before_it_greets_does_not_hold_the_leader_up() -> None:
    with RankProcess(FAMILY, options=IMPATIENT) as process:
        address = process.address
        process.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(LINK_ERRORS):
            connect(address, SECRET, 1.0)
        assert time.monotonic() - began < 30.0


def test_a_new_leader_takes_a_rank_over_from_a_former_one(sound: Sound) -> None:
    with leader(STEADY) as former, leader(STEADY) as latest:
        for group in (former, latest):
            group.join(1, sound(STEADY))
            assert run(group) == plain()
            assert group.state.ready == (0, 1) and group.state.losses == 0
        assert run(former) == plain()  # without the rank
        assert 1 not in former.state.ready
