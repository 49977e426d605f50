"""By which clock texts are old: none that jumped."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.cache_service.server.cache_server import AgeClock

DAY = 86400.0
TTL_S = 30 * DAY
START_S = 1.8e9


class Clocks:
    """An hour of looks, one a minute, at clocks that a test sets."""

    def __init__(self, ttl_s: float = TTL_S) -> None:
        self.steady_s, self.redis_ahead_s, self.wall_ahead_s = 5.0, 0.0, 0.0
        self.clock = AgeClock(ttl_s, lambda: self.true_s + self.wall_ahead_s, lambda: self.steady_s)

    @property
    def true_s(self) -> float:
        return START_S + self.steady_s

    def look(self, redis: float = 0.0, wall: float = 0.0, after_s: float = 60.0) -> float | None:
        """What is told a minute later, with the clocks so far ahead."""
        self.steady_s += after_s
        self.wall_ahead_s = wall
        return self.clock.look(self.true_s + redis)

    def settle(self, redis: float = 0.0, wall: float = 0.0) -> None:
        while self.look(redis, wall) is None:
            assert self.steady_s < 1e6


def test_nothing_is_told_before_the_clocks_have_run_evenly_for_an_hour() -> None:
    clocks = Clocks()
    assert [clocks.look() for _ in range(60)] == [None] * 60
    assert clocks.look() == clocks.true_s


JUMPS = [3600.0, 31 * DAY, 3650 * DAY, -3600.0, -31 * DAY, -3650 * DAY, 61.0]


@pytest.mark.parametrize("ahead_s", JUMPS)
@pytest.mark.parametrize("which", [("redis",), ("wall",), ("redis", "wall")])
def test_a_jump_is_told_in_one_line_and_not_believed(
    ahead_s: float, which: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    clocks = Clocks()
    clocks.settle()
    for _ in range(20):  # again and again
        for _ in range(5):
            assert clocks.look(**dict.fromkeys(which, ahead_s)) is None
        assert clocks.look() == clocks.true_s, "back where it was"
    jumped = [record for record in caplog.records if "jumped" in record.getMessage()]
    assert len(jumped) == 2 * 20 * len(which)


def test_a_clock_that_was_set_right_is_believed_after_an_hour() -> None:
    clocks = Clocks()
    clocks.settle()
    assert [clocks.look(31 * DAY, 31 * DAY) for _ in range(60)] == [None] * 60
    clocks.look(31 * DAY, 31 * DAY)
    assert clocks.look(31 * DAY, 31 * DAY) == clocks.true_s + 31 * DAY


def test_of_clocks_that_differ_for_good_the_earlier_counts(caplog: pytest.LogCaptureFixture) -> None:
    for redis, wall in ((31 * DAY, 0.0), (0.0, 31 * DAY)):
        clocks = Clocks()
        clocks.settle(redis, wall)
        assert clocks.look(redis, wall) == clocks.true_s
    assert sum("differ by" in record.getMessage() for record in caplog.records) == 2


def test_a_clock_that_is_slewed_or_a_look_that_is_late_is_no_jump(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    clocks.settle()
    assert all(clocks.look(ahead, ahead) is not None for ahead in np.arange(0.0, 500.0, 5.0))
    assert clocks.look(495.0, 495.0, after_s=9 * DAY) is not None and not caplog.records
