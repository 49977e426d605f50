"""Measured device (a GPU, the double of one, or the CPU) and timing: CUDA events on a GPU, the host's clock elsewhere."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from engine.accelerator import accelerator, use

K = TypeVar("K")


@contextlib.contextmanager
def measured_on(device: str, double: bool) -> Iterator[None]:
    """Make a device the current one of this thread within a block; ``double`` installs the double of a GPU first."""
    with contextlib.ExitStack() as stack:
        if double:
            torch.set_num_threads(1)  # more threads gain nothing with tiny models
            from experiments.device_double.gpu import DoubleGpu
            from experiments.device_double.loading import loading

            stack.enter_context(use(DoubleGpu(gpus=1)))
            stack.enter_context(loading())
        stack.enter_context(accelerator().current(torch.device(device)))
        yield


def is_cuda(device: str) -> bool:
    """Return whether a real GPU computes, not a CPU and not the double of a GPU."""
    return device.startswith("cuda") and torch.cuda.is_available()


def wait(device: str) -> None:
    """Wait for all queued work of the device."""
    if device.startswith("cuda"):
        accelerator().synchronize(torch.device(device))


def empty_cache(device: str) -> None:
    """Free unreachable objects, and return unused memory to the GPU."""
    gc.collect()
    if device.startswith("cuda"):
        accelerator().empty_cache()


def reserved_gib(device: str) -> float | None:
    """Return the memory that this process has reserved on a GPU; None for a CPU."""
    return round(accelerator().reserved(torch.device(device)) / 2**30, 2) if device.startswith("cuda") else None


@dataclass(frozen=True, slots=True)
class Case:
    """Timed work: a launch, which may return before the device is done, and a function that waits for its result."""

    launch: Callable[[], Any]
    finish: Callable[[Any], object] | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: the median of each round."""

    wall_s: list[float] = field(default_factory=list)  # from the launch to the end of ``finish``
    gpu_s: list[float] = field(default_factory=list)  # between events around the launch; empty without CUDA
    call_s: list[float] = field(default_factory=list)  # until the launch returned to the host


def in_turns(
    device: str,
    cases: Mapping[K, Case],
    rounds: int,
    often: int,
    over: Callable[[], bool] = lambda: False,
    warm: int = 2,
) -> dict[K, Times]:
    """Time cases in turns, so that a drift of the machine affects all alike.

    Args:
        rounds: maximum; each round gives a median.
        often: calls of each case in a round.
        over: called after each round; True ends the measurement.
        warm: untimed calls of each case before.
    """
    for case in cases.values():
        for _ in range(warm):
            _once(device, case)
    times: dict[K, Times] = {key: Times() for key in cases}
    for _ in range(rounds):
        for key, case in cases.items():
            taken = [_once(device, case) for _ in range(often)]
            kept = times[key].wall_s, times[key].gpu_s, times[key].call_s
            for seconds, values in zip(kept, zip(*taken, strict=True), strict=True):
                known = [value for value in values if value is not None]
                if known:
                    seconds.append(statistics.median(known))
        if over():
            break
    return times


def _once(device: str, case: Case) -> tuple[float, float | None, float]:
    """Return seconds of one call: whole, on the GPU, and until the launch returned."""
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
    """Return the ratios, round by round."""
    return [one / other for one, other in zip(above, below, strict=False)]
