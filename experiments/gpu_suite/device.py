"""Measured device, a GPU, the double of one, or the CPU, and times of work on it.

Times are of CUDA events where CUDA computes, else of the host's clock. Cases take turns.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from outrider.engine.accelerator import accelerator, use

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Case:
    """Timed work: a launch, which may return before the device is done, and a function that waits for its result."""

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
    """Time cases in turns, so that a drift of the machine hits all alike.

    Each round calls every case ``often`` times and gives a median; ``warm`` calls before are untimed. The measurement ends after
    ``rounds``, or after the first round that is ``over``.
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
    """Return the seconds of one call: whole, on the GPU, and until the launch returned."""
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
    """Return ratios round by round."""
    return [one / other for one, other in zip(above, below, strict=False)]


def shown(figures: Mapping[str, float], unit: str = "", digits: int = 2) -> tuple[str, str]:
    """Format the median and the range of a ``spread``."""
    if not figures:
        return "n/a", ""
    low, high = (f"{figures[name]:.{digits}f}" for name in ("min", "max"))
    return f"{figures['median']:.{digits}f}{unit}", f"{low}-{high}"


NO_TIMES = {
    "cpu": "of a CPU: they say nothing of a GPU",
    "double": "of the double of a GPU, which computes on the CPU: they mean nothing",
}


@contextlib.contextmanager
def measured_on(device: str, double: bool) -> Iterator[None]:
    """Make a device the current one of this thread within a block; ``double``: install the double of a GPU before."""
    with contextlib.ExitStack() as stack:
        if double:
            torch.set_num_threads(1)  # several gain nothing with models as small, and wait for each other on a busy machine
            from outrider.experiments.device_double.gpu import DoubleGpu
            from outrider.experiments.device_double.loading import loading

            stack.enter_context(use(DoubleGpu(gpus=1)))
            stack.enter_context(loading())
        stack.enter_context(current(device))
        yield


def current(device: str) -> AbstractContextManager[Any]:
    """Make a device the current one of this thread within a block."""
    return accelerator().current(torch.device(device))


def is_cuda(device: str) -> bool:
    """Return whether CUDA computes there: not on a CPU, and not on the double of a GPU."""
    return device.startswith("cuda") and torch.cuda.is_available()


def wait(device: str) -> None:
    """Wait until the device has done all that it was given."""
    if device.startswith("cuda"):
        accelerator().synchronize(torch.device(device))


def empty_cache(device: str) -> None:
    """Return memory that no tensor uses to the GPU."""
    if device.startswith("cuda"):
        accelerator().empty_cache()
