"""When a request is asked for drafts."""

from __future__ import annotations

import itertools

from outrider.decoding.budget.draft_budget import Backoff, Explorer


def steps_between(requests: int, proposals: int) -> list[int]:
    """Steps that a request which never finds anything is left alone for after each of its proposals."""
    backoff, waits = Backoff(), []
    for number in range(1, proposals + 1):
        backoff.drafted(0, requests, number, 0.0, 0.0)
        waits.append(0)
        while not backoff.should_draft():
            waits[-1] += 1
    return waits


def test_a_request_alone_is_always_asked() -> None:
    assert steps_between(1, 10) == [0] * 10


def test_among_many_it_is_asked_less_and_less() -> None:
    assert steps_between(8, 6) == [0, 1, 2, 4, 7, 7]
    assert steps_between(64, 8) == [0, 1, 2, 4, 8, 16, 16, 16]
    assert steps_between(3, 4) == [0, 1, 2, 2]


def test_a_draft_ends_the_count() -> None:
    backoff = Backoff()
    for number in range(1, 6):
        backoff.drafted(0, 64, number, 0, 0.0)
    while not backoff.should_draft():
        pass
    backoff.drafted(3, 64, 6, 3, 0.0)
    assert backoff.should_draft() and backoff.drafted_at == 6
    backoff.drafted(0, 64, 7, 0, 0.0)
    assert backoff.should_draft()  # once without is no habit


def test_drafts_that_save_less_than_asking_are_none() -> None:
    backoff = Backoff()
    for number in range(1, 40):
        backoff.drafted(4, 64, number, saved_s=1e-5, asking_s=5e-5)
        waited = 0
        while not backoff.should_draft():
            waited += 1
    assert waited == 16 and backoff.drafted_at == 39
    backoff.drafted(4, 64, 40, saved_s=1e-3, asking_s=5e-5)
    assert backoff.should_draft()
    backoff.drafted(4, 64, 41, saved_s=1e-5, asking_s=5e-5)
    assert backoff.should_draft()  # of late it was worth it


def test_a_fallen_load_asks_at_once() -> None:
    backoff = Backoff()
    for number in range(1, 6):
        backoff.drafted(0, 64, number, 0, 0.0)
    backoff.end_step()
    assert backoff.should_draft()
    backoff.drafted(0, 64, 6, 0, 0.0)
    assert backoff.should_draft()


def test_nobody_explores_while_all_draft() -> None:
    backoffs, explorer = [Backoff(), Backoff()], Explorer()
    for number in range(1, 100):
        assert explorer.pick(backoffs, number) is None
        for backoff in backoffs:
            backoff.drafted(1, 2, number, 1, 0.0)


def test_who_drafted_nothing_for_longest_explores_one_proposal_in_sixteen() -> None:
    backoffs, explorer, picked = [Backoff(), Backoff(), Backoff()], Explorer(), []
    backoffs[0].drafted(1, 3, 1, 1, 0.0)
    for number in range(2, 2 + 16 * 6):
        at = explorer.pick(backoffs, number)
        if at is not None:
            picked.append((number, at))
            backoffs[at].drafted(2, 3, number, 2, 0.0)
    assert len(picked) == 6
    assert [at for _, at in picked[:3]] == [1, 2, 0]  # the first of those that never drafted, then by how long ago
    assert all(later - earlier == 16 for (earlier, _), (later, _) in itertools.pairwise(picked))
