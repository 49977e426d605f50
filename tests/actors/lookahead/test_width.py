"""Whether a step is shared: the faster way is taken, and the other one tried again; and what its messages take."""

from __future__ import annotations

import pytest

from outrider.actors.lookahead.width import WidthChoice, WidthChoices
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from tests.helpers.models import prepared, tiny_model
from tests.helpers.ranks import TinyGroup


def shared_steps(choice: WidthChoice, steps: int, shared_s: float, alone_s: float, shared_tokens: int = 3) -> list[bool]:
    """Whether each of so many steps is shared, where shared ones take so long and bring so much, the others two tokens."""
    taken = []
    for _ in range(steps):
        taken.append(choice.shared)
        choice.record_step(shared_tokens if choice.shared else 2, shared_s if choice.shared else alone_s)
    return taken


def test_both_are_tried_in_turns_and_the_faster_one_is_taken() -> None:
    taken = shared_steps(WidthChoice(), 64 + 16 * 34, shared_s=0.040, alone_s=0.020)
    assert taken[:64] == ([True] * 16 + [False] * 16) * 2
    blocks = [taken[at] for at in range(64, len(taken), 16)]
    assert blocks == ([False] * 16 + [True]) * 2  # one trial of seventeen is for the other


def test_sharing_is_kept_where_it_brings_more_tokens_a_second() -> None:
    taken = shared_steps(WidthChoice(), 64 + 16 * 17, shared_s=0.025, alone_s=0.020)  # 120 tokens a second beside 100
    assert sum(taken[64:]) == 16 * 16


def test_it_follows_what_changes() -> None:
    choice = WidthChoice()
    shared_steps(choice, 400, shared_s=0.040, alone_s=0.020)
    assert not choice.shared
    later = shared_steps(choice, 3000, shared_s=0.010, alone_s=0.020)
    assert sum(later[-1000:]) > 900


def test_each_load_and_each_number_of_ranks_has_its_own() -> None:
    choices = WidthChoices()
    assert choices.of(2, 2) is choices.of(2, 3)
    assert len({id(choices.of(ranks, requests)) for ranks in (2, 4) for requests in (1, 2, 4)}) == 6


def test_exchange_is_that_of_all_steps() -> None:
    drafter = prepared(build_drafter("recycling", {}), tiny_model("llama", "float32"))
    with TinyGroup("llama", drafter, world=2) as group:
        assert group.state.exchange_s == group.state.exchange_bytes == 0
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        first = group.run([Request("a", [5, 6, 7, 5, 6], params)])
        between, moved = group.state.exchange_s, group.state.exchange_bytes
        assert first == group.run([Request("b", [5, 6, 7, 5, 6], params)])
        assert 0.0 < between < group.state.exchange_s == pytest.approx(sum(step.exchange_s for step in group.times))
        assert 0 < moved < group.state.exchange_bytes
        assert group.engine.metrics().forward_s > group.state.exchange_s
