"""Tables 4 to 6 and 8 and figures 1 and 4 to 6 of Alipay's Lookahead: decoding and branch length, the trie's parts, batches."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from outrider.decoding.drafters.registry import StrategyChoice
from outrider.decoding.sources.history import History
from outrider.decoding.sources.text_keys import text_key
from outrider.experiments.bench.engines.contestants import EngineContestant, Prompt, SharedModel
from outrider.experiments.bench.figure import panel
from outrider.experiments.papers.ablation.explicit_trie import ablate
from outrider.experiments.papers.beside import Found
from outrider.experiments.papers.devices import peak_bytes, step_ms
from outrider.experiments.papers.numbers.published import DEVICE, KNOWN, Figure, Value, load
from outrider.experiments.papers.priced import PRICED, add_prices, priced_on, speedups
from outrider.experiments.papers.stage import PLAIN, Row, Stage, along_files, maker, means, others, race, written

DECODING, BRANCH, LLMA_BRANCH = 64, 12, 24
DECODING_LENGTHS, BRANCH_LENGTHS = (8, 16, 32, 64, 128), (4, 12, 24, 48)
BATCHES = (2, 4)
ROWS, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (64, 256, 512, 1024)
MEMORY_LENGTHS = (1, 8, 64, 128)
FORWARD_S = 1 / load("trie").number("table 4", "AntRAG, AntGLM-10B", "plain")  # plain decoding emits a token per step
_SWEPT = "antrag"  # dataset of the sweeps
_SAMPLES = 2  # prompts of a measurement of memory
_CAPACITY, _TEXT = 1 << 20, 256  # tokens of a tenant's history by default, and of a text in it
_REPLAYED = "tokens/s at 19 ms"  # metric of tables 5 and 6


def strategy(layout: str, decoding: int = DECODING, branch: int = BRANCH) -> StrategyChoice:
    """Return the trie with a layout, or LLMA with a copy length of ``branch``; as published, without similar requests."""
    if layout == "llma":
        return StrategyChoice(layout, "llma", {"copy_length": branch, "similar_requests": 0})
    options = {"decoding_length": decoding, "branch_length": branch, "layout": layout, "similar_requests": 0}
    return StrategyChoice(layout, "trie", options)


@contextmanager
def quiet() -> Iterator[None]:
    """Run on one core, if the system allows it, and without garbage collection."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if cores:
            os.sched_setaffinity(0, cores)


METHODS = {
    "llma": strategy("llma", branch=LLMA_BRANCH),
    "parallel": strategy("parallel"),
    "hierarchical": strategy("hierarchical"),
}


def measure(stage: Stage, found: Found) -> None:
    """Run all races along the model's own outputs; the first half of each dataset is in the trie before, as in the paper."""
    found.notes += [
        "the prompt is the only document: references are left out, as the method has none",
        f"LLMA copies {LLMA_BRANCH} tokens, the branch length beyond which the paper sees no gain; its own paper takes 15",
        "tables 5 and 6: the published trie on 300 known outputs without a model; seconds: its own and 19 ms a step, the paper's",
        "speeds are of whole requests, the prefill included, as the paper's",
        "the outputs that are followed are this model's own greedy ones, those in the trie before, too",
    ]
    stage = written(stage)
    _step_times(stage, found)
    if _SWEPT in stage.datasets:
        _memory(stage, stage.datasets[_SWEPT], found)
    shared = stage.shared(max(DECODING_LENGTHS) - 1)
    speeds: dict[str, dict[str, Value]] = {}
    found.tables["table 4"] = speeds
    for name, prompts in stage.datasets.items():
        if name == KNOWN:
            _ablation(stage, prompts, found)
            continue
        before, measured = halves(prompts)
        found.measures[name] = _priced(race(stage, name, shared, measured, METHODS, before=before), name, measured)
        _warming(stage, name, shared, measured, before, found)
        _along_files(stage, name, shared, prompts, found)
        speeds[f"{name}, {stage.loaded.served_name}"] = _column(found.measures[name], "tokens/s")
        speeds[f"{name}, speed-up"] = _column(found.measures[name], "speedup")
    if _SWEPT in stage.datasets:
        before, measured = halves(stage.datasets[_SWEPT])
        _sweep(stage, shared, measured, before, found)
        _batches(stage, measured, before, found)


