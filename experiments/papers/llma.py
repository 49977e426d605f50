"""LLMA's tables 2 to 4 and figures 3 and 4: match length n and copy length k, with documents and with cached sessions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.llma import LlmaDrafter
from outrider.decoding.drafters.registry import StrategyChoice
from outrider.decoding.replay import replay_workload
from outrider.decoding.request import Request
from outrider.decoding.tree import DraftTree
from outrider.experiments.bench.engines.contestants import Prompt
from outrider.experiments.bench.figure import panel
from outrider.experiments.papers.beside import Found
from outrider.experiments.papers.numbers.published import Figure, figure_of
from outrider.experiments.papers.priced import PRICED, add_prices, priced_on, speedups
from outrider.experiments.papers.stage import BEST, PLAIN, SESSIONS, Stage, best, means, race, shown

_LINES = {f"n={n}": {str(k): f"n={n} k={k}" for k in (2, 5, 10, 15, 20)} for n in (1, 2, 4)}  # labels of the grid
_GRID = {label: (int(line[2:]), int(k)) for line, labels in _LINES.items() for k, label in labels.items()}
_TABLES = {"retrieval": "table 3", "cache": "table 4"}
_COUNTS = {"triggers": "copies triggered a sample", "accepted": "copied tokens accepted a sample", "steps": "steps a sample"}


class CountedCopies(LlmaDrafter):
    """LLMA that counts its copies, from references only as published."""

    def __init__(self, match_length: int, copy_length: int) -> None:
        super().__init__(match_length, copy_length, include_prompt=False)
        self.triggers = 0

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """See ``Drafter``."""
        trees = super().propose(requests, budgets)
        self.triggers += sum(len(tree) > 1 for tree in trees)
        return trees


def counted(prompts: Sequence[Prompt], vocab_size: int, match_length: int, copy_length: int) -> dict[str, Figure]:
    """Return the counts of figure 4 per sample, by Algorithm 2 of the paper without a model."""

    def one(prompt: Prompt) -> tuple[float, float, float]:
        drafter = CountedCopies(match_length, copy_length)
        counts = replay_workload([prompt.text()], lambda: drafter, copy_length, vocab_size, time.perf_counter)
        return float(drafter.triggers), float(counts.accepted), float(counts.steps)

    columns = zip(*map(one, prompts), strict=True)
    return {
        name: Figure(statistics.fmean(each), samples=figure_of(each).samples) for name, each in zip(_COUNTS, columns, strict=True)
    }


def measure(stage: Stage, found: Found) -> None:
    """Run the grid on each dataset along the files' outputs."""
    found.notes += [
        "speeds are of whole requests, the prefill included, as the paper's; the decode speed-up is of tokens after the first",
        "n and k have the highest priced speed on the records that tables 3 and 4 are of; the paper has a dev set of its own",
        f"the references of cached sessions are outputs of the {SESSIONS} most similar others of the file",
    ]
    shared = stage.shared(max(k for _, k in _GRID.values()))
    fixed = {"include_prompt": False, "similar_requests": 0}
    choices = {
        label: StrategyChoice(label, "llma", {"match_length": n, "copy_length": k, **fixed}) for label, (n, k) in _GRID.items()
    }
    model = stage.loaded.served_name
    found.tables |= {"table 1": {}, "table 2": {model: {}}}
    for name, prompts in stage.datasets.items():
        own = found.measures[name] = race(stage, name, shared, prompts, choices)
        add_prices(own, priced_on("llma", name), [len(prompt.ids) for prompt in prompts])
        for label, setting in _GRID.items():
            own[label] |= counted(prompts, stage.vocab_size, *setting)
        winner = best(own, PRICED)
        own[BEST] = own[winner]
        n, k = _GRID[winner]
        found.tables["table 2"][model] |= {f"{name} n": n, f"{name} k": k}
        found.tables["table 1"][name] = {
            "input tokens": statistics.fmean(len(prompt.ids) for prompt in prompts),
            "output tokens": statistics.fmean(len(prompt.known or ()) for prompt in prompts),
        }
        found.tables[_TABLES[name]] = {
            f"{model}, {winner}": shown(own[PLAIN], {"plain tokens/s": "tokens/s"})
            | shown(own[winner], {"LLMA tokens/s": "tokens/s", "speed-up": "speedup", "decode speed-up": "decode speedup"})
            | {"priced speed-up": own[winner][PRICED].mean / own[PLAIN][PRICED].mean}
        }
        speeds = speedups(own, PLAIN, _LINES)
        found.figures[f"figure 3, {name}"] = panel(
            "lines", "speed-up on the paper's GPU, priced", "copy length k", "speed-up", speeds
        )
        for count, title in _COUNTS.items():
            counts = means(own, count, _LINES)
            found.figures[f"figure 4, {name}, {count}"] = panel("lines", title, "copy length k", "a sample", counts)
