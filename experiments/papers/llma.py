"""LLMA's tables 2 to 4 and figures 3 and 4: match length n and copy length k, with documents and with cached sessions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from decoding.budget.latency import StepLoad
from decoding.drafters.llma import LlmaDrafter
from decoding.replay import replay_workload
from decoding.request import Request
from decoding.strategy_choice import StrategyChoice
from decoding.tree import DraftTree
from experiments.bench.engines.contestants import Prompt
from experiments.bench.figure import panel
from experiments.papers.beside import Found
from experiments.papers.numbers.published import Figure, Value, figure_of
from experiments.papers.stage import BEST, PLAIN, SESSIONS, Stage, best, race

MATCH_LENGTHS = (1, 2, 4)
COPY_LENGTHS = (2, 5, 10, 15, 20)
_TABLES = {"retrieval": "table 3", "cache": "table 4"}
_COUNTS = {"triggers": "copies triggered a sample", "accepted": "copied tokens accepted a sample", "steps": "steps a sample"}


class CountedCopies(LlmaDrafter):
    """LLMA that counts how often its copy mechanism is triggered."""

    def __init__(self, match_length: int, copy_length: int) -> None:
        """See ``LlmaDrafter``; the references alone are copied from, as published."""
        super().__init__(match_length, copy_length, include_prompt=False)
        self.triggers = 0

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """See ``Drafter``."""
        trees = super().propose(requests, budgets)
        self.triggers += sum(len(tree) > 1 for tree in trees)
        return trees


def counted(prompts: Sequence[Prompt], vocab_size: int, match_length: int, copy_length: int) -> dict[str, Figure]:
    """What Figure 4 counts, for each sample: Algorithm 2 of the paper, without a model."""

    def one(prompt: Prompt) -> tuple[float, float, float]:
        drafter = CountedCopies(match_length, copy_length)  # of its own, as the references alone are copied from
        counts = replay_workload([prompt.text()], lambda: drafter, copy_length, vocab_size, time.perf_counter)
        return float(drafter.triggers), float(counts.accepted), float(counts.steps)

    columns = zip(*map(one, prompts), strict=True)
    values = dict(zip(("triggers", "accepted", "steps"), columns, strict=True))
    return {name: Figure(statistics.fmean(each), samples=figure_of(each).samples) for name, each in values.items()}


def runs(sizes: Mapping[str, int], repeats: int) -> int:
    """How many there are, by records of each dataset."""
    return (1 + len(MATCH_LENGTHS) * len(COPY_LENGTHS)) * repeats * sum(sizes.values())


def measure(stage: Stage, found: Found) -> None:
    """The grid on each dataset, target-guided: times with the model, counts by replay."""
    found.notes += [
        "speeds are of whole requests, the prefill included, as the paper's; the decode speed-up is of tokens after the first",
        "n and k were chosen on the same records that tables 3 and 4 are of; the paper has a dev set of its own",
    ]
    if stage.options is not None:
        found.notes.append(f"the references of cached sessions are outputs of the {SESSIONS} most similar others of the file")
    shared = stage.shared(max(COPY_LENGTHS))
    vocab_size: int = stage.loaded.model.config.get_text_config().vocab_size
    grid = {(n, k): f"n={n} k={k}" for n in MATCH_LENGTHS for k in COPY_LENGTHS}
    choices = {
        label: StrategyChoice(
            label, "llma", {"match_length": n, "copy_length": k, "include_prompt": False, "similar_requests": 0}
        )
        for (n, k), label in grid.items()
    }
    lengths = found.tables.setdefault("table 1", {})
    chosen = found.tables.setdefault("table 2", {}).setdefault(stage.loaded.served_name, {})
    for name, prompts in stage.datasets.items():
        own = found.measures[name] = race(stage, name, shared, prompts, choices)
        for (n, k), label in grid.items():
            own[label] |= counted(prompts, vocab_size, n, k)
        winner = best(own)
        own[BEST] = own[winner]
        n, k = next(pair for pair, label in grid.items() if label == winner)
        chosen |= {f"{name} n": n, f"{name} k": k}
        lengths[name] = _lengths(prompts)
        found.tables[_TABLES[name]] = {f"{stage.loaded.served_name}, {winner}": _speeds(own, winner)}
        series = {f"n={n}": {str(k): own[grid[n, k]]["speedup"].mean for k in COPY_LENGTHS} for n in MATCH_LENGTHS}
        found.figures[f"figure 3, {name}"] = panel("lines", "speed-up over plain decoding", "copy length k", "speed-up", series)
        for count, title in _COUNTS.items():
            rows = {f"n={n}": {str(k): own[grid[n, k]][count].mean for k in COPY_LENGTHS} for n in MATCH_LENGTHS}
            found.figures[f"figure 4, {name}, {count}"] = panel("lines", title, "copy length k", "a sample", rows)


def _lengths(prompts: Sequence[Prompt]) -> dict[str, Value]:
    return {
        "input tokens": sum(len(prompt.ids) for prompt in prompts) / len(prompts),
        "output tokens": sum(len(prompt.known or ()) for prompt in prompts) / len(prompts),
    }


def _speeds(found: dict[str, dict[str, Figure]], winner: str) -> dict[str, Value]:
    return {
        "plain tokens/s": found[PLAIN]["tokens/s"],
        "LLMA tokens/s": found[winner]["tokens/s"],
        "speed-up": found[winner]["speedup"],
        "decode speed-up": found[winner]["decode speedup"],
    }
