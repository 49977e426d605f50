"""What a device takes for a forward of so many rows, and how much memory a run takes at its peak."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from engine.forward.runner import ModelRunner
from engine.loading.model import LoadedModel
from engine.measures.latency import Case, time_steps

_RESET_PEAK = "5"  # written to clear_refs: Linux counts the peak of resident memory anew


def step_ms(loaded: LoadedModel, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Milliseconds of a forward, its argmax included; the shortest of a few, as the one that was least disturbed.

    Args:
        loaded: the model.
        wanted: (rows, entries before them) of one sequence under a tree mask. What does not fit the context is left out, and on a
            slow device the largest (see ``engine.measures.latency.time_steps``).
    """
    fitting = sorted({pair for pair in wanted if sum(pair) <= loaded.max_model_len})
    if not fitting:
        return {}
    runner = ModelRunner(loaded.model, 1, max(sum(pair) for pair in fitting) + 1)
    timings = time_steps(runner, [Case(1, rows, context) for rows, context in fitting])
    return {(case.rows, case.context): round(1e3 * seconds, 4) for case, seconds in timings.seconds.items()}


def peak_bytes(device: torch.device, work: Callable[[], None]) -> float | None:
    """The most memory while something runs: of torch on a GPU, resident in this process elsewhere; None where it is not told.

    Args:
        device: where the model is.
        work: what runs.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return float(torch.cuda.max_memory_allocated(device))
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:  # no Linux, or not allowed in this container
        work()
        return None
    work()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return float(fields["VmHWM"].split()[0]) * 1024
