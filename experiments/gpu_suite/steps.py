"""Times of the device: its memory bandwidth, decoding steps against it, prefills, and the kernels of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from configs.slices import EngineOptions
from decoding.sampling.ranking import argmax_rows
from decoding.tree import DraftTree
from engine.accelerator import accelerator
from engine.forward.batch import Line, LineWork, pack
from engine.forward.runner import ModelRunner
from experiments.bench.record import spread
from experiments.gpu_suite import models
from experiments.gpu_suite.device import Case, Times, in_turns, is_cuda, ratios, reserved_gib, wait
from experiments.gpu_suite.worker import Report, Setting, UnavailableError

ROOF_GOAL, ROWS_GOAL = 0.85, 1.10  # one row's share of the bandwidth, most rows over one; both at the shorter context
_ROUNDS, _OFTEN = 5, 4
_PREFILL_ROUNDS = 3
_PROFILED, _LONGEST = 3, 10  # steps that are profiled, kernels that are named


@torch.inference_mode()
def measure_ceilings(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Measure GB/s (1e9 bytes) of a copy (read and written), of a sum and of a matrix with a vector, and TFLOP/s of a product.

    ``read_best_gb_s``, the largest of the three medians, is what steps are compared with.
    """
    device, large = setting.device, is_cuda(setting.device)
    report.found["device"] = _describe(device)
    report.say(str(report.found["device"]))
    rows, columns, size = (131_072, 16_384, 8192) if large else (512, 1024, 256)  # 4 GiB of bfloat16 on a GPU
    source = torch.randn(columns, device=device).to(torch.bfloat16).repeat(rows, 1)
    target, vector = torch.empty_like(source), torch.randn(columns, device=device).to(torch.bfloat16)
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    memory = {
        "copy_gb_s": Case(lambda: target.copy_(source)),
        "read_gb_s": Case(lambda: source.sum(dtype=torch.float32)),
        "gemv_gb_s": Case(lambda: source @ vector),
    }
    work = {"copy_gb_s": 2e-9 * source.nbytes, "read_gb_s": 1e-9 * source.nbytes, "gemv_gb_s": 1e-9 * source.nbytes}
    work["matmul_tflop_s"] = 2e-12 * size**3
    times = in_turns(device, memory, _ROUNDS, 5 if large else 1)
    times |= in_turns(device, {"matmul_tflop_s": Case(lambda: left @ right)}, _ROUNDS, 10 if large else 1)
    report.found |= {"buffer_bytes": source.nbytes, "matmul_size": size}
    for name, amount in work.items():
        taken = times[name]
        report.found[name] = spread([amount / seconds for seconds in taken.gpu_s or taken.wall_s], 2)
        what, unit = name.split("_", 1)
        report.figure(what, report.found[name], {"gb_s": "GB/s", "tflop_s": "TFLOP/s"}[unit], digits=1)
    report.found["read_best_gb_s"] = max(report.found[name]["median"] for name in memory)


def _describe(device: str) -> dict[str, Any]:
    if not device.startswith("cuda"):
        return {"name": device}
    gpu, number = accelerator(), torch.device(device)
    memory_gib = round(gpu.memory(number)[1] / 2**30, 1)
    return {"name": gpu.name(number), "capability": gpu.capability(number), "memory_gib": memory_gib, "cuda": torch.version.cuda}


def roof_gb_s(setting: Setting, report: Report, kept: dict[str, Any]) -> float:
    """Return the bandwidth to compare steps with, measured now if no earlier part did."""
    if setting.read_gb_s is not None:
        return setting.read_gb_s
    if "roof_gb_s" not in kept:
        own = Report(report.job, report.limit_s, lambda message: None)
        measure_ceilings(setting, own, kept)
        kept["roof_gb_s"] = own.found["read_best_gb_s"]
    roof: float = kept["roof_gb_s"]
    return roof


