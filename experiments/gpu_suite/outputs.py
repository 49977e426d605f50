"""Whole outputs with each strategy: whether they equal plain decoding's, and how fast they come.

``strict`` uses random weights, ``real`` a trained model, and ``end_to_end`` follows known outputs beside transformers' generate.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from decoding.request import PLAIN
from decoding.strategy_choice import parse_strategy
from engine.engine import load_runner
from engine.text.chat import render_chat
from experiments.bench.engines.contestants import Contestant, Prompt
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.engines.stock_generate import StockGenerate
from experiments.bench.record import ROOT, spread
from experiments.gpu_suite import models
from experiments.gpu_suite.device import empty_cache, is_cuda, wait
from experiments.gpu_suite.texts import nearly, prompts_for
from experiments.gpu_suite.worker import Report, Setting, UnavailableError

STRATEGIES = (PLAIN, "llma", "trie", "auto")
STOCK = "transformers' generate"
# Ratios that the papers measured with other models, texts and devices: for comparison, no goals.
PAPERS = {"llma": "LLMA 2.2-2.5", "trie": "Lookahead 5.36"}
_MAX_ROUNDS = 3
_PROMPT, _OUTPUT = 1024, 64  # tokens in ``strict``: of the end of each prompt, and of an output
_PASSAGES, _PASSAGE_CHARS = 8, 1500  # of this project's documents
_QUESTION = "Repeat the most important sentences of this text.\n\n"


@dataclass(frozen=True, slots=True)
class Trace:
    """One contestant on one record."""

    record: str
    wall_s: float
    prefill_s: float  # to the first token
    tokens: int
    steps: int
    drafted: int | None
    parted_at: int | None = None  # first token that differs from the expected output

    @property
    def decode_s(self) -> float:
        """Seconds after the first token."""
        return max(self.wall_s - self.prefill_s, 1e-9)


Traces = dict[str, list[Trace]]  # by contestant


def contestants(model: SharedModel, max_tokens: int, strategies: Sequence[str] = STRATEGIES) -> dict[str, Contestant]:
    """Return engines with each strategy."""
    return {name: model.contestant(parse_strategy(name), max_tokens) for name in strategies}


def run_record(
    contestants: Mapping[str, Contestant], prompt: Prompt, expected: dict[str, list[int]], device: str, traces: Traces
) -> None:
    """Run all contestants on a record, and add their traces; without an expected output, the first one's is expected."""
    for name, contestant in contestants.items():
        wait(device)
        began = time.perf_counter()
        run = contestant.run([prompt])
        wait(device)
        wall_s, output = time.perf_counter() - began, run.outputs[0]
        parted_at = difference(output, expected.setdefault(prompt.id, output))
        trace = Trace(prompt.id, wall_s, run.prefill_s, len(output), run.steps, run.drafted, parted_at)
        traces.setdefault(name, []).append(trace)


def difference(output: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the first position at which two outputs differ; None if they are equal."""
    pairs = enumerate(itertools.zip_longest(output, expected))
    return next((at for at, (one, other) in pairs if one != other), None)


def run_rounds(
    contestants: Mapping[str, Contestant], prompts: Sequence[Prompt], device: str, over: Callable[[], bool], report: Report
) -> Traces:
    """Run all contestants on each record in turns, in up to three rounds, which begin with contestants that know no record.

    The first record runs once before, untimed.
    """
    traces: Traces = {}
    expected = {prompt.id: list(prompt.known) for prompt in prompts if prompt.known}
    for name, contestant in contestants.items():
        contestant.run(prompts[:1])
        report.say(f"{name} is warm")
    for turn in range(_MAX_ROUNDS):
        for contestant in contestants.values():
            contestant.renew()
        for number, prompt in enumerate(prompts):
            if over() and (turn or number):
                return traces
            run_record(contestants, prompt, expected, device, traces)
        report.say(f"round {turn + 1}: {len(prompts)} records")
    return traces


def summary(traces: Mapping[str, Sequence[Trace]]) -> dict[str, Any]:
    """Return sums by contestant, and the ratios to plain decoding of the same record and round."""
    figures = {}
    for name, own in traces.items():
        pairs = list(zip(own, traces[PLAIN], strict=True))
        tokens, wall_s, steps = (sum(getattr(one, part) for one in own) for part in ("tokens", "wall_s", "steps"))
        decode_s = wall_s - sum(one.prefill_s for one in own)
        figures[name] = {
            "runs": len(own),
            "tokens": tokens,
            "tokens_per_s": round(tokens / wall_s, 2),
            "decode_tokens_per_s": round((tokens - len(own)) / decode_s, 2),
            "tokens_per_step": round(tokens / steps, 3),
            "drafted_per_step": None if own[0].drafted is None else round(sum(one.drafted or 0 for one in own) / steps, 2),
            "prefill_ms": round(1e3 * statistics.median(one.prefill_s for one in own), 3),
            "ratio": spread([base.wall_s / one.wall_s for one, base in pairs], 4),
            "decode_ratio": spread([base.decode_s / one.decode_s for one, base in pairs], 4),
            "ratio_of_sums": round(sum(base.wall_s for _, base in pairs) / wall_s, 4),
            "identical": sum(one.parted_at is None for one in own),
            "parted_at": [one.parted_at for one in own if one.parted_at is not None],
            "by_workload": _by_workload(pairs),
        }
    return figures


def _by_workload(pairs: Sequence[tuple[Trace, Trace]]) -> dict[str, Any]:
    """Return the ratio to plain decoding and tokens per step by workload, the part of a record's id before the slash."""
    groups: dict[str, list[tuple[Trace, Trace]]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].record.partition("/")[0], []).append(pair)
    figures = {}
    for name, own in groups.items():
        ratio = sum(base.wall_s for _, base in own) / sum(one.wall_s for one, _ in own)
        tokens_per_step = sum(one.tokens for one, _ in own) / sum(one.steps for one, _ in own)
        figures[name] = {"runs": len(own), "ratio": round(ratio, 4), "tokens_per_step": round(tokens_per_step, 3)}
    return figures


