"""Lookahead Decoding's tables 2 to 4 and figures 4, 5 and 8: window W, n-gram N and guesses G, and the law of its scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from decoding.request import Request, SamplingParams
from decoding.strategy_choice import StrategyChoice
from engine.engine import Engine
from experiments.bench.engines.contestants import EngineContestant, Prompt, Run, run_requests
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.figure import panel
from experiments.papers.beside import Found
from experiments.papers.numbers.jacobi import SETTINGS
from experiments.papers.numbers.published import ALL, Figure, Value
from experiments.papers.stage import PLAIN, Stage, best, race

WINDOWS, NGRAMS = (1, 5, 10, 15), (3, 5, 7)
SAMPLED = ("cnn", "xsum")  # table 2
TEMPERATURES = (1.0, 0.0)
_SWEPT = "mt_bench"
_BUDGET = 192  # the widest window and its guesses: (15 + 15) * (7 - 1) rows
_GOOD = (5, 15, 15)
_ALPHAS = np.arange(0.001, 1.0, 0.001)  # of the law, that are tried


def setting(ngram: int, window: int, guesses: int, prompt: bool = False) -> StrategyChoice:
    """A setting (N, W, G) of the paper, with or without the prompt as reference."""
    options = {"ngram": ngram, "window": window, "guesses": guesses, "prompt_as_reference": prompt}
    return StrategyChoice("", "jacobi", options)


class SampledContestant(EngineContestant):
    """Draws tokens, each prompt with the same seed whatever drafts."""

    def __init__(self, make_engine: Callable[[], Engine], params: SamplingParams, reseeded: bool = False) -> None:
        """
        Args:
            make_engine: makes an engine that has seen no request.
            params: of each request.
            reseeded: each repeat has another seed.
        """
        super().__init__(make_engine, params.max_tokens)
        self._params, self._reseeded = params, reseeded

    def renew(self) -> None:
        """See ``Contestant``."""
        super().renew()
        if self._reseeded:
            self._params = replace(self._params, seed=(self._params.seed or 0) + 1)

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """See ``Contestant``."""
        return run_requests(self.engine, [Request(each.id, each.ids, self._params, each.references) for each in prompts])


def runs(sizes: Mapping[str, int], repeats: int) -> int:
    """How many there are, by records of each dataset."""
    swept = sizes.get(_SWEPT, 0)
    pairs = sum(size * (len(TEMPERATURES) if name in SAMPLED else 1) for name, size in sizes.items())
    return 2 * pairs * repeats + swept * ((2 + len(SETTINGS)) * repeats + 1 + len(WINDOWS) * len(NGRAMS))


def measure(stage: Stage, found: Found) -> None:
    """All of it, on the model's own outputs."""
    shared = stage.shared(_BUDGET)
    found.notes += [
        "figures 6 and 7, several devices: outrider bench scaling",
        "speeds are of whole requests, the prefill included, as the paper's; S is tokens over steps, the prefill is one",
        "table 2: one seed a prompt; differing counts outputs that are not those of plain decoding with that seed",
    ]
    sampling: dict[str, dict[str, Value]] = {}
    speedups: dict[str, Value] = {}
    found.tables |= {"table 2": sampling, "figure 5": {stage.loaded.served_name: speedups}}
    for name, prompts in stage.datasets.items():
        if name in SAMPLED:
            _sampling(stage, shared, name, prompts, found, sampling)
            continue
        found.measures[name] = race(stage, name, shared, prompts, {"lookahead": setting(*_GOOD)})
        speedups[name] = found.measures[name]["lookahead"]["speedup"]
    found.measures[ALL] = {name: found.measures[name]["lookahead"] for name in speedups}
    if speedups:
        line = {"speed-up": {name: found.measures[name]["lookahead"]["speedup"].mean for name in speedups}}
        found.figures["figure 5"] = panel("bars", "(5, 15, 15) against plain decoding", "dataset", "speed-up", line)
    if _SWEPT in stage.datasets:
        _settings(stage, shared, found)
        _scaling(stage, shared, found)


def _sampling(
    stage: Stage, shared: SharedModel, name: str, prompts: Sequence[Prompt], found: Found, rows: dict[str, dict[str, Value]]
) -> None:
    """Table 2 on one dataset."""
    for temperature in TEMPERATURES:

        def contestant(make: Callable[[], Engine], each: float = temperature) -> EngineContestant:
            return SampledContestant(make, SamplingParams(stage.max_tokens, each))

        label = f"temperature {temperature:g}"
        measured = race(stage, f"{label} on {name}", shared, prompts, {label: setting(*_GOOD)}, contestant=contestant)
        found.measures.setdefault(name, {})[label] = measured[label]
        found.measures[name].setdefault(PLAIN, measured[PLAIN])  # of either temperature: one token a step
        rows[f"{name}, {label}"] = _pair(measured[label])
    line = {
        f"{temperature:g}": found.measures[name][f"temperature {temperature:g}"]["tokens_per_step"].mean
        for temperature in TEMPERATURES
    }
    found.figures[f"table 2, {name}"] = panel("bars", "compression when sampling", "temperature", "S", {name: line})