def measure_steps(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Measure forward and argmax of one sequence's tree, by context and rows, for every kind of runner."""
    roof = report.found["roof_gb_s"] = roof_gb_s(setting, report, kept)
    bench = models.bench(setting, report, kept)
    size = models.SIZES[bench.size]

    def measure(kind: str, over: Callable[[], bool]) -> None:
        began = time.perf_counter()
        runner = bench.runner(kind, report)
        models.fill_slot(runner, max(size.contexts))
        # If each forward computes a fixed number of rows, steps of fewer take as long.
        fixed = runner.fixed_rows
        keys = [(context, rows) for context in size.contexts for rows in (size.rows if fixed is None else (1, fixed + 1))]
        cases = {(context, rows): models.step_case(runner, rows, context) for context, rows in keys}
        in_turns(setting.device, cases, 1, 1, warm=1)  # chooses kernels, captures graphs
        ready_s = time.perf_counter() - began
        report.say(f"{kind} is ready after {ready_s:.1f} s")
        figures = _step_figures(runner, in_turns(setting.device, cases, _ROUNDS, _OFTEN, over, warm=1), roof)
        report.found[kind] = {"ready_s": round(ready_s, 2), "fixed_rows": fixed, "cases": figures}
        report.found[kind]["reserved_gib"] = reserved_gib(setting.device)
        for context in size.contexts:
            _tell_steps(report, kind, context, {rows: figures[f"{at}/{rows}"] for at, rows in keys if at == context}, size)

    report.each(setting.kinds, measure)


def _step_figures(runner: ModelRunner, times: dict[tuple[int, int], Times], roof: float) -> dict[str, dict[str, Any]]:
    """Return milliseconds by ``context/rows``; without fixed rows also the share of the roof and the ratio to one row."""
    figures: dict[str, Any] = {}
    for (context, rows), taken in times.items():
        own: dict[str, Any] = {
            "wall_ms": spread(taken.wall_s, 4, 1e3),
            "gpu_ms": spread(taken.gpu_s, 4, 1e3),
            "host_ms": spread([wall - gpu for wall, gpu in zip(taken.wall_s, taken.gpu_s, strict=False)], 4, 1e3),
            "call_ms": spread(taken.call_s, 4, 1e3),
        }
        if runner.fixed_rows is None:
            needed = models.step_bytes(runner, context + rows)
            least_s = sum(needed.values()) / (roof * 1e9)
            own |= {
                "bytes": needed,
                "least_ms": round(1e3 * least_s, 4),
                "of_roof": spread([least_s / seconds for seconds in taken.wall_s], 4),
                "over_one_row": spread(ratios(taken.wall_s, times[context, 1].wall_s), 4),
            }
        figures[f"{context}/{rows}"] = own
    return figures


def _tell_steps(report: Report, kind: str, context: int, by_rows: dict[int, Any], size: models.Size) -> None:
    most = max(by_rows)
    if "of_roof" not in by_rows[1]:  # fixed rows: one forward, and two
        for rows, forwards in ((1, "one forward"), (most, "two forwards")):
            report.figure(f"{kind} {forwards} of {most - 1} rows at {context}", by_rows[rows]["wall_ms"], "ms")
        return
    near = context == size.contexts[0]
    share = by_rows[1]["of_roof"]
    at = ", ".join(f"{name} {by_rows[1][f'{name}_ms']['median']:.2f} ms" for name in ("wall", "call"))
    goal, met = (f">= {ROOF_GOAL:.2f}", share["median"] >= ROOF_GOAL) if near else ("", None)
    report.figure(f"{kind} 1 row at {context}: {at}", share, "of roof", goal, met)
    if near:
        over_one, wall_ms = by_rows[most]["over_one_row"], by_rows[most]["wall_ms"]["median"]
        what = f"{kind} {most} rows at {context}: wall {wall_ms:.2f} ms"
        report.figure(what, over_one, "x 1 row", f"<= {ROWS_GOAL:.2f}", over_one["median"] <= ROWS_GOAL)


def measure_prefill(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Measure one prompt at a time, until the host has its first token, for every kind of runner."""
    bench = models.bench(setting, report, kept)

    def measure(kind: str, over: Callable[[], bool]) -> None:
        runner = bench.runner(kind, report)
        report.found[kind] = {}
        for length in models.SIZES[bench.size].prompts:
            case = prefill_case(runner, length)
            taken = in_turns(setting.device, {0: case}, _PREFILL_ROUNDS, 1, over, warm=1)[0]
            rate = spread([length / seconds for seconds in taken.wall_s], 1)
            figures = {"wall_ms": spread(taken.wall_s, 3, 1e3), "call_ms": spread(taken.call_s, 3, 1e3), "tokens_per_s": rate}
            report.found[kind][str(length)] = figures
            report.figure(f"{kind} prompt of {length}: {rate['median']:.0f} tok/s", figures["wall_ms"], "ms", digits=1)
            report.save()

    report.each(setting.kinds, measure)


def prefill_case(runner: ModelRunner, length: int) -> Case:
    """Return the forwards of a random prompt as an engine cuts them; the last one computes the logits of its last token."""
    text = np.random.default_rng(models.SEED).integers(0, runner.model.config.vocab_size, length).astype(np.int32)
    piece, line = EngineOptions().max_step_tokens, Line(0, text)
    starts = range(0, length, piece)
    batches = [pack([LineWork(line, start, start + piece, None)]) for start in starts[:-1]]
    batches.append(pack([LineWork(line, starts[-1], length, DraftTree.chain(int(text[-1]), []))]))
    return Case(lambda: [runner.forward(batch) for batch in batches][-1], argmax_rows)


def measure_profile(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Profile a plain step and one with many rows; the first kind of runner also gets traces for chrome://tracing."""
    roof = roof_gb_s(setting, report, kept)
    bench = models.bench(setting, report, kept)
    size = models.SIZES[bench.size]
    context = size.contexts[0]

    def measure(kind: str, over: Callable[[], bool]) -> None:
        first = not any(name in report.found for name in setting.kinds)
        if not first and report.left_s() < 0:
            raise UnavailableError("no time was left")
        runner = bench.runner(kind, report)
        models.fill_slot(runner, context)
        report.found[kind] = {}
        for rows in (size.rows[0], size.rows[-1]) if runner.fixed_rows is None else (1,):
            trace = setting.out / f"profile-{bench.size}-{kind}-{rows}.json.gz" if first else None
            found = report.found[kind][str(rows)] = kernel_times(setting.device, models.step_case(runner, rows, context), trace)
            what = f"{kind} {rows} rows: kernels of a step, {found['launches']:.0f} launches"
            if found["step_ms"] is None:
                report.line(what, "n/a: no kernel was seen")
                continue
            least_ms = sum(models.step_bytes(runner, context + rows).values()) / (roof * 1e6)
            share = f"{least_ms / found['step_ms']:.2f} of roof" if runner.fixed_rows is None else ""
            report.line(what, f"{found['step_ms']:.3f} ms", goal=share)
            for kernel in found["longest"]:
                report.say(f"{rows} rows: {kernel['ms']:8.4f} ms in {kernel['calls']:6.1f} calls: {kernel['name']}")

    report.each(setting.kinds, measure)


def kernel_times(device: str, step: Case, trace: Any) -> dict[str, Any]:
    """Profile a step; on a CPU its operators count as kernels, and overlaps count twice.

    Args:
        trace: path ending in .json.gz for the trace, or None.

    Returns:
        ``step_ms`` (None if no kernel was seen) and ``launches`` of one step, and its ``longest`` kernels.
    """
    assert step.finish is not None
    on_gpu = is_cuda(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    step.finish(step.launch())
    wait(device)
    with torch.inference_mode(), profile(activities=activities) as profiler:
        for _ in range(_PROFILED):
            step.finish(step.launch())
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
            kernels.append((taken_us / 1e3 / _PROFILED, entry.count / _PROFILED, entry.key))
    kernels.sort(reverse=True)
    longest = [{"ms": round(ms, 5), "calls": round(calls, 2), "name": name[:110]} for ms, calls, name in kernels[:_LONGEST]]
    total = round(sum(ms for ms, _, _ in kernels), 4) if kernels else None
    return {"step_ms": total, "launches": round(sum(calls for _, calls, _ in kernels), 1), "longest": longest}
