"""Lookahead Decoding's tables 2 to 4 and figures 4, 5 and 8: window W, n-gram N and guesses G, and the law of its scaling."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from outrider.decoding.drafters.registry import StrategyChoice
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.experiments.bench.engines.contestants import EngineContestant, Prompt, Run, SharedModel, run_requests
from outrider.experiments.bench.figure import panel
from outrider.experiments.papers.beside import Found
from outrider.experiments.papers.numbers.published import ALL, Value, load
from outrider.experiments.papers.priced import PRICED, add_prices, priced_on, speedups
from outrider.experiments.papers.stage import PLAIN, MakeContestant, Row, Stage, best, means, others, race

WINDOWS, NGRAMS = (1, 5, 10, 15), (3, 5, 7)
SAMPLED, TEMPERATURES = ("cnn", "xsum"), (1.0, 0.0)  # datasets of table 2
_SWEPT = "mt_bench"
_BUDGET = 192  # the widest window and its guesses: (15 + 15) * (7 - 1) rows
_GOOD = "(5,15,15)"
_LINES = {f"N={n}": {str(w): f"W={w} N={n}" for w in WINDOWS} for n in NGRAMS}  # labels of the grid
_ALPHAS = np.arange(0.001, 1.0, 0.001)  # candidates of the fit


def settings(labels: Iterable[str]) -> dict[str, tuple[int, int, int, bool]]:
    """Return N, W, G and whether the prompt is a reference by labels such as ``(5,1,30) prompt``; other labels are left out."""
    found = {}
    for label in labels:
        numbers = re.fullmatch(r"\((\d+),(\d+),(\d+)\)( prompt)?", label)
        if numbers is not None:
            found[label] = (int(numbers[1]), int(numbers[2]), int(numbers[3]), numbers[4] is not None)
    return found


SETTINGS = settings(load("jacobi").rows_of("table 3"))


def strategy(ngram: int, window: int, guesses: int, prompt: bool = False) -> StrategyChoice:
    """Return the strategy of a setting (N, W, G), with or without the prompt as reference."""
    options = {"ngram": ngram, "window": window, "guesses": guesses, "prompt_as_reference": prompt}
    return StrategyChoice("", "jacobi", options)


class SampledContestant(EngineContestant):
    """Contestant that samples each prompt with the same seed, whatever the drafts."""

    def __init__(self, make_engine: Callable[[], Engine], params: SamplingParams, reseeded: bool = False) -> None:
        """Take parameters of each request; ``reseeded`` gives each repeat another seed."""
        super().__init__(make_engine, params.max_tokens)
        self._params, self._reseeded = params, reseeded

    def renew(self) -> None:
        """See ``Contestant``."""
        super().renew()
        if self._reseeded:
            self._params = replace(self._params, seed=self._params.seed + 1)

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """See ``Contestant``."""
        return run_requests(self.engine, [Request(each.id, each.ids, self._params, each.references) for each in prompts])


def measure(stage: Stage, found: Found) -> None:
    """Run all races on the model's own outputs."""
    shared, model = stage.shared(_BUDGET), stage.loaded.served_name
    found.notes += [
        "figures 6 and 7, several devices: outrider bench scaling",
        "speeds are of whole requests, the prefill included, as the paper's; S is tokens over steps, the prefill is one",
        "table 2: one seed a prompt; differing counts outputs that are not those of plain decoding with that seed",
    ]
    found.tables |= {"table 2": {}, "figure 5": {model: {}}}
    for name, prompts in stage.datasets.items():
        if name in SAMPLED:
            continue
        rows = found.measures[name] = _race(stage, name, shared, prompts, {"lookahead": strategy(*SETTINGS[_GOOD])})
        found.tables["figure 5"][model][name] = rows["lookahead"]["speedup"]
    followed = {name: found.measures[name]["lookahead"] for name in found.tables["figure 5"][model]}
    found.measures[ALL] = followed
    if followed:
        line = {"speed-up": {name: row[PRICED].mean / found.measures[name][PLAIN][PRICED].mean for name, row in followed.items()}}
        found.figures["figure 5"] = panel("bars", "(5, 15, 15) against plain decoding, priced", "dataset", "speed-up", line)
    _sampling(stage, shared, found)
    if _SWEPT in stage.datasets:
        prompts = stage.datasets[_SWEPT]
        choices = {"prompt lookup": StrategyChoice("", "prompt_lookup", {})}
        choices |= {label: strategy(*numbers) for label, numbers in SETTINGS.items()}
        measured = _race(stage, "table 3", shared, prompts, choices)
        found.measures[_SWEPT] |= others(measured)
        found.tables["table 3"] = {label: _pair(row) for label, row in measured.items()}
        _scaling(stage, shared, prompts, found)


