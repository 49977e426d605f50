"""The N-Grammys' table 1 and figures 1 to 5: k rows of w tokens, their sources, and which of them are accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.drafters.ngrammys import NgrammysDrafter
from outrider.decoding.drafters.registry import StrategyChoice
from outrider.decoding.request import Request
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree
from outrider.experiments.bench.engines.contestants import EngineContestant, Prompt, SharedModel
from outrider.experiments.bench.figure import panel
from outrider.experiments.papers.beside import Found
from outrider.experiments.papers.devices import step_ms
from outrider.experiments.papers.numbers.published import DEVICE, Figure, Value, figure_of
from outrider.experiments.papers.priced import PRICED, add_prices, priced_on, speedups
from outrider.experiments.papers.stage import BEST, PLAIN, Stage, along_files, best, maker, means, others, race, shown, written

ROWS, WIDTHS = (1, 5, 10, 20, 25), (2, 6, 10, 14)
_LINES = {str(k): {str(w): f"k={k} w={w}" for w in WIDTHS} for k in ROWS}  # labels of the grid
TOP_K = (1, 5, 10, 25)
_KINDS = (("unigram", 1), ("bigram", 1), ("bigram", 2), ("bigram", 3))  # allocation and w of figure 2
_TOP_LINES = {f"{kind} w={w}": {str(k): f"{kind} k={k} w={w}" for k in TOP_K} for kind, w in _KINDS}
_TOP_DATASETS = ("mt_bench", "human_eval")  # of figure 2
BLOCK_ROWS, BLOCK_WIDTHS, CONTEXTS = (1, 2, 4, 8, 16, 32), (0, 1, 3, 7, 15), (25, 100, 500)
_BLOCK, QUERIES = "k=10 w=10", (2, 3)  # label of the paper's main block, and the longer queries of its footnote 2
_LOOKAHEAD = "lookahead decoding"
_LOOKAHEAD_CHOICE = StrategyChoice("", "jacobi", {"window": 15, "ngram": 5, "guesses": 15, "prompt_as_reference": False})
_SOURCES = {SOURCES.index("context_ngram"): "context", SOURCES.index("bigram"): "bigram", SOURCES.index("unigram"): "unigram"}


def block(k: int, w: int, allocation: str = "mixed", q: int = 1) -> StrategyChoice:
    """Return the published block: k rows of w tokens side by side, found by the last q tokens."""
    options = {"k": k, "w": w, "q": q, "allocation": allocation, "layout": "batched", "table_width": k}
    return StrategyChoice("", "ngrammys", options)


@dataclass(slots=True)
class Seen:
    """Blocks of a run and their accepted rows, by source."""

    rows: dict[str, list[int]] = field(default_factory=dict)  # rows of each block
    lengths: dict[str, list[int]] = field(default_factory=dict)  # accepted tokens of each accepted row
    ranks: dict[str, list[int]] = field(default_factory=dict)  # index of the accepted row among those of its source

    def add(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Count a step; of rows that agree equally far, the first one is accepted."""
        chains = [row for row in range(1, len(tree)) if tree.parents[row] == 0]
        by_source: dict[str, list[int]] = {name: [] for name in ("context", "bigram")}
        for row in chains:
            by_source.setdefault(_SOURCES[int(tree.sources[row])], []).append(row)
        for name, own in by_source.items():
            self.rows.setdefault(name, []).append(len(own))
            if acceptance.rows and acceptance.rows[0] in own:
                self.lengths.setdefault(name, []).append(len(acceptance.rows))
                self.ranks.setdefault(name, []).append(own.index(acceptance.rows[0]))


class WatchedNgrammys(NgrammysDrafter):
    """N-Grammys with the published block that records each block's acceptance."""

    def __init__(self, seen: Seen, k: int, w: int) -> None:
        super().__init__(k, w, layout="batched", table_width=k)
        self._seen = seen

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """See ``Drafter``. The last step of a request is not observed."""
        if len(tree) > 1:
            self._seen.add(tree, acceptance)


@dataclass(frozen=True, slots=True)
class WatchedChoice(StrategyChoice):
    """Choice whose drafters record into one ``Seen``."""

    seen: Seen

    def build(self) -> Drafter:
        """Return a new drafter."""
        return WatchedNgrammys(self.seen, **self.options)


