"""A run beside the paper: the tables of both, and which of the paper's statements hold here."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.papers.numbers.published import ALL, Claim, Figure, Paper, Value

Rows = dict[str, dict[str, Value]]  # row -> column -> number
Sections = dict[str, Rows]  # name of a table or figure of the paper -> what was measured here
HELD, DIRECTION_ONLY, FAILS, UNDECIDED = "held", "direction only", "fails", "undecided"
NOT_TESTABLE, NOT_MEASURED = "not testable here", "not measured"
VERDICTS = (HELD, DIRECTION_ONLY, FAILS, UNDECIDED, NOT_TESTABLE, NOT_MEASURED)
_UNTOLD = "the interval of this run holds both directions"
_NO_SAMPLES = "one measurement, by which chance cannot be told"
_NO_SIZE, _OTHER_SIZE = "the paper gives no size", "the paper's size is outside the interval of this run"
_ROUNDING = 1e-12
_MOST = 20.0  # a logarithm above which a ratio says nothing


@dataclass(slots=True)
class Found:
    """What a run of a paper's tables found."""

    measures: dict[str, dict[str, dict[str, Figure]]] = field(default_factory=dict)  # dataset -> label -> metric
    tables: Sections = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> see ``experiments.bench.figure``
    notes: list[str] = field(default_factory=list)  # what is not as in the paper


@dataclass(frozen=True, slots=True)
class _Apart:
    """How far the preferred one is ahead here: the logarithm of a ratio, or a difference where a value is not above 0."""

    ahead: float
    error: float  # standard error; infinite where there are no samples to tell it by
    freedom: int  # samples less one
    is_ratio: bool

    @property
    def interval(self) -> tuple[float, float]:
        """In which it lies with 95 %."""
        reach = self.error * _t_quantile(self.freedom) if self.error else 0.0
        return self.ahead - reach, self.ahead + reach


def judged(
    claims: Sequence[Claim], measures: Mapping[str, Mapping[str, Mapping[str, Figure]]], device: str = "cpu"
) -> list[dict[str, Any]]:
    """Each statement with both values of this run and what follows from them.

    Args:
        claims: statements of a paper.
        measures: dataset -> label -> metric -> figure.
        device: it ran on. On a CPU nothing is concluded of a statement that is ``beyond`` one, unless what a CPU lacks speaks
            ``against`` it and its direction holds all the same.

    Returns:
        For each ``here``, both values, None where they were not measured; ``ratio``, how many times better the preferred one is;
        ``interval`` of it with 95 %, by the records, which both sides share unless datasets are compared; three answers; and the
        ``verdict`` that follows, one of ``VERDICTS``, with ``why`` where it is not ``held``:

        - ``direction``: whether the whole interval lies on the paper's side of 1; None where 1 is in it. Of two that are the same
          to the paper, whether all of it lies within the tolerance.
        - ``size``: the paper's ratio, lowest and highest (``paper``), ours over the nearest of it (``of_paper``) and whether it
          lies in our interval (``within``); None where the paper gives none.
        - ``power``: the ``records`` there were, and how many are ``needed`` to tell the direction in four of five runs, if it is
          as large as it was here.

        Where a value is not above 0 there is a difference in place of the ratio, and no size.
    """
    return [_judged(claim, measures.get(claim.dataset, {}), device) for claim in claims]


def _judged(claim: Claim, labels: Mapping[str, Mapping[str, Figure]], device: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "where": claim.where, "dataset": claim.dataset, "paper": claim.words, "metric": claim.metric,
        "of": [claim.better, claim.worse], "here": None, "verdict": NOT_MEASURED,
    }  # fmt: skip
    better, worse = (labels.get(label, {}).get(claim.metric) for label in (claim.better, claim.worse))
    if better is None or worse is None:
        if claim.beyond and device == "cpu":
            row["verdict"], row["why"] = NOT_TESTABLE, claim.beyond
        return row
    row["here"] = [round(better.mean, 4), round(worse.mean, 4)]
    apart = _apart(*((worse, better) if claim.lower else (better, worse)), paired=claim.dataset != ALL)
    row["direction"] = direction = _direction(apart, claim)
    within = None
    if math.isfinite(apart.error):
        bounds = [math.exp(min(bound, _MOST)) if apart.is_ratio else bound for bound in apart.interval]
        row["interval"] = interval = [round(bound, 4) for bound in bounds]
        row["power"] = {"records": apart.freedom + 1, "needed": _needed(apart, claim)}
        if apart.is_ratio and claim.size is not None:
            lowest, highest = claim.size
            within = interval[0] <= highest and lowest <= interval[1]
    if apart.is_ratio:
        ratio = math.exp(apart.ahead)
        row["ratio"] = round(ratio, 4)
        if claim.size is not None:
            nearest = min(max(ratio, claim.size[0]), claim.size[1])
            row["size"] = {"paper": list(claim.size), "of_paper": round(ratio / nearest, 4), "within": within}
    lacking = claim.beyond if device == "cpu" else ""
    if lacking and not (claim.against and direction):
        row["verdict"], row["why"] = NOT_TESTABLE, lacking
    elif direction is None:
        row["verdict"], row["why"] = UNDECIDED, _UNTOLD if math.isfinite(apart.error) else _NO_SAMPLES
    elif not direction:
        row["verdict"] = FAILS
        if claim.otherwise:
            row["why"] = claim.otherwise
    elif within or claim.equal:
        row["verdict"] = HELD
    else:
        row["verdict"] = DIRECTION_ONLY
        row["why"] = claim.otherwise or (_NO_SIZE if claim.size is None else lacking or _OTHER_SIZE)
    return row