def _priced(rows: dict[str, Row], name: str, prompts: Sequence[Prompt], batch_size: int = 1) -> dict[str, Row]:
    add_prices(rows, priced_on("trie", name), [len(prompt.ids) for prompt in prompts], batch_size)
    plain = rows[PLAIN][PRICED]
    for row in rows.values():  # of the same tokens
        seconds = [(base, own) for (_, base), (_, own) in zip(plain.samples, row[PRICED].samples, strict=True)]
        row["priced speedup"] = Figure(row[PRICED].mean / plain.mean, samples=tuple(seconds))
    return rows


def _along_files(stage: Stage, name: str, shared: SharedModel, prompts: Sequence[Prompt], found: Found) -> None:
    """Measure table 4 along the files' outputs, of other models or of people."""
    known = along_files(stage, prompts)
    if len(known) > 1:
        before, measured = halves(known)
        rows = race(stage, f"the files' outputs on {name}", shared, measured, METHODS, before=before, sweep=True)
        found.tables.setdefault("the files' outputs", {})[name] = {label: rows[label]["tokens_per_step"] for label in METHODS}


def halves(prompts: Sequence[Prompt]) -> tuple[list[Sequence[int]], list[Prompt]]:
    """Return the outputs of the first half, and the second half without references.

    Raises:
        ValueError: fewer than two prompts.
    """
    cut = len(prompts) // 2
    if not cut:
        raise ValueError("a dataset has one record that fits: give more, the first half warms the trie")
    return [prompt.known or () for prompt in prompts[:cut]], [replace(prompt, references=[]) for prompt in prompts[cut:]]


def _warming(
    stage: Stage, name: str, shared: SharedModel, prompts: Sequence[Prompt], before: Sequence[Sequence[int]], found: Found
) -> None:
    """Measure the trie by the number of outputs that are in it before: 0, 1, 2, 4, ... and all."""
    most = len(before)
    counts = sorted({0, most, *(2**power for power in range(most.bit_length()) if 2**power < most)})
    warm = {f"warm {count}": count for count in counts}
    choices = dict.fromkeys(warm, METHODS["hierarchical"])
    swept = race(stage, f"warm records of {name}", shared, prompts, choices, before=before, warm=warm, sweep=True)
    found.measures[name] |= others(swept)
    found.tables.setdefault("warm records", {})[name] = {label: swept[label]["tokens_per_step"] for label in warm}
    line = means(swept, "tokens_per_step", {name: {str(count): label for label, count in warm.items()}})
    title = "the trie by outputs that are in it before"
    found.figures[f"warm records, {name}"] = panel("lines", title, "outputs", "tokens a step (EDL)", line)


def _column(measured: dict[str, Row], metric: str) -> dict[str, Value]:
    return {label: measured[label][metric] for label in (PLAIN, *METHODS) if metric in measured[label]}


def _sweep(stage: Stage, shared: SharedModel, prompts: Sequence[Prompt], before: Sequence[Sequence[int]], found: Found) -> None:
    """Measure figures 4 and 5."""
    words = {"hierarchical": "decoding", "parallel": "parallel"}  # layout -> first word of its labels
    decoding = {layout: {str(n): f"{word} {n} branch {BRANCH}" for n in DECODING_LENGTHS} for layout, word in words.items()}
    branch = {
        "hierarchical": {str(n): f"decoding {DECODING} branch {n}" for n in BRANCH_LENGTHS},
        "llma": {str(n): f"llma branch {n}" for n in BRANCH_LENGTHS},
    }
    choices = {label: strategy(layout, int(n)) for layout, labels in decoding.items() for n, label in labels.items()}
    choices |= {label: strategy(layout, branch=int(n)) for layout, labels in branch.items() for n, label in labels.items()}
    swept = _priced(race(stage, "figure 4", shared, prompts, choices, before=before, sweep=True), _SWEPT, prompts)
    found.measures[_SWEPT] |= others(swept)
    for x, lines in (("decoding length", decoding), ("branch length", branch)):
        found.figures[f"figure 4, {x}"] = panel("lines", f"speed-up by {x}, priced", x, "speed-up", speedups(swept, PLAIN, lines))
        steps = means(swept, "tokens_per_step", lines)
        found.figures[f"figure 5, {x}"] = panel("lines", f"tokens a step (EDL) by {x}", x, "tokens a step (EDL)", steps)