def measure(stage: Stage, found: Found) -> None:
    """Run all races along the model's own outputs."""
    stage = written(stage)
    shared, model = stage.shared(max(ROWS) * max(WIDTHS)), stage.loaded.served_name
    found.notes += [
        "the block is k branches of one sequence under a tree mask; it is priced as the paper's batch of k copies",
        f"w is one of {', '.join(map(str, WIDTHS))}; the paper has 2, 4, ... 14",
        "speeds are of whole requests, the prefill included, as the paper's; (k*, w*) has the highest priced speed of the grid",
    ]
    choices = {_LINES[str(k)][str(w)]: block(k, w) for k in ROWS for w in WIDTHS}
    lines: dict[str, dict[str, Value]] = {}
    found.tables["table 1"] = lines
    for name, prompts in stage.datasets.items():
        measured = found.measures[name] = race(stage, f"grid on {name}", shared, prompts, choices, sweep=True)
        on, lengths = priced_on("ngrammys", name), [len(prompt.ids) for prompt in prompts]
        add_prices(measured, on, lengths, choices=choices)
        winner = best(measured, PRICED)
        chosen = {label: choices[label] for label in (_BLOCK, winner)} | {_LOOKAHEAD: _LOOKAHEAD_CHOICE}
        chosen |= {f"{_BLOCK} q={q}": block(10, 10, q=q) for q in QUERIES}
        measured |= race(stage, f"table 1 on {name}", shared, prompts, chosen, reads_target=(_LOOKAHEAD,))
        add_prices(measured, on, lengths, choices=choices | chosen)
        known = along_files(stage, prompts)
        if known:
            files = race(stage, f"the files' outputs on {name}", shared, known, {_BLOCK: choices[_BLOCK]}, sweep=True)
            found.tables.setdefault("the files' outputs", {})[name] = {_BLOCK: files[_BLOCK]["tokens_per_step"]}
        measured[BEST] = measured[winner]
        for label, row in (("(10,10)", _BLOCK), ("(k*,w*)", winner), (_LOOKAHEAD, _LOOKAHEAD)):
            line = lines.setdefault(f"{model} {label}", {})
            line |= shown(measured[row], {f"{name} tok/call": "tokens_per_step", f"{name} speed-up": "speedup"})
        found.notes.append(f"(k*, w*) on {name}: {winner}")
        found.figures[f"figure 3, {name}"] = panel("heat", "speed-up, priced", "w", "k", speedups(measured, PLAIN, _LINES))
        steps = means(measured, "tokens_per_step", _LINES)
        found.figures[f"figure 5, {name}"] = panel("heat", "tokens per step", "w", "k", steps)
        _watch(stage, shared, prompts, name, found)
        if name in _TOP_DATASETS:
            _top_k(stage, shared, prompts, name, found)
    _slowdowns(stage, found)


def _watch(stage: Stage, shared: SharedModel, prompts: Sequence[Prompt], name: str, found: Found) -> None:
    """Measure figure 4 on one dataset."""
    seen = Seen()
    make = maker(shared, WatchedChoice("watched", "ngrammys", {"k": 10, "w": 10}, seen), (), counted=True)
    contestant = EngineContestant(make, stage.max_tokens, shared.guide)
    for prompt in prompts:
        stage.runs.check_time()
        contestant.run([prompt])
    for metric, values in (("accepted length", seen.lengths), ("accepted rank", seen.ranks), ("rows", seen.rows)):
        for source, numbers in values.items():
            found.measures[name].setdefault(source, {})[metric] = figure_of(numbers)
        bars = panel("bars", f"share of steps by {metric}", metric, "share", shares(values))
        found.figures[f"figure 4, {name}, {metric}"] = bars


def shares(values: Mapping[str, Sequence[int]]) -> dict[str, dict[str, float]]:
    """Return the share of each number by source: ``{"context": [1, 1, 3]}`` gives 2/3 for 1, 1/3 for 3, and 0 for 0 and 2."""
    most = max((max(numbers) for numbers in values.values() if numbers), default=0)
    return {
        source: {str(n): round(list(numbers).count(n) / len(numbers), 4) for n in range(most + 1)}
        for source, numbers in values.items()
        if numbers
    }


def _top_k(stage: Stage, shared: SharedModel, prompts: Sequence[Prompt], name: str, found: Found) -> None:
    """Measure figure 2 on one dataset."""
    choices = {_TOP_LINES[f"{kind} w={w}"][str(k)]: block(k, w, kind) for kind, w in _KINDS for k in TOP_K}
    measured = race(stage, f"figure 2 on {name}", shared, prompts, choices, sweep=True)
    steps = [measured[f"bigram k={TOP_K[-1]} w={w}"]["tokens_per_step"].mean for w in (1, 2, 3)]
    gains = {f"w={w} to w={w + 1}": {"gain": Figure(steps[w] - steps[w - 1])} for w in (1, 2)}
    found.measures[name] |= others(measured) | gains
    series = means(measured, "tokens_per_step", _TOP_LINES)
    found.figures[f"figure 2, {name}"] = panel("lines", "tokens per call", "k", "tokens per call", series)


def _slowdowns(stage: Stage, found: Found) -> None:
    """Measure figure 1; a block of (k, w) is 1 + k * w rows here."""
    sizes = {(k, w): 1 + k * w for k in BLOCK_ROWS for w in BLOCK_WIDTHS}
    stage.progress.say("figure 1: forwards by rows")
    times = step_ms(stage.loaded, [(rows, context) for rows in set(sizes.values()) for context in CONTEXTS])
    found.measures[DEVICE] = {f"{rows} rows behind {context}": {"ms": Figure(ms)} for (rows, context), ms in times.items()}
    for context in CONTEXTS:
        if (1, context) not in times:
            continue
        heat: dict[str, dict[str, float]] = {}
        for (k, w), rows in sizes.items():
            if (rows, context) in times:
                heat.setdefault(str(k), {})[str(w)] = times[rows, context] / times[1, context]
        found.figures[f"figure 1, context {context}"] = panel("heat", "slowdown of a forward", "w", "k", heat)
