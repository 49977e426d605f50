"""Times of work on a device, in turns and with their spread: CUDA events where there are any, the clock of the host elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from outrider.experiments.gpu_suite.device import is_cuda, wait

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed: a launch, which may return before the device is done, and what waits for its result."""

    launch: Callable[[], Any]
    finish: Callable[[Any], object] | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, the median of each round."""

    wall_s: list[float] = field(default_factory=list)  # from the launch to the end of ``finish``
    gpu_s: list[float] = field(default_factory=list)  # between events around the launch; empty but with CUDA
    call_s: list[float] = field(default_factory=list)  # until the launch returned to the host


def in_turns(
    device: str,
    cases: Mapping[K, Case],
    rounds: int,
    often: int,
    over: Callable[[], bool] = lambda: False,
    warm: int = 2,
) -> dict[K, Times]:
    """Times cases in turns, so that a drift of the machine hits all alike.

    Args:
        device: torch's name of it.
        cases: at least one.
        rounds: the most of them; each gives a median.
        often: calls of each case in a round.
        over: asked after each round; True ends the measurement, when one round at least was made.
        warm: calls of each case before, untimed.
    """
    for case in cases.values():
        for _ in range(warm):
            _once(device, case)
    times: dict[K, Times] = {key: Times() for key in cases}
    for _ in range(rounds):
        for key, case in cases.items():
            taken = [_once(device, case) for _ in range(often)]
            for kept, values in zip(
                (times[key].wall_s, times[key].gpu_s, times[key].call_s), zip(*taken, strict=True), strict=True
            ):
                known = [value for value in values if value is not None]
                if known:
                    kept.append(statistics.median(known))
        if over():
            break
    return times


def _once(device: str, case: Case) -> tuple[float, float | None, float]:
    """Seconds of one call: whole, on the GPU, and until the launch returned."""
    events: list[Any] = []
    if is_cuda(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize(device)
        events[0].record()
    began = time.perf_counter()
    result = case.launch()
    called = time.perf_counter()
    if events:
        events[1].record()
    if case.finish is not None:
        case.finish(result)
    wait(device)
    ended = time.perf_counter()
    return ended - began, events[0].elapsed_time(events[1]) / 1e3 if events else None, called - began


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(above, below, strict=False)]


def shown(figures: Mapping[str, float], unit: str = "", digits: int = 2) -> tuple[str, str]:
    """The median and the range of a ``spread``, for a table."""
    if not figures:
        return "n/a", ""
    low, high = (f"{figures[name]:.{digits}f}" for name in ("min", "max"))
    return f"{figures['median']:.{digits}f}{unit}", f"{low}-{high}"
