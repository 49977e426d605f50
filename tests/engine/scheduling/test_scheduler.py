"""Admission, order, row budget and preemption."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Sequence

import pytest

from outrider.configs.slices import EngineOptions
from outrider.decoding.request import QUARANTINE_TOKENS, Request, RequestState, SamplingParams
from outrider.engine.errors import QueueFullError, RequestError
from outrider.engine.scheduling.scheduler import OF_LATE_S, Place, RowAllotment, Scheduler


def request(
    name: str, prompt: int = 4, priority: int = 0, max_tokens: int = 50, account: str = "", weight: float = 1.0
) -> Request:
    return Request(name, [1] * prompt, SamplingParams(max_tokens=max_tokens), priority=priority, account=account, weight=weight)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def oldest_slot(request: Request, free: Sequence[int]) -> tuple[int, int]:
    return free[0], request.num_computed


def scheduler(
    *requests: Request,
    running: int = 2,
    step_tokens: int = 16,
    waiting: int = 1000,
    drafts: int = 3,
    clock: Clock | None = None,
    place: Place = oldest_slot,
) -> Scheduler:
    """To which some requests have come."""
    options = EngineOptions(running, step_tokens, waiting, scheduling_policy="priority", max_wait_s=30.0)
    made = Scheduler(options, drafts, place, clock or Clock())
    for one in requests:
        made.add(one)
    return made


def plan(of: Scheduler) -> dict[str, tuple[int, int]]:
    return {share.request.request_id: (share.end, share.draft_rows) for share in of.schedule()}


def compute(of: Scheduler, shares: Sequence[RowAllotment] | None = None) -> dict[str, tuple[int, int]]:
    """Schedules, where that is not done, and does the step: prefills advance, finished prefills emit a token."""
    shares = of.schedule() if shares is None else shares
    for share in shares:
        share.request.num_computed = share.end
        if share.end == share.request.num_tokens:
            share.request.commit([1])
    of.check_integrity()
    return {share.request.request_id: (share.end, share.draft_rows) for share in shares}


def end_the_finished(of: Scheduler) -> None:
    for one in list(of.running):
        if not one.remaining:
            of.remove(one)


def test_requests_wait_when_slots_are_full_and_follow_in_order() -> None:
    a, b, c, d = map(request, "abcd")
    s = scheduler(a, b, c, d)
    assert list(plan(s)) == ["a", "b"] and s.num_waiting == 2 and s.num_free_slots == 0
    s.remove(c)  # while it waits
    s.remove(a)
    assert a.state is RequestState.FINISHED and a.slot is None
    assert list(plan(s)) == ["b", "d"] and s.num_waiting == 0 and b.slot != d.slot
    s = scheduler(request("a"), running=1, waiting=2)
    compute(s)
    s.add(request("b"))
    s.preempt(s.running[0])
    assert list(plan(s)) == ["a"]  # before the later arrival
    s.add(request("c"))
    with pytest.raises(QueueFullError, match="max_waiting"):
        s.add(request("d"))
    assert s.num_waiting == 2


def test_long_prefills_are_cut_into_chunks_that_fit() -> None:
    s = scheduler(request("a", prompt=20), request("b", prompt=20))
    assert compute(s) == {"a": (16, 0)}
    assert compute(s) == {"a": (20, 0), "b": (12, 0)}
    assert compute(s) == {"a": (21, 3), "b": (20, 0)}


def two_that_decode_and_a_long_prompt() -> Scheduler:
    """``a`` and ``b`` have their first token, ``c`` comes with 100 of a prompt; steps have 16 rows."""
    s = scheduler(request("a"), request("b"), running=4, drafts=100)
    compute(s)
    s.add(request("c", prompt=100))
    return s


def test_prefills_get_the_rows_that_were_kept_for_drafts_and_not_drafted() -> None:
    s = two_that_decode_and_a_long_prompt()
    shares = s.schedule()
    for drafted, rows in ((10, 4), (3, 11), (0, 14)):
        assert [(share.request.request_id, share.end) for share in s.top_up(shares, drafted)] == [("a", 5), ("b", 5), ("c", rows)]
    s.running[-1].num_computed = 99
    compute(s)
    assert s.top_up(s.schedule(), 0) == s.schedule()  # nobody prefills


@pytest.mark.parametrize("seed", range(3))
def test_topped_up_steps_keep_to_the_budget_and_take_nothing_away(seed: int) -> None:
    rng = random.Random(seed)
    s = scheduler(running=6, step_tokens=20, drafts=9)
    for number in range(60):
        s.add(request(str(number), prompt=rng.choice((1, 3, 30, 300)), priority=rng.randrange(3), max_tokens=rng.randint(1, 20)))
    while s.running or s.num_waiting:
        planned = s.schedule()
        drafted = sum(rng.randint(0, share.draft_rows) for share in planned)
        shares = s.top_up(planned, drafted)
        rows = {share.request.request_id: share.end - share.request.num_computed for share in shares}
        assert drafted + sum(rows.values()) <= 20
        assert all(rows[one.request.request_id] >= one.end - one.request.num_computed for one in planned)
        lacking = [one for one in s.running if rows.get(one.request_id, 0) < one.num_tokens - one.num_computed]
        assert not lacking or drafted + sum(rows.values()) == 20  # none is left while somebody lacks some
        compute(s, shares)
        end_the_finished(s)


def test_drafts_never_take_the_rows_of_a_prefill_and_ranks_that_share_a_step_draft_as_many_times_more() -> None:
    """12 rows are for the two requests; 4 are kept for the prefill."""
    s = two_that_decode_and_a_long_prompt()
    shares = {share.request.request_id: (share.end, share.draft_rows) for share in s.schedule(2)}
    assert shares == {"a": (5, 10), "b": (5, 10), "c": (4, 0)}
    assert plan(s) == {"a": (5, 5), "b": (5, 5), "c": (4, 0)}  # and one rank again what it did before
    few = scheduler(request("a"))
    compute(few)
    assert few.schedule(4)[0].draft_rows == 12


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("running", "drafts"), [(1, 64), (3, 2), (5, 64), (7, 64), (8, 0)])
def test_rows_of_a_rank_never_exceed_the_budget(width: int, running: int, drafts: int) -> None:
    step_tokens = 17
    requests = (request(str(number), prompt=3 + number, max_tokens=2 + number) for number in range(running))
    s = scheduler(*requests, running=running, step_tokens=step_tokens, drafts=drafts)
    for _ in range(30):
        shares = s.schedule(width)
        partitioned = sum(-(-share.draft_rows // width) for share in shares)  # a rank gets no more of each tree
        assert partitioned + sum(share.end - share.request.num_computed for share in shares) <= step_tokens
        assert all(share.draft_rows <= drafts * width for share in shares)
        compute(s, shares)
        end_the_finished(s)
    assert not s.running


def test_an_urgent_request_preempts_the_least_urgent_and_latest() -> None:
    a, b = request("a", priority=1), request("b", priority=1)
    s = scheduler(a, b)
    compute(s)
    urgent = request("c", priority=0)
    s.add(urgent)
    assert list(plan(s)) == ["a", "c"]
    assert b.slot is None and b.num_computed == 0 and b.stats.preemptions == 1 and s.num_waiting == 1
    s.remove(urgent)
    assert plan(s)["b"] == (5, 0)  # prompt and output are computed again


def test_options_out_of_range_name_the_field_and_fcfs_has_no_priorities() -> None:
    for options in ({"max_running": 0}, {"kv_slots": 7}, {"max_waiting": -1}, {"max_step_tokens": 9}, {"max_wait_s": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Scheduler(EngineOptions(**options), 4, oldest_slot)
    s = Scheduler(EngineOptions(max_running=1), 3, oldest_slot)
    s.add(request("a"))
    with pytest.raises(RequestError, match="scheduling_policy") as refused:
        s.add(request("b", priority=-1))
    assert refused.value.field == "priority" and s.num_waiting == 1
    s.add(request("c"))
    assert list(compute(s)) == ["a"] and s.num_waiting == 1


def test_who_waited_for_too_long_takes_the_next_free_slot_and_keeps_it() -> None:
    clock = Clock()
    s = scheduler(request("urgent0", priority=-1), running=1, clock=clock)
    compute(s)
    s.add(request("later", priority=5))
    s.add(request("patient", priority=9))
    for at in range(1, 4):
        clock.now_s = 10.0 * at
        s.add(request(f"urgent{at}", priority=-1))
        assert list(compute(s)) == [f"urgent{at - 1}"]  # who runs is not put out by one as urgent
        s.remove(s.running[0])
        if at == 3:
            break
        compute(s)
    assert list(compute(s)) == ["later"]  # it came before patient: all waits are over at 30 s
    s.add(request("urgent4", priority=-100))
    assert list(compute(s)) == ["later"]
    s.remove(s.running[0])
    assert list(compute(s)) == ["patient"]
    s.remove(s.running[0])
    assert list(compute(s)) == ["urgent4"]


def test_waits_add_up_over_preemptions() -> None:
    clock, a = Clock(), request("a", priority=1)
    s = scheduler(a, running=1, clock=clock)
    compute(s)
    for at in range(3):
        urgent = request(f"urgent{at}", priority=0)
        s.add(urgent)
        assert list(compute(s)) == [urgent.request_id]
        clock.now_s += 10.0
        s.remove(urgent)
        assert list(compute(s)) == ["a"]
    assert a.waited_s == 30.0
    s.add(request("urgent3", priority=0))
    assert list(compute(s)) == ["a"] and a.stats.preemptions == 3


def test_short_prompts_pass_a_long_one_that_keeps_half_of_the_rows() -> None:
    s = scheduler(request("book", prompt=1000), running=4)
    assert compute(s) == {"book": (16, 0)}
    for name, prompt in (("chapter", 400), ("page", 40), ("line", 6)):
        s.add(request(name, prompt=prompt))
    assert compute(s) == {"book": (24, 0), "page": (2, 0), "line": (6, 0)}
    assert compute(s) == {"line": (7, 3), "book": (30, 0), "page": (8, 0)}  # 4 rows decode, 12 are left
    while (left := {r.request_id: r.num_computed for r in s.running})["page"] < 39:
        compute(s)
    assert left["book"] < 100 and left["chapter"] < 40  # what the shortest leaves of their half is the next one's


def test_a_more_urgent_prefill_passes_and_the_first_goes_on() -> None:
    s = scheduler(request("first", prompt=100, priority=1))
    compute(s)
    s.add(request("urgent", prompt=100, priority=0))
    assert compute(s) == {"first": (24, 0), "urgent": (8, 0)}
    s = scheduler(request("first", prompt=100))
    compute(s)
    s.add(request("less urgent", prompt=10, priority=1))
    assert compute(s) == {"first": (32, 0)}


def test_a_request_bounds_its_own_drafts() -> None:
    s = scheduler(request("a", max_tokens=2))
    compute(s)
    assert plan(s)["a"] == (5, 0)  # one token may still come, and that is the bonus token
    bounds = {"a": None, "b": 2, "c": 0}
    requests = (Request(name, [1] * 4, SamplingParams(max_tokens=50), max_draft_tokens=most) for name, most in bounds.items())
    s = scheduler(*requests, running=3, step_tokens=64, drafts=5)
    compute(s)
    assert plan(s) == {"a": (5, 5), "b": (5, 2), "c": (5, 0)}
    assert [share.draft_rows for share in s.schedule(3)] == [15, 6, 0]


def test_slots_are_given_by_whom_knows_what_they_hold() -> None:
    asked: list[tuple[str, list[int]]] = []

    def place(one: Request, free: Sequence[int]) -> tuple[int, int]:
        asked.append((one.request_id, list(free)))
        return free[-1], one.num_prompt - 2

    s = scheduler(*(request(name, prompt=10) for name in "abc"), running=3, place=place)
    assert compute(s) == {"a": (10, 0), "b": (10, 0), "c": (10, 0)}  # two rows each
    assert asked == [("a", [0, 1, 2]), ("b", [0, 1]), ("c", [0])]
    s.remove(s.running[1])
    s.remove(s.running[0])
    s.add(request("d"))
    compute(s)
    assert asked[-1] == ("d", [1, 2])  # the one that was released longest ago first


def of_scopes(prompt: int, *scopes: str | None) -> list[Request]:
    """Requests a, b, ... with their scopes."""
    made = [request(name, prompt=prompt) for name in "abc"]
    for one, scope in zip(made, scopes, strict=True):
        one.scope = scope
    return made


def test_who_needs_what_another_computes_waits_and_does_not_keep_its_rows() -> None:
    asked: list[tuple[str, int | None]] = []

    def place(one: Request, free: Sequence[int]) -> tuple[int, int]:
        asked.append((one.request_id, one.slot))
        others = [other.num_computed for other in s.running if other is not one and other.scope == one.scope]
        return free[0], max([one.num_computed, *(min(count, 69) for count in others)])

    s = scheduler(running=4, step_tokens=32, place=place)
    for one in of_scopes(70, "s", "s", "t"):
        s.add(one)
    assert compute(s) == {"a": (32, 0)}
    assert compute(s) == {"a": (64, 0)}
    assert compute(s) == {"a": (70, 0), "b": (70, 0), "c": (20, 0)}  # 6 tokens are not worth waiting for
    assert asked == [("a", None), ("b", None), ("c", None), ("b", 1), ("c", 2), ("b", 1), ("c", 2)]
    s = scheduler(*of_scopes(40, "s", "s", None), running=3, step_tokens=64)
    assert compute(s) == {"a": (40, 0), "c": (24, 0)}
    assert compute(s) == {"a": (41, 3), "b": (40, 0), "c": (40, 0)}


HARMS: dict[str, Callable[[Scheduler], object]] = {
    "a slot is lost": lambda s: setattr(s.running[0], "slot", None),
    "a slot is lent twice": lambda s: setattr(s.running[0], "slot", s.running[1].slot),
    "too much is computed": lambda s: setattr(s.running[0], "num_computed", s.running[0].num_tokens),
    "one ends in the queue": lambda s: setattr(list(s.requests())[-1], "state", RequestState.FINISHED),
    "one runs twice": lambda s: s.running.append(s.running[0]),
}


def test_check_integrity_finds_what_is_lost() -> None:
    for harm in HARMS.values():
        s = scheduler(*map(request, "abcd"), running=3)
        compute(s)
        s.check_integrity()
        harm(s)
        with pytest.raises(AssertionError):
            s.check_integrity()


def flood(of: Scheduler, account: str, count: int, weight: float = 1.0, prompt: int = 4) -> list[Request]:
    """Requests of an account, named by it and a number."""
    first = sum(one.account == account for one in of.requests())
    names = [f"{account}{first + number}" for number in range(count)]
    requests = [request(name, prompt, account=account, weight=weight) for name in names]
    for one in requests:
        of.add(one)
    return requests


def slots(of: Scheduler) -> dict[str, int]:
    """How many each account has."""
    return dict(collections.Counter(one.account for one in of.running))


def test_slots_are_shared_among_accounts_whoever_came_first() -> None:
    s = scheduler(running=8, step_tokens=64)
    flooding = flood(s, "a", 40)
    compute(s)
    assert slots(s) == {"a": 8}
    flood(s, "b", 1)
    compute(s)
    assert slots(s) == {"a": 7, "b": 1}
    assert [one.stats.preemptions for one in flooding[:8]] == [0] * 7 + [1]  # the latest gave its slot
    flood(s, "b", 9)
    flood(s, "c", 9, weight=2.0)
    compute(s)
    assert slots(s) == {"a": 2, "b": 2, "c": 4}
    taken = s.num_preemptions
    for _ in range(20):
        compute(s)
    assert s.num_preemptions == taken  # nobody takes a slot of another's share


def test_steps_are_short_where_several_accounts_come() -> None:
    clock = Clock()
    s = scheduler(running=4, step_tokens=64, clock=clock)
    flood(s, "a", 1, prompt=1000)
    assert compute(s) == {"a0": (64, 0)}
    flood(s, "b", 1, prompt=4)
    assert compute(s) == {"a0": (76, 0), "b0": (4, 0)}  # 16 rows of prompts
    s.remove(s.running[1])
    assert compute(s) == {"a0": (92, 0)}  # another one of b may come
    clock.now_s = OF_LATE_S + 1
    assert compute(s) == {"a0": (156, 0)}
    # Shorter still where one account has several slots.
    s = scheduler(running=4, step_tokens=64)
    flood(s, "b", 1)
    compute(s)
    s.remove(s.running[0])
    flood(s, "a", 2, prompt=1000)
    assert sum(end for end, _ in compute(s).values()) == 4
    flood(s, "b", 1, prompt=40)
    assert compute(s) == {"b0": (16, 0)}  # b's have a step for themselves
    assert sum(end for end, _ in compute(s).values()) == 4 + 16 + 4  # and share the next


def quarantined(name: str, prompt: int = 4, max_tokens: int = 50, account: str = "", weight: float = 1.0) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, [1] * prompt, params, account=account, weight=weight, quarantined=True)


def test_a_quarantined_request_is_computed_alone_in_every_second_step_until_it_is_cleared() -> None:
    s = scheduler(request("a"), request("long", prompt=40), running=3)
    compute(s)
    x = Request("x", [1] * 20, SamplingParams(max_tokens=50), emitted=(1, 1), quarantined=True)
    s.add(x)
    steps = [set(compute(s)) for _ in range(2 * (QUARANTINE_TOKENS + 1) - 1)]  # two of its steps are for its prompt
    assert steps[::2] == [{"x"}] * (QUARANTINE_TOKENS + 1) and all("a" in step and "x" not in step for step in steps[1::2])
    assert x.num_output - x.num_given == QUARANTINE_TOKENS
    assert set(compute(s)) == {"a", "long", "x"}


def test_a_quarantined_request_has_every_step_where_no_other_runs() -> None:
    s = scheduler(quarantined("x"))
    assert [set(compute(s)) for _ in range(5)] == [{"x"}] * 5
    s.add(request("a"))
    assert [set(compute(s)) for _ in range(4)] == [{"a"}, {"x"}, {"a"}, {"x"}]  # the earlier steps do not count
    with pytest.raises(QueueFullError):  # an account has one at a time
        s.add(quarantined("y"))
    s = scheduler(request("a"), running=1)
    compute(s)
    s.add(quarantined("x"))
    with pytest.raises(QueueFullError):
        s.add(quarantined("y"))
    s.add(quarantined("of another", account="b"))
    s.preempt(s.running[0])
    compute(s)
    s.remove(next(one for one in s.requests() if one.request_id == "x"))
    s.add(quarantined("y"))
    s.check_integrity()


@pytest.mark.parametrize(
    ("calm", "hostile"),
    [({"a": 1.0}, {"h": 1.0}), ({"a": 1.0, "b": 1.0, "c": 1.0}, {"h": 1.0}), ({"a": 3.0}, {"h": 1.0}), ({"a": 1.0}, {"h": 9.0}),
     ({"a": 1.0, "b": 2.0}, {"h": 1.0, "i": 2.0}), ({"a": 1.0}, {"h": 1.0, "i": 1.0, "j": 2.0}), ({"": 1.0}, {"h": 1.0})],
)  # fmt: skip
@pytest.mark.parametrize("prompt", [4, 2000])
def test_quarantined_requests_keep_to_the_share_of_their_account(
    calm: dict[str, float], hostile: dict[str, float], prompt: int
) -> None:
    """One account has four prompts coming at all times, each of which ends with its first token."""
    s = scheduler(running=8, step_tokens=512)
    for account, weight in calm.items():
        s.add(request(f"calm {account}", max_tokens=1000, account=account, weight=weight))
    compute(s)
    steps: collections.Counter[str] = collections.Counter()
    for number in range(400):
        for account, weight in hostile.items():
            for place in range(4):
                with contextlib.suppress(QueueFullError):
                    s.add(quarantined(f"{account} {number} {place}", prompt, 1, account, weight))
        computed = compute(s)
        running = {one.account for one in s.running if one.request_id in computed}
        assert len(running) == 1 or not running & hostile.keys()
        steps.update(running)
        end_the_finished(s)
    weights = {**calm, **hostile}
    for account, weight in hostile.items():
        fair = min(weight / sum(weights.values()), 0.5 * weight / sum(hostile.values()))
        assert abs(steps[account] - 400 * fair) <= 8, steps
    for account in calm:
        assert steps[account] >= 200 and steps[account] >= 400 * weights[account] / sum(weights.values()) - 8, steps


def in_turns(of: Scheduler, count: int) -> list[str]:
    """Who has the one slot, one after another."""
    order = []
    for _ in range(count):
        compute(of)
        order.append(of.running[0].request_id)
        of.remove(of.running[0])
    return order


def test_with_one_slot_accounts_take_turns_which_are_not_saved_up() -> None:
    s = scheduler(running=1)
    flood(s, "a", 10)  # in order of arrival these would be first
    compute(s)
    flood(s, "b", 3)
    assert in_turns(s, 8) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4"]
    s = scheduler(running=1)
    flood(s, "a", 6)
    in_turns(s, 4)
    flood(s, "b", 6)
    assert sorted(name[0] for name in in_turns(s, 4)) == ["a", "a", "b", "b"]


def test_an_account_preempts_neither_its_own_nor_more_urgent_requests() -> None:
    s = scheduler()
    flood(s, "a", 20)
    for _ in range(10):
        compute(s)
    assert s.num_preemptions == 0 and [one.request_id for one in s.running] == ["a0", "a1"]
    s = scheduler(*(request(f"urgent{number}", priority=-1, account="a") for number in range(4)))
    compute(s)
    flood(s, "b", 2)
    compute(s)
    assert slots(s) == {"a": 2}


def test_rows_of_prefills_are_shared_among_accounts() -> None:
    s = scheduler(running=4, step_tokens=256)  # a quarter of them for prompts of several accounts
    flood(s, "a", 1, prompt=1000)
    flood(s, "b", 1, prompt=20)
    flood(s, "c", 1, prompt=200)
    rows = plan(s)
    ends = {account: sum(end for name, (end, _) in rows.items() if name[0] == account) for account in "abc"}
    assert ends["b"] == 20 and ends["a"] == ends["c"] == 22


def test_a_short_prompt_passes_a_flood_which_waits_for_one_step_at_most() -> None:
    s = scheduler(running=4, step_tokens=64)
    flood(s, "a", 20)
    compute(s)
    ahead = []
    for _ in range(6):
        (one,) = flood(s, "b", 1, prompt=10)
        ahead.append(set(compute(s)) == {one.request_id})
        s.remove(one)
    assert ahead == [True, False] * 3
    s = scheduler(running=4, step_tokens=64)
    flood(s, "a", 20)
    compute(s)
    flood(s, "b", 1, prompt=10)
    flood(s, "c", 1, prompt=100)
    assert set(compute(s)) == {"b0", "c0"} and slots(s) == {"a": 2, "b": 1, "c": 1}
    flood(s, "d", 1)  # takes a slot of a's, which has no more than the others then
    for _ in range(3):
        assert set(compute(s)) == {"a0", "b0", "c0", "d0"}


@pytest.mark.parametrize(("seed", "odds", "most_late"), [(0, 0.0, 1), (1, 0.0, 1), (2, 0.0, 1), (3, 0.3, 3), (4, 0.3, 3)])
def test_nobody_is_lost_whatever_comes_and_goes(seed: int, odds: float, most_late: int) -> None:
    """Random arrivals and ends of accounts of several weights: after each step all is where it belongs, who decodes waits for one
    step at most, for three where some requests are quarantined (at these odds), and all end."""
    rng = random.Random(seed)
    s = scheduler(running=5, step_tokens=40)
    late = collections.Counter[str]()  # steps in a row
    for number in range(2000):
        if number < 300 and rng.random() < 0.7:
            account, priority = rng.choice("aaaaabc"), rng.choice([0, 0, 1])
            weight, prompt = {"a": 1.0, "b": 0.5, "c": 3.0}[account], rng.choice((1, 3, 30, 60, 300))
            came = request(f"{account}{number}", prompt, priority, rng.randint(1, 20), account, weight)
            came.quarantined = rng.random() < odds
            with contextlib.suppress(QueueFullError):
                s.add(came)
        decoding = {one.request_id for one in s.running if one.num_computed == one.num_tokens - 1 and not one.quarantined}
        computed = compute(s).keys()
        late = collections.Counter({one: late[one] + 1 for one in decoding & {one.request_id for one in s.running} - computed})
        assert max(late.values(), default=0) <= most_late
        end_the_finished(s)
        for one in [one for one in s.requests() if rng.random() < 0.02]:
            s.remove(one)
    assert not s.running and s.num_free_slots == 5 and s.num_waiting == 0


def decoding(as_published: bool | None, name: str = "a") -> Request:
    made = request(name, prompt=2)
    made.as_published, made.num_computed = as_published, 1
    return made


@pytest.mark.parametrize(
    ("published", "step_tokens", "rows"),
    [
        ((False, False), 40, (3, 3)),
        ((True, False), 40, (20, 3)),  # its largest tree
        ((True, False), 16, (11, 3)),  # 16 rows without two roots, and 3 of the other
        ((True, True), 40, (19, 19)),
        ((True, True), 16, (7, 7)),
        ((None, True), 6, (2, 2)),
    ],
)
def test_requests_drafted_for_as_published_share_the_rows_that_the_others_leave(
    published: tuple[bool | None, ...], step_tokens: int, rows: tuple[int, ...]
) -> None:
    options = EngineOptions(2, step_tokens)
    made = Scheduler(options, 3, lambda one, free: (free[0], 1), Clock(), largest_tree=20)
    for at, one in enumerate(published):
        made.add(decoding(one, str(at)))
    assert tuple(share.draft_rows for share in made.schedule()) == rows
