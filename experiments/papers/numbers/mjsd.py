"""Statements of the paper on multi-token joint speculative decoding (arXiv 2407.09722) that follow from its tables."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from outrider.experiments.papers.numbers.published import Claim, Figure, Paper, Value, load

ROUGE, ENERGY = "ROUGE-L", "J/token"
METRICS = ("tokens/s", ENERGY, "perplexity")
ABLATED = "prompts"  # dataset of table 3 and figure 4 here
TASK = "cnn"  # dataset of figure 1 whose outputs are compared with references
BLOCKS = (1, 2, 4, 8)  # tokens of a block of multi-token joint greedy decoding, in figure 1
DRAWN = "8 beams, drawn"  # label of MJSD as in its published code
_UNMETERED = "nothing here counts this machine's energy"
_COLUMNS = {"prompts": "CP", "alpaca": "CA", "cnn": "CD"}
_MODELS = ("Llama-2", "OPT")
FASTER, LESS_ENERGY = "MJSD over plain decoding: three datasets", "J/token: every order of the five methods"  # headlines
_EXPLAINED = {
    FASTER: "a weak draft model: 1.7 tokens a step; tried: the model itself in four bits, 4.7",
    LESS_ENERGY: "MJSD takes least on each dataset; the others, of 1.1 to 1.5 tokens a step, take as much as plain or more",
}  # by headline, as was tried
_PLAIN, *_DRAFTING, _BEST = ("plain", "speculative", "bild", "spectr", "mjsd")
_PAIRS = (*((method, _PLAIN) for method in (*_DRAFTING, _BEST)), *((_BEST, method) for method in _DRAFTING))

Sides = list[tuple[Figure, Figure]]  # of each pair of models, both methods


def beams(count: int) -> str:
    """Return the label of MJSD with a number of beams."""
    return f"{count} beams"


def threshold(value: float) -> str:
    """Return the label of MJSD with a threshold."""
    return f"threshold {value:g}"


def block(length: int) -> str:
    """Return the label of multi-token joint greedy decoding with a block length."""
    return f"mjgd, blocks of {length}"


def _ahead(metric: str, first: Figure, second: Figure) -> int:
    """Return 1 if the first is better, -1 if the second is, 0 if they are closer than the sum of their spreads.

    Example: perplexities 3.74 +- 0.14 and 3.64 +- 0.11 are the same: 0.10 is less than 0.25.
    """
    if abs(first.mean - second.mean) <= first.spread + second.spread:
        return 0
    return 1 if (first.mean > second.mean) == (metric == "tokens/s") else -1


def _compared(where: str, dataset: str, metric: str, names: tuple[str, str], sides: Sides) -> list[Claim]:
    """Return the statement that one method is better or both are the same; none if the models contradict each other."""
    (first, second), lower = names, metric != "tokens/s"
    signs = {_ahead(metric, *pair) for pair in sides}
    if signs >= {1, -1}:
        return []
    if -1 in signs:
        first, second, sides = second, first, [(right, left) for left, right in sides]
    same = signs == {0}
    ratios = [right.mean / left.mean if lower else left.mean / right.mean for left, right in sides]
    near = max((left.spread + right.spread) / min(left.mean, right.mean) for left, right in sides)
    shown = ", ".join(f"{left.mean:g} against {right.mean:g}" for left, right in sides)
    headline = LESS_ENERGY if metric == ENERGY else FASTER if (first, second, metric) == (_BEST, _PLAIN, "tokens/s") else ""
    return [
        Claim(
            where, dataset, metric, first, second,
            words=f"{first} {'as good as' if same else 'better than'} {second}: {shown}",
            equal=same,
            lower=lower,
            tolerance=max(0.02, near),
            size=None if same else (min(ratios), max(ratios)),
            beyond=_UNMETERED if metric == ENERGY else "",
            headline=headline if where == "table 2" else "",
        )
    ]  # fmt: skip


def _figure(value: Value) -> Figure:
    return value if isinstance(value, Figure) else Figure(value)


def _claims(paper: Paper) -> list[Claim]:
    claims = []
    table = paper.rows_of("table 2")
    for dataset, column in _COLUMNS.items():
        for metric in METRICS:
            rows = [table[f"{column}, {model}, {metric}"] for model in _MODELS]
            for first, second in _PAIRS:
                sides = [(_figure(row[first]), _figure(row[second])) for row in rows]
                claims += _compared("table 2", dataset, metric, (first, second), sides)
    table = paper.rows_of("table 3")
    for few, many in pairwise((2, 4, 8)):
        for metric in METRICS:
            rows = [table[f"{model}, {metric}"] for model in _MODELS]
            sides = [(_figure(row[beams(many)]), _figure(row[beams(few)])) for row in rows]
            claims += _compared("table 3", ABLATED, metric, (beams(many), beams(few)), sides)
    return claims


def load_mjsd() -> Paper:
    """Return the paper with the statements of its tables before those of its text."""
    paper = load("mjsd")
    return replace(paper, claims=(*_claims(paper), *paper.claims), explained=_EXPLAINED)
