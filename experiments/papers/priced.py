"""Recorded steps priced on the papers' own GPUs: a roofline with the launches that a paper's plain decoding tells.

The time of drafting without a model is not priced, since the papers do not tell it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.decoding.drafters.registry import StrategyChoice
from outrider.decoding.request import PLAIN
from outrider.engine.emulation.hardware import ModelShape
from outrider.experiments.papers.numbers.mjsd import ENERGY
from outrider.experiments.papers.numbers.published import Figure, load
from outrider.experiments.simulation.hardware import GPUS, Gpu
from outrider.experiments.simulation.papers import (
    LLAMA_7B,
    LLAMA_13B,
    LLMA_GPU,
    SHARED_GPU,
    TRIE_GPU,
    TRIE_MODEL,
    launching,
    llama_software,
    llma_software,
    trie_software,
)
from outrider.experiments.simulation.steps import Software, roofline_s

PRICED, PRICED_ENERGY = "priced tokens/s", "priced J/token"
PRICES = {"speedup": PRICED, "tokens/s": PRICED, ENERGY: PRICED_ENERGY}  # measured metric -> priced one


@dataclass(frozen=True, slots=True)
class PaperGpu:
    """A GPU with a model and its program, as a paper had them."""

    gpu: Gpu
    model: ModelShape
    software: Software
    draft_layers: int = 0  # of the draft model, whose forward takes the launches of its layers
    joules: Mapping[int, float] | None = None  # rows -> energy of a forward

    @property
    def draft_s(self) -> float:
        """Return the seconds of a forward of the draft model."""
        return self.draft_layers * self.software.launch_s

    def step_s(self, rows: float, context: float, copies: int = 1) -> float:
        """Return the seconds of a forward of ``rows`` that look at ``context`` entries, of which there are ``copies``."""
        return roofline_s(self.gpu, self.model, self.software, rows, copies * context, rows * context)

    def prompt_s(self, tokens: float) -> float:
        """Return the seconds of a prompt's forward."""
        return roofline_s(self.gpu, self.model, self.software, tokens, 0, tokens * tokens / 2)

    def step_j(self, rows: float) -> float:
        """Return the joules of a forward, between and beyond the paper's numbers of rows on straight lines."""
        assert self.joules is not None, self.gpu.name
        known, energy = list(self.joules), list(self.joules.values())
        beyond = (energy[-1] - energy[-2]) / (known[-1] - known[-2]) * max(0.0, rows - known[-1])
        return float(np.interp(rows, known, energy)) + beyond


def priced_on(paper: str, dataset: str) -> PaperGpu:
    """Return what a paper ran a dataset on."""
    if paper == "llma":
        return PaperGpu(LLMA_GPU, LLAMA_7B, llma_software())
    if paper == "trie":
        model, software = (TRIE_MODEL, trie_software()) if dataset == "antrag" else (LLAMA_13B, llama_software())
        return PaperGpu(TRIE_GPU, model, software)
    if paper == "mjsd":
        numbers = load("mjsd")
        software = launching(GPUS["L40"], LLAMA_13B, numbers.number("table 2", "CP, Llama-2, tokens/s", "plain"))
        joules = {int(rows): numbers.number("table 1", rows, "J/run") for rows in numbers.rows_of("table 1")}
        return PaperGpu(GPUS["L40"], LLAMA_13B, software, 2, joules)
    # Neither paper tells the speed of its plain decoding.
    return PaperGpu(SHARED_GPU if paper == "ngrammys" else TRIE_GPU, LLAMA_7B, llama_software())


def add_prices(
    rows: Mapping[str, dict[str, Figure]],
    on: PaperGpu,
    prompts: Sequence[int],
    batch_size: int = 1,
    repeats: int = 1,
    sequences: Mapping[str, int] | None = None,
    choices: Mapping[str, StrategyChoice] | None = None,
) -> None:
    """Add the priced speed of whole requests, the prompt included, and the priced energy if ``on`` has joules.

    Example: 10 tokens in 4 steps with 12 drafts are the prompt's forward and 3 steps of 5 rows, the root and 4 drafts. A block of
    N-Grammys is priced as its program runs it (arXiv 2411.03786, 4.1 and appendix D): a full batch of k sequences of w + 1 rows,
    each with its copy of the context.

    Args:
        rows: label -> metric -> figure, with ``tokens_per_step`` and ``drafted_per_step`` of each record.
        on: see ``priced_on``.
        prompts: tokens of each prompt.
        batch_size: prompts of a record, which share each step.
        repeats: runs of a record that its samples are sums of.
        sequences: label -> drafted sequences side by side, of strategies with a draft model; 1 unless named.
        choices: label -> strategy, of which Jacobi windows and blocks of N-Grammys have rows that are no drafts.
    """
    groups = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    for label, row in rows.items():
        choice = choices[label] if choices and label in choices else StrategyChoice("", PLAIN, {})
        options = choice.options
        window = options["window"] * (options["ngram"] - 1) if "window" in options else 0
        copies = options["k"] if choice.name == "ngrammys" else 1
        seconds: list[tuple[float, float]] = []
        joules: list[tuple[float, float]] = []
        for group, (tokens, steps), (drafted, _) in zip(
            groups, row["tokens_per_step"].samples, row["drafted_per_step"].samples, strict=True
        ):
            requests = len(group) * repeats
            own = steps - requests  # after the first token
            drafts = drafted / own if own else 0.0
            forwards = drafts / (sequences or {}).get(label, 1) if on.draft_layers else 0.0
            each = copies * (1 + options["w"]) if choice.name == "ngrammys" else 1 + drafts + window
            wide, context = len(group) * each, sum(group) + tokens / repeats / 2
            shared = own / len(group)
            step_s = on.step_s(wide, context, copies) + forwards * on.draft_s
            seconds.append((tokens, repeats * on.prompt_s(sum(group)) + shared * step_s))
            if on.joules is not None:
                draft_j = on.step_j(1) * on.draft_s / on.step_s(1, context)
                joules.append((repeats * on.step_j(sum(group)) + shared * (on.step_j(wide) + forwards * draft_j), tokens))
        row[PRICED] = _ratio(seconds)
        if joules:
            row[PRICED_ENERGY] = _ratio(joules)


def _ratio(samples: Sequence[tuple[float, float]]) -> Figure:
    over, under = map(sum, zip(*samples, strict=True))
    return Figure(over / under, samples=tuple(samples))


def speedups(
    rows: Mapping[str, Mapping[str, Figure]], plain: str, lines: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, float]]:
    """Return the series of a panel, the priced speed over plain decoding's, from labels by line and x."""
    base = rows[plain][PRICED].mean
    return {name: {x: rows[label][PRICED].mean / base for x, label in line.items()} for name, line in lines.items()}
