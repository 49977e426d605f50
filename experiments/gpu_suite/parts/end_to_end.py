"""Tokens per second from the first to the last, along known outputs: plain decoding, drafts, and transformers' ``generate``."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.decoding.request import PLAIN
from outrider.experiments.bench.engines.contestants import Contestant, Prompt
from outrider.experiments.bench.engines.stock_generate import StockGenerate
from outrider.experiments.bench.record import spread
from outrider.experiments.gpu_suite import models
from outrider.experiments.gpu_suite.device import shown, wait
from outrider.experiments.gpu_suite.report import Report, Setting
from outrider.experiments.gpu_suite.texts import known_of, read_texts

STOCK = "generate"
# What the papers measured on such texts, for the table: not a goal, as other models, texts and devices were theirs.
PAPERS = {"llma": "LLMA 2.2-2.5", "trie": "Lookahead 5.36"}
_MAX_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Trace:
    """One contestant on one record. Seconds; the first token ends the prefill."""

    record: str
    wall_s: float
    prefill_s: float
    tokens: int
    steps: int
    drafted: int | None
    right: bool  # whether it emitted the known output


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``end_to_end``: two kinds of runner at most, the preferred ones that there are."""
    bench = models.bench(setting, report, kept)
    prompts = read_texts(setting, bench.loaded.vocab_size, models.SIZES[bench.size].context, report)
    stock = StockGenerate(bench.twin, setting.max_tokens, ())
    kinds = list(setting.kinds)
    for number, kind in enumerate(kinds):
        done = [name for name in kinds[:number] if name in report.found]
        if len(done) == 2:
            break
        with report.attempt(kind):
            runner = bench.runner(kind, report)
            engines = models.engines(bench.loaded, runner, bench.folder(kind))
            contestants: dict[str, Contestant] = {**models.contestants(engines, setting.max_tokens)}
            if not done:
                contestants[STOCK] = stock
            ends = report.ends_left_s(len(done), 2)
            rounds = run_rounds(contestants, prompts, setting.device, ends, report)
            report.found[kind] = {"contestants": summary(rounds), "curve": engines.target.latency().to_json()}
            tell(report, kind, report.found[kind]["contestants"])


def run_rounds(
    contestants: Mapping[str, Contestant], prompts: Sequence[Prompt], device: str, ends_left_s: float, report: Report
) -> dict[str, list[Trace]]:
    """All contestants on each record in turn, records again until so many seconds of the part are left; the first
    record once more before, untimed.

    A round begins with contestants that know no earlier record.
    """
    traces: dict[str, list[Trace]] = {name: [] for name in contestants}
    for name, contestant in contestants.items():
        contestant.run(prompts[:1])
        report.say(f"{name} is warm")
    for turn in range(_MAX_ROUNDS):
        for contestant in contestants.values():
            contestant.renew()
        for number, prompt in enumerate(prompts):
            if report.left_s() < ends_left_s and (turn or number):
                return traces
            for name, contestant in contestants.items():
                traces[name].append(trace(contestant, prompt, device))
        report.say(f"round {turn + 1}: {len(prompts)} records")
    return traces


def trace(contestant: Contestant, prompt: Prompt, device: str) -> Trace:
    """One record, timed."""
    wait(device)
    began = time.perf_counter()
    run = contestant.run([prompt])
    wait(device)
    taken = time.perf_counter() - began
    right = run.outputs == [known_of(prompt)]
    return Trace(prompt.id, taken, run.prefill_s, len(run.outputs[0]), run.steps, run.drafted, right)


def summary(traces: Mapping[str, Sequence[Trace]]) -> dict[str, Any]:
    """By contestant: sums, and what each record's tokens per second are over plain decoding's of the same record and round."""
    figures = {}
    for name, own in traces.items():
        pairs = list(zip(own, traces[PLAIN], strict=True))
        tokens, wall_s = sum(one.tokens for one in own), sum(one.wall_s for one in own)
        decode_s = wall_s - sum(one.prefill_s for one in own)
        steps = sum(one.steps for one in own)
        figures[name] = {
            "runs": len(own),
            "tokens": tokens,
            "tokens_per_s": round(tokens / wall_s, 2),
            "decode_tokens_per_s": round((tokens - len(own)) / decode_s, 2),
            "tokens_per_step": round(tokens / steps, 3),
            "drafted_per_step": None if own[0].drafted is None else round(sum(one.drafted or 0 for one in own) / steps, 2),
            "prefill_ms": round(1e3 * statistics.median(one.prefill_s for one in own), 3),
            "ratio": spread([base.wall_s / one.wall_s for one, base in pairs], 4),
            "decode_ratio": spread([_decode_s(base) / _decode_s(one) for one, base in pairs], 4),
            "ratio_of_sums": round(sum(base.wall_s for _, base in pairs) / wall_s, 4),
            "wrong": sum(not one.right for one in own),
            "by_workload": by_workload(pairs),
        }
    return figures


def by_workload(pairs: Sequence[tuple[Trace, Trace]]) -> dict[str, Any]:
    """Ratio over plain decoding and tokens per step by workload, which is the part of a record's id before the slash."""
    ordered = sorted(pairs, key=lambda pair: pair[0].record.partition("/")[0])
    figures = {}
    for name, group in itertools.groupby(ordered, key=lambda pair: pair[0].record.partition("/")[0]):
        own = list(group)
        ratio = sum(base.wall_s for _, base in own) / sum(one.wall_s for one, _ in own)
        tokens_per_step = sum(one.tokens for one, _ in own) / sum(one.steps for one, _ in own)
        figures[name] = {"runs": len(own), "ratio": round(ratio, 4), "tokens_per_step": round(tokens_per_step, 3)}
    return figures


def _decode_s(one: Trace) -> float:
    return max(one.wall_s - one.prefill_s, 1e-9)


def tell(report: Report, kind: str, figures: Mapping[str, Any]) -> None:
    """A line of the table for each contestant."""
    for name, row in figures.items():
        value, span = shown(row["ratio"], " x plain")
        what = f"{STOCK} (transformers)" if name == STOCK else f"{kind} {name}"
        note = f"papers: {PAPERS[name]}" if name in PAPERS else ""
        wrong = f", {row['wrong']} WRONG" if row["wrong"] else ""
        report.line(f"{what}: {row['tokens_per_s']:.1f} tok/s, {row['tokens_per_step']:.2f} tok/step{wrong}", value, span, note)
