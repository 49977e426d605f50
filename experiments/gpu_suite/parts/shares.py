"""What lookahead parallelism would gain: shares of a tree timed one after another on one device, and an exchange on this host.

A prediction from parts, no run on several GPUs: it takes every rank for a device as fast as this one, with nothing shared among
them, and the exchange for that between processes of this host, in which nobody computes meanwhile.
"""

from __future__ import annotations

import statistics
from typing import Any

from experiments.bench.record import spread
from experiments.gpu_suite import models
from experiments.gpu_suite.clock import Times, in_turns, shown
from experiments.gpu_suite.parts.exchange import exchange_s
from experiments.gpu_suite.parts.steps import forward_case
from experiments.gpu_suite.report import Report, Setting, UnavailableError

RANKS = (1, 2, 4, 8)
_TREES = (64, 256)  # rows
_ROUNDS, _OFTEN = 5, 3
_EXCHANGES = 300


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``shares``: with the preferred kind of runner that there is."""
    report.found["prediction"] = "from parts, one after another on one device: no run on several"
    exchange = {1: 0.0}
    report.found["exchange_us"] = {}
    for ranks in RANKS[1:]:
        taken = exchange_s(ranks, _EXCHANGES)
        exchange[ranks] = statistics.median(taken)
        report.found["exchange_us"][str(ranks)] = spread(taken, 1, 1e6)
    report.say(f"exchange, us: {report.found['exchange_us']}")
    bench = models.bench(setting, report, kept)
    for kind in setting.kinds:
        with report.attempt(kind):
            runner = bench.runner(kind, report)
            context = models.SIZES[bench.size].contexts[0]
            models.fill_slot(runner, context, setting.seed)
            cases, rows = {}, {}
            for tree_rows in _TREES:
                tree = models.random_tree(tree_rows, bench.loaded.vocab_size, tree_rows)
                for ranks in RANKS:
                    parts = [part.tree for part in tree.partition(ranks)]
                    largest = max(parts, key=len)  # the time of the slowest rank, as rows are what a share is dealt by
                    rows[tree_rows, ranks] = [len(part) for part in parts]
                    batch = models.tree_batch(largest, context)
                    cases[tree_rows, ranks] = forward_case(runner, batch)
            times = in_turns(setting.device, cases, _ROUNDS, _OFTEN, lambda: report.left_s() < 0)
            report.found[kind] = _figures(times, rows, exchange)
            for figures in report.found[kind]:
                what = f"{kind} {figures['tree_rows']} rows on {figures['ranks']}: largest share {max(figures['rows'])} rows"
                report.line(what, *shown(figures["ratio"], " x 1 rank"), "a prediction")
            return  # one kind
    raise UnavailableError("no kind of runner could be built")


def _figures(
    times: dict[tuple[int, int], Times], rows: dict[tuple[int, int], list[int]], exchange: dict[int, float]
) -> list[dict[str, Any]]:
    figures = []
    for (tree_rows, ranks), taken in times.items():
        whole = times[tree_rows, 1].wall_s
        figures.append({
            "tree_rows": tree_rows,
            "ranks": ranks,
            "rows": rows[tree_rows, ranks],
            "share_ms": spread(taken.wall_s, 4, 1e3),
            "exchange_ms": round(1e3 * exchange[ranks], 4),
            "ratio": spread([one / (share + exchange[ranks]) for one, share in zip(whole, taken.wall_s, strict=True)], 4),
        })  # fmt: skip
    return figures