def _pair(row: Mapping[str, Figure]) -> dict[str, Value]:
    return {"speed-up": row["speedup"], "S": row["tokens_per_step"]}


def _settings(stage: Stage, shared: SharedModel, found: Found) -> None:
    """Table 3."""
    choices = {"prompt lookup": StrategyChoice("", "prompt_lookup", {})}
    choices |= {label: setting(*numbers, prompt) for label, (numbers, prompt) in SETTINGS.items()}
    measured = race(stage, "table 3", shared, stage.datasets[_SWEPT], choices)
    found.measures[_SWEPT] |= {label: row for label, row in measured.items() if label != PLAIN}
    found.tables["table 3"] = {label: _pair(row) for label, row in measured.items()}


def _scaling(stage: Stage, shared: SharedModel, found: Found) -> None:
    """Figures 4 and 8 and table 4: G = W, without the prompt as reference."""
    grid = {(window, ngram): f"W={window} N={ngram}" for ngram in NGRAMS for window in WINDOWS}
    choices = {label: setting(ngram, window, window) for (window, ngram), label in grid.items()}
    measured = race(stage, "figure 4", shared, stage.datasets[_SWEPT], choices, repeats=1)
    found.measures[_SWEPT] |= {label: row for label, row in measured.items() if label != PLAIN}
    reached = {pair: measured[label]["tokens_per_step"].mean for pair, label in grid.items()}
    name = stage.loaded.served_name
    winner = best({label: measured[label] for label in grid.values()})
    window, ngram = next(pair for pair, label in grid.items() if label == winner)
    found.tables["table 4"] = {name: {"W": window, "N": ngram}}
    own = {f"N={n}": {str(w): reached[w, n] for w in WINDOWS} for n in NGRAMS}
    found.figures["figure 4 (a)"] = panel("lines", "compression S", "W = G", "S", own)
    if max(reached.values()) > 1.0:
        alpha, steps = fitted(reached)
        found.tables["figure 4"] = {name: {"alpha": alpha, "f": steps}}
        law = {f"N={n}": {str(w): compression(alpha, steps, w, n) for w in WINDOWS} for n in NGRAMS}
        found.figures["figure 4 (b)"] = panel("lines", f"the law, alpha {alpha:.3f}, f {steps:.3f}", "W = G", "S", law)
    else:
        found.notes.append("figure 4: the law has no fit, since no setting emitted more than one token a step")
    speeds = {str(w): measured[grid[w, 5]]["speedup"].mean for w in WINDOWS}
    found.tables["figure 8"] = {name: {"speed-up": max(speeds.values())}}
    found.figures["figure 8"] = panel("lines", "S and speed-up with N = 5", "W = G", "", {"S": own["N=5"], "speed-up": speeds})


# ---- the law by which it scales (section 4 of the paper) ---------------------------------------------------------------------


def expected_tokens(alpha: float, guesses: int, length: int) -> float:
    """Tokens of a step with ``guesses`` good speculations of ``length`` tokens (equation 5).

    Example: one guess of one token that is accepted with chance 0.5 gives 2 - 0.5 = 1.5 tokens.

    Args:
        alpha: chance that a token is accepted.
        guesses: b of the paper, W = G.
        length: gamma of the paper, N - 1.
    """
    depths = np.arange(1, length + 1)
    return float(length + 1 - np.sum((1.0 - alpha**depths) ** guesses))


def compression(alpha: float, steps: float, window: int, ngram: int) -> float:
    """S of the paper (equation 7): one step in ``steps`` has good speculations, the others emit one token.

    Example: alpha 0.425, f 3.106, W = G = 15 and N = 5 give (2.106 + 4.04) / 3.106 = 1.98; the paper measured 1.96.
    """
    return (steps - 1.0 + expected_tokens(alpha, window, ngram - 1)) / steps


def fitted(measured: Mapping[tuple[int, int], float]) -> tuple[float, float]:
    """The alpha and f of the law that come nearest to measured compressions, by least squares.

    For each alpha, S - 1 is proportional to the expected tokens - 1, so that the best f follows; f is at least 1.

    Args:
        measured: (W = G, N) -> S.

    Raises:
        ValueError: nothing was measured, or nowhere was more than a token emitted in a step.
    """
    gains = np.array([reached - 1.0 for reached in measured.values()])
    if not len(gains) or gains.max() <= 0.0:
        raise ValueError("the law has no fit: no setting emitted more than one token a step")
    found = []
    for alpha in _ALPHAS:
        more = np.array([expected_tokens(float(alpha), window, ngram - 1) - 1.0 for window, ngram in measured])
        share = min(1.0, max(1e-9, float(more @ gains) / float(more @ more)))  # 1 / f
        found.append((float(np.sum((share * more - gains) ** 2)), float(alpha), 1.0 / share))
    _, alpha, steps = min(found)
    return round(alpha, 3), round(steps, 3)
