"""What the steps of several ranks are made of beside compute, as ``outrider bench scaling`` tells it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from torch import distributed
from transformers import PreTrainedModel

from actors.lookahead.executor import StepTimes
from decoding.budget.latency import LatencyCurve, StepLoad
from experiments.guided_ranks import RankModel


@dataclass(frozen=True, slots=True)
class Spent:
    """What a form's steps were made of beside compute, added over steps after the first token."""

    exchange_s: float | None = 0.0  # messages, sums, and waiting for the slower; None where it cannot be told
    recompute_s: float = 0.0  # tokens that others had computed, on the slowest rank
    told: int = 0  # steps of a lookahead-parallel group, of which the following is known
    rows: float = 0.0  # of a rank
    recomputed: float = 0.0  # of these, computed by others before
    balance: float = 0.0  # the mean rank's time as a share of the slowest's
    shared: int = 0  # steps in which others had a part

    def __add__(self, other: Spent) -> Spent:
        total: dict[str, Any] = {}
        for field in fields(self):
            pair = getattr(self, field.name), getattr(other, field.name)
            total[field.name] = None if None in pair else sum(pair)
        return Spent(**total)


def shared_steps(steps: Sequence[StepTimes], curve: LatencyCurve) -> Spent:
    """What the steps of a lookahead-parallel group were made of.

    Recompute is what tokens that others had computed add to the slowest rank's rows by the measured curve.

    Example: the slowest rank computes 9 rows in 30 ms, 2 of them again; 9 rows take 29 ms by the curve and 7 take 26: 3 ms are
    recompute.
    """
    if not steps:
        return Spent()
    slowest = [int(np.argmax(step.rank_s)) for step in steps]
    rows = np.array([[step.rows[at], step.recomputed[at]] for step, at in zip(steps, slowest, strict=True)], np.float64)
    one = StepLoad(1, 1, curve.context)
    again = curve.seconds(rows[:, 0], one) - curve.seconds(rows[:, 0] - rows[:, 1], one)
    return Spent(
        exchange_s=sum(step.exchange_s for step in steps),
        recompute_s=float(again.sum()),
        told=len(steps),
        rows=float(sum(np.mean(step.rows) for step in steps)),
        recomputed=float(sum(np.mean(step.recomputed) for step in steps)),
        balance=float(sum(np.mean(step.rank_s) / max(step.rank_s) for step in steps)),
        shared=sum(len(step.rank_s) > 1 for step in steps),
    )


class CallClock:
    """Seconds spent in some calls, those of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, owner: Any, name: str) -> None:
        """Times a function that others call by its name: of a module, or of one object."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Loads the model in another rank of a pipeline, whose process then counts the seconds between what comes and what goes."""

    model: RankModel
    busy_s: Any  # [workers] float64, shared by the processes: of each rank

    def __call__(self) -> PreTrainedModel:
        """The whole model."""
        receive, send = distributed.recv, distributed.send
        came = 0.0

        def timed_receive(*args: Any, **kwargs: Any) -> Any:
            nonlocal came
            done = receive(*args, **kwargs)
            came = time.perf_counter()
            return done

        def timed_send(*args: Any, **kwargs: Any) -> Any:
            self.busy_s[distributed.get_rank()] += time.perf_counter() - came
            return send(*args, **kwargs)

        for name, call in (("recv", timed_receive), ("send", timed_send)):
            setattr(distributed, name, call)
        return self.model.load()
