"""Tables 4 to 6 and 8 and figures 1 and 4 to 6 of Alipay's Lookahead: decoding and branch length, the trie's parts, batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from decoding.strategy_choice import StrategyChoice
from experiments.bench.engines.contestants import EngineContestant, Prompt
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.figure import panel
from experiments.bench.memory.trie_speed import quiet
from experiments.papers.ablation.explicit_trie import ablate
from experiments.papers.beside import Found
from experiments.papers.devices import peak_bytes, step_ms
from experiments.papers.numbers.published import Figure, Value
from experiments.papers.numbers.trie import FORWARD_S
from experiments.papers.stage import PLAIN, Stage, maker, race, written

DECODING, BRANCH, LLMA_BRANCH = 64, 12, 24
DECODING_LENGTHS = (8, 16, 32, 64, 128)
BRANCH_LENGTHS = (4, 12, 24, 48)
BATCHES = (2, 4)
ROWS, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (64, 256, 512, 1024)
MEMORY_LENGTHS = (1, 8, 64, 128)
_SWEPT = "antrag"  # the paper's sweeps are on it
_SAMPLES = 2  # prompts of a measurement of memory


def strategy(layout: str, decoding: int = DECODING, branch: int = BRANCH) -> StrategyChoice:
    """The trie with a layout, or LLMA, whose copy length is the paper's branch length. As published: without similar requests."""
    if layout == "llma":
        return StrategyChoice(layout, "llma", {"copy_length": branch, "similar_requests": 0})
    options = {"decoding_length": decoding, "branch_length": branch, "layout": layout, "similar_requests": 0}
    return StrategyChoice(layout, "trie", options)


METHODS = {
    "llma": strategy("llma", branch=LLMA_BRANCH),
    "parallel": strategy("parallel"),
    "hierarchical": strategy("hierarchical"),
}


