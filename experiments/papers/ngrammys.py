"""The N-Grammys' table 1 and figures 1 to 5: k rows of w tokens, where they come from and which of them are accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decoding.drafters.base import Drafter, TargetRows
from decoding.drafters.ngrammys import NgrammysDrafter
from decoding.request import Acceptance, Request
from decoding.strategy_choice import StrategyChoice
from decoding.tree import SOURCES, DraftTree
from experiments.bench.engines.contestants import EngineContestant, Prompt
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.figure import panel
from experiments.papers.beside import Found
from experiments.papers.devices import step_ms
from experiments.papers.numbers.ngrammys import DATASETS
from experiments.papers.numbers.published import Figure, Value, figure_of
from experiments.papers.stage import BEST, PLAIN, Stage, best, maker, race

ROWS, WIDTHS = (1, 5, 10, 20, 25), (2, 6, 10, 14)
TOP_K = (1, 5, 10, 25)
_KINDS = (("unigram", 1), ("bigram", 1), ("bigram", 2), ("bigram", 3))  # of figure 2, and w
BLOCK_ROWS, BLOCK_WIDTHS, CONTEXTS = (1, 2, 4, 8, 16, 32), (0, 1, 3, 7, 15), (25, 100, 500)
_BUDGET = max(ROWS) * max(WIDTHS)
_LOOKAHEAD = StrategyChoice("", "jacobi", {"window": 15, "ngram": 5, "guesses": 15, "prompt_as_reference": False})
_SOURCES = {SOURCES.index("context_ngram"): "context", SOURCES.index("bigram"): "bigram", SOURCES.index("unigram"): "unigram"}


def block(k: int, w: int, allocation: str = "mixed") -> StrategyChoice:
    """The published block: k rows of w tokens side by side."""
    options = {"k": k, "w": w, "allocation": allocation, "layout": "batched", "table_width": k}
    return StrategyChoice("", "ngrammys", options)


@dataclass(slots=True)
class Seen:
    """What the blocks of a run held, and what was accepted of them."""

    rows: dict[str, list[int]] = field(default_factory=dict)  # source -> rows of each block
    lengths: dict[str, list[int]] = field(default_factory=dict)  # source -> accepted tokens of each accepted row
    ranks: dict[str, list[int]] = field(default_factory=dict)  # source -> its place among the rows of its source, from 0

    def add(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Counts a step. Of rows that agree equally far the first one is the accepted one."""
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
    """N-Grammys in the published block that notes what became of each."""

    def __init__(self, seen: Seen, k: int, w: int) -> None:
        """
        Args:
            seen: takes the notes.
            k: of the paper.
            w: of the paper.
        """
        super().__init__(k, w, layout="batched", table_width=k)
        self._seen = seen

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """See ``Drafter``. The last step of a request is not observed."""
        if len(tree) > 1:
            self._seen.add(tree, acceptance)


@dataclass(frozen=True, slots=True)
class WatchedChoice(StrategyChoice):
    """Builds drafters that note into one place."""

    seen: Seen

    def build(self) -> Drafter:
        """A new drafter."""
        return WatchedNgrammys(self.seen, **self.options)


def runs(sizes: Mapping[str, int], repeats: int) -> int:
    """How many there are at most, by records of each dataset."""
    grid, top = 1 + len(ROWS) * len(WIDTHS), 1 + len(_KINDS) * len(TOP_K)
    return sum(size * (grid + 4 * repeats + (top if name in DATASETS[:2] else 0)) for name, size in sizes.items())