def _tell(report: Report, label: str, traces: Traces, exact: bool = False) -> dict[str, Any]:
    """Add a line per contestant, and return the figures; ``exact``: all outputs should be identical."""
    figures = summary(traces)
    for name, row in figures.items():
        same = f"{row['identical']} of {row['runs']} identical"
        what = f"{label} {name}: {row['tokens_per_s']:.1f} tok/s, {row['tokens_per_step']:.2f} tok/step, {same}"
        goal, met = ("all identical", row["identical"] == row["runs"]) if exact else (PAPERS.get(name, ""), None)
        report.figure(what, row["ratio"], "x plain", goal, met)
    return figures


def measure_end_to_end(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Follow known outputs with the two preferred kinds of runner that are available, and with transformers' ``generate``."""
    bench = models.bench(setting, report, kept)
    prompts = prompts_for(bench, report)
    for kind in setting.kinds:
        done = sum(name in report.found for name in setting.kinds)
        if done == 2:
            break
        with report.attempt(kind):
            over, engines = report.share(done, 2), bench.engines(kind, report)
            all_of_them = contestants(engines, setting.max_tokens)
            if not done:
                all_of_them[STOCK] = StockGenerate(bench.twin, setting.max_tokens, ())
            traces = run_rounds(all_of_them, prompts, setting.device, over, report)
            report.found[kind] = {"contestants": _tell(report, kind, traces), "curve": engines.target.latency().to_json()}


def measure_strict(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Compare outputs of random weights with plain decoding's in the same kind of runner; references are nearly the output."""
    bench = models.bench(setting, report, kept)
    prompts = prompts_for(bench, report)
    count = min(_OUTPUT, models.SIZES[bench.size].context // 4)

    def measure(kind: str, over: Callable[[], bool]) -> None:
        own, traces = contestants(bench.engines(kind, report, guided=False), count), Traces()
        for number, prompt in enumerate(prompts):
            if number and over():
                break
            cut = prompt.ids[-_PROMPT:]
            plain = own[PLAIN].run([Prompt(f"{prompt.id}/plain", cut, [])]).outputs
            given = Prompt(prompt.id, cut, nearly(plain, bench.loaded.vocab_size))
            run_record(own, given, {prompt.id: plain[0]}, setting.device, traces)
        report.found[kind] = _tell(report, kind, traces, exact=kind == "strict")

    report.each(setting.kinds, measure)


def measure_real(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Measure a trained model on passages of this project's documents.

    Raises:
        UnavailableError: there is no trained model, or its context is too short.
    """
    if setting.real_model is None:
        raise UnavailableError("no trained model: there is no --real-model, and none of the package in the user's cache")
    models.release(setting, kept)
    device, on_gpu = setting.device, is_cuda(setting.device)
    # On a CPU and on the double, slots take the memory of the machine, and the tables of auto take minutes.
    length, options = (None, EngineOptions()) if on_gpu else (1024, EngineOptions(max_running=1))
    strategies = (PLAIN, "llma", "auto") if on_gpu else (PLAIN, "llma")
    model = ModelOptions(str(setting.real_model), dtype=setting.dtype, device=device, max_model_len=length)  # type: ignore[arg-type]
    loaded, runner = load_runner(model, options, SpeculationOptions(), 1)
    report.found["model"] = {
        "name": setting.real_model.name, "num_parameters": loaded.model.num_parameters(), "exact": runner.exact,
        "form": runner.form(), "max_model_len": loaded.max_model_len,
    }  # fmt: skip
    assert loaded.tokenizer is not None
    texts = sorted((path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")), key=len, reverse=True)
    prompts = []
    for number, text in enumerate(texts[:_PASSAGES]):
        ids = render_chat(loaded.tokenizer, [{"role": "user", "content": _QUESTION + text[:_PASSAGE_CHARS]}])
        if len(ids) + setting.max_tokens < loaded.max_model_len:
            prompts.append(Prompt(f"passage/{number}", ids, []))
    if not prompts:
        raise UnavailableError(f"no passage fits {loaded.max_model_len} tokens")
    shared = SharedModel(loaded, options, SpeculationOptions().most_draft_tokens, runner=runner, kept=setting.scratch / "real")
    own = contestants(shared, setting.max_tokens, strategies)
    traces = run_rounds(own, prompts, device, report.share(0, 1), report)
    report.found["contestants"] = _tell(report, setting.real_model.name, traces, exact=True)
    del own, shared, runner, loaded
    empty_cache(device)
