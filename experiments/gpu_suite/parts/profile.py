"""Which kernels a step is made of, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from outrider.decoding.sampling.ranking import argmax_rows
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.runner import ModelRunner
from outrider.experiments.gpu_suite import models
from outrider.experiments.gpu_suite.device import is_cuda, wait
from outrider.experiments.gpu_suite.parts.ceilings import roof_gb_s
from outrider.experiments.gpu_suite.report import Report, Setting

LONGEST = 10
_STEPS = 3


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``profile``: a plain step and one with many rows; of the preferred kind of runner also a trace for chrome://tracing."""
    roof = roof_gb_s(setting, report, kept)
    bench = models.bench(setting, report, kept)
    size = models.SIZES[bench.size]
    for kind in setting.kinds:
        if report.left_s() < 0:
            report.say(f"no time is left for {kind}")
            break
        with report.attempt(kind):
            runner = bench.runner(kind, report)
            models.fill_slot(runner, size.contexts[0], setting.seed)
            first, found = not any(name in report.found for name in setting.kinds), {}
            for rows in (size.rows[0], size.rows[-1]) if runner.fixed_rows is None else (1,):
                tree = models.random_tree(rows, bench.loaded.vocab_size, rows)
                batch = models.tree_batch(tree, size.contexts[0])
                trace = setting.out / f"profile-{bench.size}-{kind}-{rows}.json.gz" if first else None
                found[str(rows)] = kernel_time(setting.device, step_of(runner, batch), _STEPS, trace)
                least_s = sum(models.step_bytes(runner, size.contexts[0] + rows).values()) / (roof * 1e9)
                least_ms = None if runner.fixed_rows else 1e3 * least_s
                _tell(report, kind, rows, found[str(rows)], least_ms)
            report.found[kind] = found


def _tell(report: Report, kind: str, rows: int, found: dict[str, Any], least_ms: float | None) -> None:
    what = f"{kind} {rows} rows: kernels of a step, {found['launches']:.0f} launches"
    if found["step_ms"] is None:
        report.line(what, "n/a: no kernel was seen")
        return
    report.line(what, f"{found['step_ms']:.3f} ms", goal="" if least_ms is None else f"{least_ms / found['step_ms']:.2f} of roof")
    for kernel in found["longest"]:
        report.say(f"{rows} rows: {kernel['ms']:8.4f} ms in {kernel['calls']:6.1f} calls: {kernel['name']}")


def step_of(runner: ModelRunner, batch: Batch) -> Callable[[], object]:
    """A forward and the argmax of its rows."""
    return lambda: argmax_rows(runner.forward(batch))


def kernel_time(device: str, call: Callable[[], object], steps: int, trace: Any = None) -> dict[str, Any]:
    """Return the time of the kernels of a call; overlaps count twice.

    Args:
        device: torch's name of it; on a CPU the operators count as kernels.
        call: a step, warmed up.
        steps: calls to profile.
        trace: a path that ends in .json.gz, for the trace.

    Returns:
        ``step_ms`` and ``launches`` of one call, and its ``longest`` kernels; ``step_ms`` is None where no kernel was seen.
    """
    on_gpu = is_cuda(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    call()
    wait(device)
    with torch.inference_mode(), profile(activities=activities) as profiler:
        for _ in range(steps):
            call()
        wait(device)
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    kernels: list[tuple[float, float, str]] = []
    for entry in profiler.key_averages():
        if on_gpu and entry.device_type != DeviceType.CUDA:
            continue
        taken_us = entry.self_device_time_total if on_gpu else entry.self_cpu_time_total
        if taken_us > 0:
            kernels.append((taken_us / 1e3 / steps, entry.count / steps, entry.key))
    kernels.sort(reverse=True)
    longest = [{"ms": round(ms, 5), "calls": round(calls, 2), "name": name[:110]} for ms, calls, name in kernels[:LONGEST]]
    total = round(sum(ms for ms, _, _ in kernels), 4) if kernels else None
    return {"step_ms": total, "launches": round(sum(calls for _, calls, _ in kernels), 1), "longest": longest}