def measure(stage: Stage, found: Found) -> None:
    """All of it, on the model's own outputs."""
    shared = stage.shared(_BUDGET)
    found.notes += [
        "the block is k branches of one sequence under a tree mask, not a batch of k copies: the root is computed once",
        f"w is one of {', '.join(map(str, WIDTHS))}; the paper has 2, 4, ... 14",
        "speeds are of whole requests, the prefill included, as the paper's; the grid ran once, table 1 in all repeats",
    ]
    grid = {(k, w): f"k={k} w={w}" for k in ROWS for w in WIDTHS}
    lines: dict[str, dict[str, Value]] = {}
    found.tables["table 1"] = lines
    for name, prompts in stage.datasets.items():
        choices = {label: block(k, w) for (k, w), label in grid.items()}
        measured = found.measures[name] = race(stage, f"grid on {name}", shared, prompts, choices, repeats=1)
        winner = best(measured)
        chosen = {label: choices[label] for label in ("k=10 w=10", winner)} | {"lookahead decoding": _LOOKAHEAD}
        measured |= race(stage, f"table 1 on {name}", shared, prompts, chosen)
        measured[BEST] = measured[winner]
        for label, row in (("(10,10)", "k=10 w=10"), ("(k*,w*)", winner), ("lookahead decoding", "lookahead decoding")):
            line = lines.setdefault(f"{stage.loaded.served_name} {label}", {})
            line |= {f"{name} tok/call": measured[row]["tokens_per_step"], f"{name} speed-up": measured[row]["speedup"]}
        found.notes.append(f"(k*, w*) on {name}: {winner}")
        for figure, metric in (("figure 3", "speedup"), ("figure 5", "tokens_per_step")):
            heat = {str(k): {str(w): measured[grid[k, w]][metric].mean for w in WIDTHS} for k in ROWS}
            found.figures[f"{figure}, {name}"] = panel("heat", metric.replace("_", " "), "w", "k", heat)
        _watch(stage, shared, prompts, name, found)
        if name in DATASETS[:2]:
            _top_k(stage, shared, prompts, name, found)
    _slowdowns(stage, found)


def _watch(stage: Stage, shared: SharedModel, prompts: Sequence[Prompt], name: str, found: Found) -> None:
    """Figure 4 on one dataset."""
    seen = Seen()
    contestant = EngineContestant(
        maker(shared, WatchedChoice("watched", "ngrammys", {"k": 10, "w": 10}, seen), ()), stage.max_tokens
    )
    for prompt in prompts:
        stage.runs.check_time()
        contestant.run([prompt])
    for metric, values in (("accepted length", seen.lengths), ("accepted rank", seen.ranks), ("rows", seen.rows)):
        for source, numbers in values.items():
            row = found.measures[name].setdefault(source, {})
            row[metric] = figure_of(numbers)
        found.figures[f"figure 4, {name}, {metric}"] = panel(
            "bars", f"share of steps by {metric}", metric, "share", shares(values)
        )


def shares(values: Mapping[str, Sequence[int]]) -> dict[str, dict[str, float]]:
    """How often each number came, by source: ``{"context": [1, 1, 3]}`` gives 2/3 for 1 and 1/3 for 3, and 0 for 0 and 2."""
    most = max((max(numbers) for numbers in values.values() if numbers), default=0)
    return {
        source: {str(n): round(numbers.count(n) / len(numbers), 4) for n in range(most + 1)}
        for source, numbers in ((source, list(found)) for source, found in values.items())
        if numbers
    }


def _top_k(stage: Stage, shared: SharedModel, prompts: Sequence[Prompt], name: str, found: Found) -> None:
    """Figure 2 on one dataset."""
    choices = {f"{kind} k={k} w={w}": block(k, w, kind) for kind, w in _KINDS for k in TOP_K}
    measured = race(stage, f"figure 2 on {name}", shared, prompts, choices, repeats=1)
    own = found.measures[name]
    own |= {label: row for label, row in measured.items() if label != PLAIN}
    steps = [measured[f"bigram k={TOP_K[-1]} w={w}"]["tokens_per_step"].mean for w in (1, 2, 3)]
    own |= {"w=1 to w=2": {"gain": Figure(steps[1] - steps[0])}, "w=2 to w=3": {"gain": Figure(steps[2] - steps[1])}}
    series = {
        f"{kind} w={w}": {str(k): measured[f"{kind} k={k} w={w}"]["tokens_per_step"].mean for k in TOP_K} for kind, w in _KINDS
    }
    found.figures[f"figure 2, {name}"] = panel("lines", "tokens per call", "k", "tokens per call", series)


def _slowdowns(stage: Stage, found: Found) -> None:
    """Figure 1: a block of (k, w) is 1 + k * w rows here."""
    sizes = {(k, w): 1 + k * w for k in BLOCK_ROWS for w in BLOCK_WIDTHS}
    stage.progress.say("figure 1: forwards by rows")
    times = step_ms(stage.loaded, [(rows, context) for rows in set(sizes.values()) for context in CONTEXTS])
    found.measures["device"] = {f"{rows} rows behind {context}": {"ms": Figure(ms)} for (rows, context), ms in times.items()}
    for context in CONTEXTS:
        if (1, context) not in times:
            continue
        heat: dict[str, dict[str, float]] = {}
        for (k, w), rows in sizes.items():
            if (rows, context) in times:
                heat.setdefault(str(k), {})[str(w)] = times[rows, context] / times[1, context]
        found.figures[f"figure 1, context {context}"] = panel("heat", "slowdown of a forward", "w", "k", heat)
