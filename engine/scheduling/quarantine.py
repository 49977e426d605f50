"""Turns of quarantined requests, which are computed alone."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.decoding.request import Request


class QuarantineTurns:
    """Selection of the steps that compute one quarantined request alone.

    While others run, these get at most every second step, and each account at most its weighted share of the steps. In start-time
    fair queueing a turn costs an account 1 / weight of a virtual time that advances by 1 / (all weights) per step.

    Example: of two accounts with the same weight one has a quarantined request, and this has every second step. One of four has
    every fourth step; three of four have every sixth each.
    """

    def __init__(self) -> None:
        self._now = 0.0  # virtual time
        self._due: dict[str, float] = {}  # by account: virtual time of its next turn
        self._was_alone = False  # whether the last step was a turn

    def next(self, running: Sequence[Request]) -> Request | None:
        """Return the request that is computed alone in the next step; None if the step is for the other requests."""
        quarantined = [request for request in running if request.quarantined]
        was_alone, self._was_alone = self._was_alone, False
        if not quarantined:
            return None
        has_others = len(quarantined) < len(running)
        weights, own = ({one.account: one.weight for one in some} for some in (running, quarantined))
        self._now += 1 / max(sum(weights.values()), 2 * sum(own.values()))
        first = min(quarantined, key=lambda one: self._due.get(one.account, self._now))
        due = self._due.get(first.account, self._now)
        if has_others and (was_alone or due > self._now):
            return None
        self._now = max(self._now, due)
        self._due = {account: at for account, at in self._due.items() if account in own or at > self._now}
        self._due[first.account] = max(due + 1 / first.weight, self._now)
        self._was_alone = True
        return first