def _sampling(stage: Stage, shared: SharedModel, found: Found) -> None:
    """Measure table 2."""
    labels = {f"{temperature:g}": f"temperature {temperature:g}" for temperature in TEMPERATURES}
    datasets = {name: prompts for name, prompts in stage.datasets.items() if name in SAMPLED}
    for temperature, label in zip(TEMPERATURES, labels.values(), strict=True):

        def contestant(make: Callable[[], Engine], each: float = temperature) -> EngineContestant:
            return SampledContestant(make, SamplingParams(stage.max_tokens, each, seed=stage.seed))

        for name, prompts in datasets.items():
            good = {label: strategy(*SETTINGS[_GOOD])}
            rows = _race(stage, f"{label} on {name}", shared, prompts, good, contestant=contestant)
            measured = found.measures.setdefault(name, {PLAIN: rows[PLAIN]})  # of either temperature: one token a step
            measured[label] = rows[label]
            found.tables["table 2"][f"{name}, {label}"] = _pair(rows[label])
    for name in datasets:
        line = means(found.measures[name], "tokens_per_step", {name: labels})
        found.figures[f"table 2, {name}"] = panel("bars", "compression when sampling", "temperature", "S", line)


def _race(
    stage: Stage,
    name: str,
    shared: SharedModel,
    prompts: Sequence[Prompt],
    choices: Mapping[str, StrategyChoice],
    repeats: int | None = None,
    contestant: MakeContestant | None = None,
) -> dict[str, Row]:
    """Run a race and price it."""
    rows = race(stage, name, shared, prompts, choices, repeats, contestant=contestant)
    lengths = [len(prompt.ids) for prompt in prompts]
    add_prices(rows, priced_on("jacobi", name), lengths, repeats=repeats or stage.repeats, choices=choices)
    return rows


def _pair(row: Row) -> dict[str, Value]:
    return {"speed-up": row["speedup"], "S": row["tokens_per_step"]}


def _scaling(stage: Stage, shared: SharedModel, prompts: Sequence[Prompt], found: Found) -> None:
    """Measure figures 4 and 8 and table 4, with G = W and without the prompt as reference."""
    grid = {_LINES[f"N={n}"][str(w)]: (w, n) for n in NGRAMS for w in WINDOWS}
    choices = {label: strategy(n, w, w) for label, (w, n) in grid.items()}
    measured = _race(stage, "figure 4", shared, prompts, choices, repeats=1)
    found.measures[_SWEPT] |= others(measured)
    name, (window, ngram) = stage.loaded.served_name, grid[best(measured, PRICED)]
    found.tables["table 4"] = {name: {"W": window, "N": ngram}}
    own = means(measured, "tokens_per_step", _LINES)
    found.figures["figure 4 (a)"] = panel("lines", "compression S", "W = G", "S", own)
    reached = {setting: measured[label]["tokens_per_step"].mean for label, setting in grid.items()}
    if max(reached.values()) > 1.0:
        alpha, steps = fitted(reached)
        found.tables["figure 4"] = {name: {"alpha": alpha, "f": steps}}
        law = {f"N={n}": {str(w): compression(alpha, steps, w, n) for w in WINDOWS} for n in NGRAMS}
        found.figures["figure 4 (b)"] = panel("lines", f"the law, alpha {alpha:.3f}, f {steps:.3f}", "W = G", "S", law)
    else:
        found.notes.append("figure 4: the law has no fit, since no setting emitted more than one token a step")
    speeds = speedups(measured, PLAIN, {"speed-up": _LINES["N=5"]})
    found.tables["figure 8"] = {name: {"speed-up": max(speeds["speed-up"].values())}}
    found.figures["figure 8"] = panel("lines", "S and priced speed-up with N = 5", "W = G", "", {"S": own["N=5"], **speeds})


def expected_tokens(alpha: float, guesses: int, length: int) -> float:
    """Return the tokens of a step with ``guesses`` good speculations of ``length`` tokens (equation 5 of the paper).

    Example: one guess of one token that is accepted with chance 0.5 gives 2 - 0.5 = 1.5 tokens.
    """
    depths = np.arange(1, length + 1)
    return float(length + 1 - np.sum((1.0 - alpha**depths) ** guesses))


def compression(alpha: float, steps: float, window: int, ngram: int) -> float:
    """Return S of the paper (equation 7): one step in ``steps`` has good speculations, the others emit one token.

    Example: alpha 0.425, f 3.106, W = G = 15 and N = 5 give (2.106 + 4.04) / 3.106 = 1.98; the paper measured 1.96.
    """
    return (steps - 1.0 + expected_tokens(alpha, window, ngram - 1)) / steps


def fitted(measured: Mapping[tuple[int, int], float]) -> tuple[float, float]:
    """Fit alpha and f, at least 1, of the law to S by (W = G, N), by least squares.

    For each alpha, S - 1 is proportional to the expected tokens - 1, from which the best f follows.

    Raises:
        ValueError: no setting emitted more than one token per step.
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