def _batches(stage: Stage, prompts: Sequence[Prompt], before: Sequence[Sequence[int]], found: Found) -> None:
    """Measure table 8."""
    rows = found.tables["table 8"] = {}
    for batch in BATCHES:
        shared = stage.shared(DECODING - 1, batch)
        measured = race(stage, f"batches of {batch}", shared, prompts, METHODS, batch_size=batch, before=before)
        measured = _priced(measured, _SWEPT, prompts, batch)
        found.measures[_SWEPT] |= {f"{label}, batch {batch}": row for label, row in measured.items()}
        rows[f"batch {batch}, tokens/s"] = _column(measured, "tokens/s")
        rows[f"batch {batch}, speed-up"] = _column(measured, "speedup")


def _ablation(stage: Stage, prompts: Sequence[Prompt], found: Found) -> None:
    """Measure tables 5 and 6 on texts with known outputs, a fifth of which is in the trie before."""
    texts = [replace(prompt, references=[]).text() for prompt in prompts]
    cut = len(texts) // 5
    with quiet():
        parts, capacities = ablate(texts[:cut], texts[cut:], stage.vocab_size, stage.progress.note)
    own = found.measures[KNOWN] = {}
    for name, reached in (("table 5", parts), ("table 6", capacities)):
        speeds: dict[str, Value] = {}
        for label, run in reached.items():
            seconds = tuple((float(tokens), FORWARD_S * steps + trie_s) for tokens, steps, trie_s in run.texts)
            speeds[label] = speed = Figure(run.tokens_per_step / (FORWARD_S + run.trie_s), samples=seconds)
            own[label] = {_REPLAYED: speed, "trie tokens_per_step": Figure(run.tokens_per_step)}
        found.tables[name] = {KNOWN: speeds}
        labels = {label.removeprefix("capacity ").removeprefix("without "): label for label in reached}
        line = means(own, _REPLAYED, {KNOWN: labels})
        found.figures[name] = panel("lines", "tokens/s at a forward of 19 ms", "", "tokens/s", line)


def _step_times(stage: Stage, found: Found) -> None:
    """Measure figure 1."""
    stage.progress.say("figure 1: forwards by rows")
    times = step_ms(stage.loaded, [(rows, context) for rows in ROWS for context in CONTEXTS])
    found.measures[DEVICE] = {f"{rows} rows behind {context}": {"ms": Figure(ms)} for (rows, context), ms in times.items()}
    series: dict[str, dict[str, float]] = {}
    for (rows, context), ms in times.items():
        series.setdefault(f"context {context}", {})[str(rows)] = ms
    found.figures["figure 1"] = panel("lines", "time of one forward", "rows", "ms", series)


def _memory(stage: Stage, prompts: Sequence[Prompt], found: Found) -> None:
    """Measure figure 6, each decoding length with KV slots of its size; the first run only loads what stays loaded."""
    row: dict[str, float] = {}

    def work(length: int) -> None:
        shared = stage.shared(length - 1)
        contestant = EngineContestant(maker(shared, strategy("hierarchical", length), ()), stage.max_tokens, shared.guide)
        for prompt in prompts[:_SAMPLES]:
            contestant.run([prompt])

    stage.progress.say("figure 6: memory by decoding length")
    work(max(MEMORY_LENGTHS))
    for length in MEMORY_LENGTHS:
        peak = peak_bytes(stage.loaded.model.device, partial(work, length))
        if peak is None:
            found.notes.append("figure 6: this system does not tell the peak of a process's memory")
            return
        found.measures[DEVICE][f"decoding length {length}"] = {"peak bytes": Figure(peak)}
        row[f"GiB, decoding length {length}"] = peak / 2**30
    row["more with 128, %"] = 100 * (row["GiB, decoding length 128"] / row["GiB, decoding length 1"] - 1)
    sizes = {"full log": _log_mib(stage.vocab_size), "published": load("trie").number("figure 6", "trie", "MiB")}
    found.measures[DEVICE] |= {label: {"trie MiB": Figure(mib)} for label, mib in sizes.items()}
    found.tables["figure 6"] = {str(stage.loaded.model.device): {**row}, "trie": {"MiB": sizes["full log"]}}
    line = {str(length): row[f"GiB, decoding length {length}"] for length in MEMORY_LENGTHS}
    found.figures["figure 6"] = panel("lines", "peak memory", "decoding length", "GiB", {stage.loaded.served_name: line})


def _log_mib(vocab_size: int) -> float:
    """Return the memory of a full history of one tenant."""
    history = History(_CAPACITY)
    tokens = np.random.default_rng(0).integers(0, vocab_size, _CAPACITY).tolist()
    for start in range(0, _CAPACITY, _TEXT):
        history.extend(text_key(str(start)), 0, tokens[start : start + _TEXT], final=True)
    return history.nbytes / 2**20
