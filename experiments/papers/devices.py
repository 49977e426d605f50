"""Time of a forward by its rows, and peak memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model import LoadedModel
from outrider.engine.measures.latency import Case, time_steps

_RESET_PEAK = "5"  # written to clear_refs, resets Linux's peak of resident memory


def step_ms(loaded: LoadedModel, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return the milliseconds of a forward and its argmax, the shortest of a few, for (rows, context) of one sequence.

    Cases that exceed the context are left out, and on a slow device the largest (see ``engine.measures.latency.time_steps``).
    """
    fitting = sorted({pair for pair in wanted if sum(pair) <= loaded.max_model_len})
    if not fitting:
        return {}
    runner = ModelRunner(loaded.model, 1, max(sum(pair) for pair in fitting) + 1)
    timings = time_steps(runner, [Case(1, rows, context) for rows, context in fitting])
    return {(case.rows, case.context): round(1e3 * seconds, 4) for case, seconds in timings.seconds.items()}


def peak_bytes(device: torch.device, work: Callable[[], None]) -> float | None:
    """Return the peak memory during ``work``: torch's on a GPU, else the resident memory of this process; None if unknown."""
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
