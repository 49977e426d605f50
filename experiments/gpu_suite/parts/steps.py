"""How long a step takes: of forwards of any number of rows against what their bytes allow, and of many rows against one."""

from __future__ import annotations

import time
from typing import Any

import torch

from outrider.decoding.sampling.ranking import argmax_rows
from outrider.engine.accelerator import accelerator
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.runner import ModelRunner
from outrider.experiments.bench.record import spread
from outrider.experiments.gpu_suite import models
from outrider.experiments.gpu_suite.device import Case, Times, in_turns, ratios, shown
from outrider.experiments.gpu_suite.parts.ceilings import roof_gb_s
from outrider.experiments.gpu_suite.report import Report, Setting

ROOF_GOAL, ROWS_GOAL = 0.85, 1.10  # of the roof, plain decoding at the shorter context; 64 rows over one, there
_ROUNDS, _OFTEN = 5, 4

Key = tuple[int, int]  # context and rows


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``steps``: forward and argmax of one sequence's tree, for every kind of runner."""
    roof = roof_gb_s(setting, report, kept)
    report.found["roof_gb_s"] = roof
    bench = models.bench(setting, report, kept)
    for number, kind in enumerate(setting.kinds):
        with report.attempt(kind):
            ends = report.ends_left_s(number, len(setting.kinds))
            report.found[kind] = _measure_kind(bench, kind, roof, report, ends)


def _measure_kind(bench: models.Bench, kind: str, roof: float, report: Report, ends_left_s: float) -> dict[str, Any]:
    """All contexts and rows with one runner, until so many seconds of the part are left."""
    size = models.SIZES[bench.size]
    began = time.perf_counter()
    runner = bench.runner(kind, report)
    models.fill_slot(runner, max(size.contexts), bench.setting.seed)
    cases: dict[Key, Case] = {}
    for context in size.contexts:
        # Where each forward computes so many rows, steps of fewer take as long.
        fixed = runner.fixed_rows
        for rows in size.rows if fixed is None else (1, fixed + 1):
            tree = models.random_tree(rows, bench.loaded.vocab_size, rows)
            cases[context, rows] = forward_case(runner, models.tree_batch(tree, context))
    device = bench.setting.device
    in_turns(device, cases, 1, 1, warm=1)  # kernels are chosen, graphs captured
    ready_s = time.perf_counter() - began
    report.say(f"{kind} is ready after {ready_s:.1f} s")
    times = in_turns(device, cases, _ROUNDS, _OFTEN, lambda: report.left_s() < ends_left_s, warm=1)
    figures = {"ready_s": round(ready_s, 2), "fixed_rows": runner.fixed_rows, "cases": _figures(runner, times, roof)}
    if device.startswith("cuda"):
        figures["reserved_gib"] = round(accelerator().reserved(torch.device(device)) / 2**30, 2)
    _tell(report, kind, size, figures)
    return figures


def forward_case(runner: ModelRunner, batch: Batch) -> Case:
    """A forward, and the argmax that waits for it."""
    return Case(lambda: runner.forward(batch), argmax_rows)


def _figures(runner: ModelRunner, times: dict[Key, Times], roof: float) -> dict[str, Any]:
    """Return milliseconds by ``context/rows``, with their spread over rounds; where forwards have any number of rows, also the
    share of the roof and the ratio to one row."""
    figures: dict[str, Any] = {}
    for (context, rows), taken in times.items():
        needed = models.step_bytes(runner, context + rows)
        least_s = sum(needed.values()) / (roof * 1e9)
        figures[f"{context}/{rows}"] = {
            "context": context,
            "rows": rows,
            "wall_ms": spread(taken.wall_s, 4, 1e3),
            "gpu_ms": spread(taken.gpu_s, 4, 1e3),
            "host_ms": spread([wall - gpu for wall, gpu in zip(taken.wall_s, taken.gpu_s, strict=False)], 4, 1e3),
            "call_ms": spread(taken.call_s, 4, 1e3),
        }
        if runner.fixed_rows is None:
            figures[f"{context}/{rows}"] |= {
                "bytes": needed,
                "least_ms": round(1e3 * least_s, 4),
                "of_roof": spread([least_s / seconds for seconds in taken.wall_s], 4),
                "over_one_row": spread(ratios(taken.wall_s, times[context, 1].wall_s), 4),
            }
    return figures


def _tell(report: Report, kind: str, size: models.Size, figures: dict[str, Any]) -> None:
    fixed = figures["fixed_rows"]
    if fixed is not None:
        for context in size.contexts:
            for rows, what in ((1, f"a forward of {fixed} rows"), (fixed + 1, "two of them")):
                report.line(f"{kind} at {context}: {what}", *shown(figures["cases"][f"{context}/{rows}"]["wall_ms"], " ms"))
        return
    near, most = size.contexts[0], size.rows[-1]
    for context in size.contexts:
        case = figures["cases"][f"{context}/1"]
        goal = f">= {ROOF_GOAL:.2f}" if context == near else ""
        met = case["of_roof"]["median"] >= ROOF_GOAL if goal else None
        at = f"wall {case['wall_ms']['median']:.2f} ms, call {case['call_ms']['median']:.2f} ms"
        report.line(f"{kind} 1 row at {context}: {at}", *shown(case["of_roof"], " of roof"), goal, met)
    case = figures["cases"][f"{near}/{most}"]
    met = case["over_one_row"]["median"] <= ROWS_GOAL
    what = f"{kind} {most} rows at {near}: wall {case['wall_ms']['median']:.2f} ms"
    report.line(what, *shown(case["over_one_row"], " x 1 row"), f"<= {ROWS_GOAL:.2f}", met)