def runs(sizes: Mapping[str, int], repeats: int) -> int:
    """How many there are, by records of each dataset."""
    measured = {name: size - size // 2 for name, size in sizes.items()}
    swept, methods = measured.get(_SWEPT, 0), 1 + len(METHODS)
    sweep = 1 + 2 * len(DECODING_LENGTHS) + 2 * len(BRANCH_LENGTHS) - 1
    batches = sum(-(-swept // batch) for batch in BATCHES)
    warmed = sum(size * (1 + len(_warm_counts(sizes[name] // 2))) for name, size in measured.items())
    return methods * repeats * (sum(measured.values()) + batches) + sweep * swept + warmed


def measure(stage: Stage, found: Found) -> None:
    """All of it; the first half of each dataset is in the trie before, as the paper's dev split."""
    found.measures["device"] = {}
    found.notes += [
        "the prompt is the only document: references are left out, as the method has none",
        f"LLMA copies {LLMA_BRANCH} tokens, the branch length beyond which the paper sees no gain; its own paper takes 15",
        "table 5 and 6: the published trie replayed without a model; seconds are its own and the paper's forward of 19 ms a step",
        "speeds are of whole requests, the prefill included, as the paper's",
    ]
    if not stage.guided:
        stage = written(stage)
        found.notes.append("the outputs that are followed are this model's own greedy ones, those in the trie before, too")
    _step_times(stage, found)
    if _SWEPT in stage.datasets:
        _memory(stage, stage.datasets[_SWEPT], found)
    shared = stage.shared(max(DECODING_LENGTHS) - 1)
    speeds: dict[str, dict[str, Value]] = {}
    found.tables["table 4"] = speeds
    for name, prompts in stage.datasets.items():
        before, measured = halves(prompts)
        found.measures[name] = race(stage, name, shared, measured, METHODS, before=before)
        _warming(stage, name, shared, measured, before, found)
        speeds[f"{name}, {stage.loaded.served_name}"] = _column(found.measures[name], "tokens/s")
        speeds[f"{name}, speed-up"] = _column(found.measures[name], "speedup")
    if _SWEPT in stage.datasets:
        before, measured = halves(stage.datasets[_SWEPT])
        _ablation(stage, measured, before, found)
        _sweep(stage, shared, measured, before, found)
        _batches(stage, measured, before, found)


def halves(prompts: Sequence[Prompt]) -> tuple[list[Sequence[int]], list[Prompt]]:
    """The outputs of the first half, and the second half without references.

    Raises:
        ValueError: fewer than two prompts.
    """
    cut = len(prompts) // 2
    if not cut:
        raise ValueError("a dataset has one record that fits: give more, the first half warms the trie")
    return [prompt.known or () for prompt in prompts[:cut]], [replace(prompt, references=[]) for prompt in prompts[cut:]]


def _warm_counts(most: int) -> list[int]:
    """0, 1, 2, 4, ... and the most."""
    return sorted({0, most, *(2**power for power in range(most.bit_length()) if 2**power < most)})


def _warming(
    stage: Stage, name: str, shared: SharedModel, prompts: Sequence[Prompt], before: Sequence[Sequence[int]], found: Found
) -> None:
    """The trie by the number of outputs that are in it before."""
    warm = {f"warm {count}": count for count in _warm_counts(len(before))}
    choices = dict.fromkeys(warm, METHODS["hierarchical"])
    swept = race(stage, f"warm records of {name}", shared, prompts, choices, repeats=1, before=before, warm=warm)
    found.measures[name] |= {label: swept[label] for label in warm}
    found.tables.setdefault("warm records", {})[name] = {label: swept[label]["tokens_per_step"] for label in warm}
    line = {str(count): swept[label]["tokens_per_step"].mean for label, count in warm.items()}
    title = "the trie by outputs that are in it before"
    found.figures[f"warm records, {name}"] = panel("lines", title, "outputs", "tokens a step (EDL)", {name: line})


def _column(measured: dict[str, dict[str, Figure]], metric: str) -> dict[str, Value]:
    return {label: measured[label][metric] for label in (PLAIN, *METHODS)}


def _sweep(stage: Stage, shared: SharedModel, prompts: Sequence[Prompt], before: Sequence[Sequence[int]], found: Found) -> None:
    """Figures 4 and 5."""
    decoding = {layout: {str(n): f"{_NAMES[layout]} {n} branch {BRANCH}" for n in DECODING_LENGTHS} for layout in _NAMES}
    branch = {str(n): f"decoding {DECODING} branch {n}" for n in BRANCH_LENGTHS}
    copies = {str(n): f"llma branch {n}" for n in BRANCH_LENGTHS}
    choices = {label: strategy(layout, int(n)) for layout, labels in decoding.items() for n, label in labels.items()}
    choices |= {label: strategy("hierarchical", branch=int(n)) for n, label in branch.items()}
    choices |= {label: strategy("llma", branch=int(n)) for n, label in copies.items()}
    swept = race(stage, "figure 4", shared, prompts, choices, repeats=1, before=before)
    found.measures[_SWEPT] |= {label: row for label, row in swept.items() if label != PLAIN}
    for figure, metric, y in (("figure 4", "speedup", "speed-up"), ("figure 5", "tokens_per_step", "tokens a step (EDL)")):
        for x, lines in (("decoding length", decoding), ("branch length", {"hierarchical": branch, "llma": copies})):
            series = {name: {n: swept[label][metric].mean for n, label in labels.items()} for name, labels in lines.items()}
            found.figures[f"{figure}, {x}"] = panel("lines", f"{y} by {x}", x, y, series)


_NAMES = {"hierarchical": "decoding", "parallel": "parallel"}  # layout -> the first word of its labels


def _batches(stage: Stage, prompts: Sequence[Prompt], before: Sequence[Sequence[int]], found: Found) -> None:
    """Table 8."""
    rows: dict[str, dict[str, Value]] = {}
    for batch in BATCHES:
        shared = stage.shared(DECODING - 1, batch)
        measured = race(stage, f"batches of {batch}", shared, prompts, METHODS, batch_size=batch, before=before)
        found.measures[_SWEPT] |= {f"{label}, batch {batch}": row for label, row in measured.items()}
        rows[f"batch {batch}, tokens/s"] = _column(measured, "tokens/s")
        rows[f"batch {batch}, speed-up"] = _column(measured, "speedup")
    found.tables["table 8"] = rows


def _ablation(stage: Stage, prompts: Sequence[Prompt], before: Sequence[Sequence[int]], found: Found) -> None:
    """Tables 5 and 6."""
    warm = [Prompt(f"before/{number}", [0], [], list(output)).text() for number, output in enumerate(before)]
    vocab_size: int = stage.loaded.model.config.get_text_config().vocab_size
    with quiet():
        parts, capacities = ablate(warm, [prompt.text() for prompt in prompts], vocab_size, stage.progress.note)
    for label, reached in (parts | capacities).items():
        per_second = reached.tokens_per_step / (FORWARD_S + reached.trie_s)
        seconds = [(float(tokens), FORWARD_S * steps + trie_s) for tokens, steps, trie_s in reached.texts]
        figures = {
            "tokens/s at 19 ms": Figure(per_second, samples=tuple(seconds)),
            "trie tokens_per_step": Figure(reached.tokens_per_step),
        }
        found.measures[_SWEPT][label] = figures
    speed = {label: row["tokens/s at 19 ms"] for label, row in found.measures[_SWEPT].items() if "tokens/s at 19 ms" in row}
    found.tables["table 5"] = {_SWEPT: {label: speed[label] for label in parts}}
    found.tables["table 6"] = {_SWEPT: {label: speed[label] for label in capacities}}
    for name, labels in (("table 5", parts), ("table 6", capacities)):
        line = {label.removeprefix("capacity ").removeprefix("without "): speed[label].mean for label in labels}
        found.figures[name] = panel("lines", "tokens/s at a forward of 19 ms", "", "tokens/s", {_SWEPT: line})


def _step_times(stage: Stage, found: Found) -> None:
    """Figure 1."""
    stage.progress.say("figure 1: forwards by rows")
    times = step_ms(stage.loaded, [(rows, context) for rows in ROWS for context in CONTEXTS])
    found.measures["device"] |= {f"{rows} rows behind {context}": {"ms": Figure(ms)} for (rows, context), ms in times.items()}
    series: dict[str, dict[str, float]] = {}
    for (rows, context), ms in times.items():
        series.setdefault(f"context {context}", {})[str(rows)] = ms
    found.figures["figure 1"] = panel("lines", "time of one forward", "rows", "ms", series)


def _memory(stage: Stage, prompts: Sequence[Prompt], found: Found) -> None:
    """Figure 6: each decoding length with KV slots of its own size; once before, as what is loaded by then stays."""
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
        found.measures["device"][f"decoding length {length}"] = {"peak bytes": Figure(peak)}
        row[f"GiB, decoding length {length}"] = peak / 2**30
    row["more with 128, %"] = 100 * (row["GiB, decoding length 128"] / row["GiB, decoding length 1"] - 1)
    found.tables["figure 6"] = {str(stage.loaded.model.device): {**row}}
    line = {str(length): row[f"GiB, decoding length {length}"] for length in MEMORY_LENGTHS}
    found.figures["figure 6"] = panel("lines", "peak memory", "decoding length", "GiB", {stage.loaded.served_name: line})
