"""Admission, order, row budget and preemption."""

from __future__ import annotations

import pytest

from configs.slices import EngineOptions
from decoding.request import Request, RequestState, SamplingParams
from engine.errors import QueueFullError
from engine.scheduler import Scheduler


def request(name: str, prompt: int = 4, priority: int = 0, max_tokens: int = 50) -> Request:
    return Request(name, [1] * prompt, SamplingParams(max_tokens=max_tokens), priority=priority)


def scheduler(running: int = 2, step_tokens: int = 16, waiting: int = 10, drafts: int = 3) -> Scheduler:
    return Scheduler(EngineOptions(max_running=running, max_step_tokens=step_tokens, max_waiting=waiting), drafts)


def plan(of: Scheduler) -> dict[str, tuple[int, int]]:
    return {share.request.request_id: (share.end, share.draft_rows) for share in of.schedule()}


def compute(of: Scheduler) -> dict[str, tuple[int, int]]:
    """Schedules and does the step: prefills advance, finished prefills emit a token."""
    shares = of.schedule()
    for share in shares:
        share.request.num_computed = share.end
        if share.end == share.request.num_tokens:
            share.request.commit([1])
    return {share.request.request_id: (share.end, share.draft_rows) for share in shares}


def test_requests_wait_when_slots_are_full_and_follow_in_order() -> None:
    s = scheduler(running=2)
    a, b, c = request("a"), request("b"), request("c")
    for r in (a, b, c):
        s.add(r)
    assert list(plan(s)) == ["a", "b"] and s.num_waiting == 1 and s.num_free_slots == 0
    s.remove(a)
    assert a.state is RequestState.FINISHED and a.slot is None
    assert list(plan(s)) == ["b", "c"] and s.num_waiting == 0
    assert b.slot != c.slot


def test_long_prefills_are_cut_into_chunks_that_fit() -> None:
    s = scheduler(running=2, step_tokens=16)
    s.add(request("a", prompt=20))
    s.add(request("b", prompt=20))
    assert compute(s) == {"a": (16, 0)}
    assert compute(s) == {"a": (20, 0), "b": (12, 0)}
    assert compute(s) == {"a": (21, 3), "b": (20, 0)}


def test_drafts_never_take_the_rows_of_a_prefill() -> None:
    s = scheduler(running=3, step_tokens=16, drafts=100)
    s.add(request("a"))
    s.add(request("b"))
    compute(s)
    s.add(request("c", prompt=100))
    shares = plan(s)
    assert shares["a"] == shares["b"] == (5, 5)  # 12 rows for two requests; 4 are kept for the prefill
    assert shares["c"] == (4, 0)


def test_rows_of_a_step_never_exceed_the_budget() -> None:
    s = scheduler(running=4, step_tokens=8, drafts=9)
    for name in "abcd":
        s.add(request(name, prompt=7))
    for _ in range(40):
        shares = s.schedule()
        assert sum(share.end - share.request.num_computed + share.draft_rows for share in shares) <= 8
        for share in shares:
            share.request.num_computed = share.end
            if share.end == share.request.num_tokens:
                share.request.commit([1])
    assert all(r.num_output > 0 for r in s.running)


def test_ranks_that_share_a_step_draft_as_many_times_more() -> None:
    s = scheduler(running=3, step_tokens=16, drafts=100)
    s.add(request("a"))
    s.add(request("b"))
    compute(s)
    s.add(request("c", prompt=100))
    assert {share.request.request_id: (share.end, share.draft_rows) for share in s.schedule(2)} == {
        "a": (5, 10), "b": (5, 10), "c": (4, 0),
    }  # fmt: skip
    assert plan(s) == {"a": (5, 5), "b": (5, 5), "c": (4, 0)}  # and one rank again what it did before
    few = scheduler(drafts=3)
    few.add(request("a"))
    compute(few)
    assert few.schedule(4)[0].draft_rows == 12


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("running", "drafts"), [(1, 64), (3, 2), (5, 64), (7, 64), (8, 0)])
def test_rows_of_a_rank_never_exceed_the_budget(width: int, running: int, drafts: int) -> None:
    step_tokens = 17
    s = scheduler(running=running, step_tokens=step_tokens, drafts=drafts)
    for number in range(running):
        s.add(request(str(number), prompt=3 + number, max_tokens=2 + number))
    for _ in range(30):
        shares = s.schedule(width)
        dealt = sum(-(-share.draft_rows // width) for share in shares)  # a rank gets no more of each tree
        assert dealt + sum(share.end - share.request.num_computed for share in shares) <= step_tokens
        assert all(share.draft_rows <= drafts * width for share in shares)
        for share in shares:
            share.request.num_computed = share.end
            if share.end == share.request.num_tokens:
                share.request.commit([1])
                if not share.request.remaining:
                    s.remove(share.request)
    assert not s.running


def test_no_draft_beyond_the_end_of_a_request() -> None:
    s = scheduler(drafts=3)
    s.add(request("a", max_tokens=2))
    compute(s)
    assert plan(s)["a"] == (5, 0)  # one token may still come, and that is the bonus token


def test_an_urgent_request_preempts_the_least_urgent_and_latest() -> None:
    s = scheduler(running=2)
    a, b = request("a", priority=1), request("b", priority=1)
    s.add(a)
    s.add(b)
    compute(s)
    urgent = request("c", priority=0)
    s.add(urgent)
    assert list(plan(s)) == ["a", "c"]
    assert b.slot is None and b.num_computed == 0 and b.stats.preemptions == 1 and s.num_waiting == 1
    s.remove(urgent)
    assert plan(s)["b"] == (5, 0)  # prompt and output are computed again


def test_equal_priority_never_preempts() -> None:
    s = scheduler(running=1)
    s.add(request("a"))
    compute(s)
    s.add(request("b"))
    assert list(plan(s)) == ["a"]


def test_a_preempted_request_goes_before_later_arrivals() -> None:
    s = scheduler(running=1)
    a, b = request("a"), request("b")
    s.add(a)
    compute(s)
    s.add(b)
    s.preempt(a)
    assert list(plan(s)) == ["a"]


def test_a_full_queue_refuses() -> None:
    s = scheduler(running=1, waiting=1)
    s.add(request("a"))
    s.schedule()
    s.add(request("b"))
    with pytest.raises(QueueFullError, match="max_waiting"):
        s.add(request("c"))
    assert s.num_waiting == 1


def test_a_waiting_request_can_be_removed() -> None:
    s = scheduler(running=1)
    a, b, c = request("a"), request("b"), request("c")
    for r in (a, b, c):
        s.add(r)
    s.schedule()
    s.remove(b)
    s.remove(a)
    assert list(plan(s)) == ["c"]


@pytest.mark.parametrize(
    ("field", "options"),
    [("max_running", {"max_running": 0}), ("max_waiting", {"max_waiting": -1}), ("max_step_tokens", {"max_step_tokens": 9})],
)
def test_options_out_of_range_name_the_field(field: str, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=field):
        Scheduler(EngineOptions(**options), 4)