def _direction(apart: _Apart, claim: Claim) -> bool | None:
    if not math.isfinite(apart.error):
        return None
    low, high = apart.interval
    if not claim.equal:
        return True if low > 0 else False if high < 0 else None
    near = math.log1p(claim.tolerance) if apart.is_ratio else 0.0  # counts are the same or not
    return True if -near <= low and high <= near else False if low > near or high < -near else None


def _apart(better: Figure, worse: Figure, paired: bool) -> _Apart:
    """The delta method: a sum over a sum moves with each record by what that adds above the line less its share below."""
    is_ratio = better.mean > 0 and worse.mean > 0
    ahead = math.log(better.mean / worse.mean) if is_ratio else better.mean - worse.mean
    fewest = min(len(better.samples), len(worse.samples))
    if fewest < 2:
        return _Apart(ahead, math.inf, 0, is_ratio)
    moves = [_moves(each, is_ratio) for each in (better, worse)]
    if paired and len(moves[0]) == len(moves[1]):
        error = _standard_error([up - down for up, down in zip(*moves, strict=True)])
    else:
        error = math.hypot(*map(_standard_error, moves))
    return _Apart(ahead, error, fewest - 1, is_ratio)


def _moves(figure: Figure, is_ratio: bool) -> list[float]:
    below = statistics.fmean(under for _, under in figure.samples)
    ratio = statistics.fmean(over for over, _ in figure.samples) / below
    return [(over - ratio * under) / below / (ratio if is_ratio else 1.0) for over, under in figure.samples]


def _standard_error(values: Sequence[float]) -> float:
    error = statistics.stdev(values) / math.sqrt(len(values))
    return error if error > _ROUNDING else 0.0


def _needed(apart: _Apart, claim: Claim) -> int | None:
    """Records with which four of five runs tell the direction; None where none would: both are the same here."""
    effect = abs(apart.ahead)
    if claim.equal and apart.is_ratio:
        effect = abs(math.log1p(claim.tolerance) - effect)
    if apart.error == 0.0:
        return 2
    if effect <= _ROUNDING:
        return None
    normal = statistics.NormalDist()
    return max(2, math.ceil((apart.freedom + 1) * ((normal.inv_cdf(0.975) + normal.inv_cdf(0.8)) * apart.error / effect) ** 2))


def _t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: exact for one and two degrees of freedom, Cornish and Fisher's series above (1 %)."""
    if freedom < 3:
        return {1: 12.706, 2: 4.303}[freedom]
    z, n = statistics.NormalDist().inv_cdf(0.975), freedom
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def beside(paper: Paper, found: Found, ran: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """The results of a record.

    Args:
        paper: what it published.
        found: what was measured.
        ran: what ran in the place of the paper's models and data.
        device: it ran on, ``cpu`` or another.

    Returns:
        ``paper``, ``ran`` (what ran instead), ``tables`` by name with ``section``, ``title``, ``paper`` and ``here``, the rows of
        each; ``claims`` (see ``judged``), how many there are of each of the ``verdicts``, ``measures``, ``figures``, ``notes``.
    """
    claims = judged(paper.claims, found.measures, device)
    verdicts = Counter(claim["verdict"] for claim in claims)
    tables = {
        table.name: {
            "section": table.section,
            "title": table.title,
            "paper": _plain(table.rows),
            "here": _plain(found.tables.get(table.name, {})),
        }
        for table in paper.tables
    }
    for name, rows in found.tables.items():
        tables.setdefault(name, {"section": "", "title": "", "paper": {}, "here": _plain(rows)})
    return {
        "paper": {"name": paper.key, "source": paper.source, "title": paper.title, "ran": paper.ran, "datasets": paper.datasets},
        "ran": dict(ran),
        "notes": found.notes,
        "verdicts": {verdict: verdicts[verdict] for verdict in VERDICTS},
        "claims": claims,
        "tables": tables,
        "figures": found.figures,
        "measures": {
            name: {label: {metric: _number(value) for metric, value in row.items()} for label, row in labels.items()}
            for name, labels in found.measures.items()
        },
    }


def _plain(rows: Mapping[str, Mapping[str, Value]]) -> dict[str, dict[str, Any]]:
    return {row: {column: _number(value) for column, value in columns.items()} for row, columns in rows.items()}


def _number(value: Value) -> Any:
    if isinstance(value, Figure):
        return {"mean": round(value.mean, 4), "spread": round(value.spread, 4)} if value.spread else round(value.mean, 4)
    return round(value, 4)
