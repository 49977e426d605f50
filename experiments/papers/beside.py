"""Comparison of a run with a paper: tables of both, and a verdict on each of the paper's statements."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.experiments.papers.numbers.published import ALL, Claim, Figure, Paper, Value
from outrider.experiments.papers.priced import PRICED, PRICES

Rows = dict[str, dict[str, Value]]  # row -> column -> number
Sections = dict[str, Rows]  # name of a table or figure of the paper -> measurements
HELD, DIRECTION_ONLY, FAILS, UNDECIDED = "held", "direction only", "fails", "undecided"
NOT_TESTABLE, NOT_MEASURED = "not testable here", "not measured"
VERDICTS = (HELD, DIRECTION_ONLY, FAILS, UNDECIDED, NOT_TESTABLE, NOT_MEASURED)
_UNDECIDED = "the interval of this run holds both directions"
_NO_SAMPLES = "one measurement, by which chance cannot be told"
_NO_SIZE, _OTHER_SIZE = "the paper gives no size", "not within 15 % of the paper's size"
WIDE = "within 15 % of the paper's size, but the interval is wider than 30 %"
MARGIN, WIDEST = 0.15, 0.3  # of the ratio: distance of ours from the paper's, and width of our interval
_ROUNDING = 1e-12
_MOST_LOG = 20.0  # bound of the logarithm of a ratio


@dataclass(slots=True)
class Found:
    """Measurements of a run."""

    measures: dict[str, dict[str, dict[str, Figure]]] = field(default_factory=dict)  # dataset -> label -> metric
    tables: Sections = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> see ``experiments.bench.figure``
    notes: list[str] = field(default_factory=list)  # differences from the paper


@dataclass(frozen=True, slots=True)
class _Lead:
    """Lead of the preferred measurement: logarithm of a ratio, or a difference if a value is not above 0."""

    ahead: float
    error: float  # standard error; infinite without samples
    freedom: int  # number of samples minus one
    is_ratio: bool

    @property
    def interval(self) -> tuple[float, float]:
        """Return its 95 % interval."""
        reach = self.error * _t_quantile(self.freedom) if self.error else 0.0
        return self.ahead - reach, self.ahead + reach


def judged(
    claims: Sequence[Claim], measures: Mapping[str, Mapping[str, Mapping[str, Figure]]], device: str = "cpu"
) -> list[dict[str, Any]]:
    """Return the verdict on each statement.

    Args:
        claims: statements of a paper.
        measures: dataset -> label -> metric -> figure.
        device: type of the device. On a CPU nothing is concluded of a statement that is ``beyond`` one and has no price.

    Returns:
        For each ``here``, both values, of the priced metric if there is one (``experiments.papers.priced``), None if unmeasured;
        ``ratio``, how many times better the preferred one is; its 95 % ``interval`` over the records, paired unless datasets are
        compared; ``ratios`` of tokens per step, of the priced and of the measured speed; and the ``verdict``, one of
        ``VERDICTS``, with ``why`` unless it is ``held``. It follows from three answers:

        - ``direction``: whether the whole interval is on the paper's side of 1, None if 1 is in it; for two that are the same in
          the paper, whether it is within the tolerance.
        - ``size``: the paper's lowest and highest ratio (``paper``), ours over the nearest of them (``of_paper``), and whether
          ours is within ``MARGIN`` of it with an interval no wider than ``WIDEST`` (``within``).
        - ``power``: the number of ``records``, and the number ``needed`` to tell the direction in four of five runs.

        If a value is not above 0, a difference replaces the ratio, and there is no size.
    """
    return [_judged(claim, measures.get(claim.dataset, {}), device) for claim in claims]


def _judged(claim: Claim, labels: Mapping[str, Mapping[str, Figure]], device: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "where": claim.where, "dataset": claim.dataset, "paper": claim.words, "metric": claim.metric,
        "of": [claim.better, claim.worse], "here": None, "verdict": NOT_MEASURED,
    }  # fmt: skip
    if claim.headline:
        row["headline"] = claim.headline
    sides = [labels.get(label, {}) for label in (claim.better, claim.worse)]
    priced = PRICES.get(claim.metric, "")
    metric = priced if all(priced in side for side in sides) else claim.metric
    better, worse = (side.get(metric) for side in sides)
    needs_hardware = bool(claim.beyond) and device == "cpu" and metric == claim.metric
    if better is None or worse is None:
        if needs_hardware:
            row["verdict"], row["why"] = NOT_TESTABLE, claim.beyond
        return row
    row |= {"metric": metric, "here": [round(better.mean, 4), round(worse.mean, 4)], "ratios": _ratios(*sides)}
    lead = _lead(*((worse, better) if claim.lower else (better, worse)), claim)
    row["direction"] = direction = _direction(lead, claim)
    near, narrow = False, False
    if math.isfinite(lead.error):
        bounds = [math.exp(min(bound, _MOST_LOG)) if lead.is_ratio else bound for bound in lead.interval]
        row["interval"] = [round(bound, 4) for bound in bounds]
        row["power"] = {"records": lead.freedom + 1, "needed": _needed(lead, claim)}
        narrow = lead.is_ratio and bounds[1] - bounds[0] <= WIDEST * math.exp(lead.ahead)
    if lead.is_ratio:
        ratio = math.exp(lead.ahead)
        row["ratio"] = round(ratio, 4)
        if claim.size is not None:
            of_paper = ratio / min(max(ratio, claim.size[0]), claim.size[1])
            near = abs(of_paper - 1) <= MARGIN
            row["size"] = {"paper": list(claim.size), "of_paper": round(of_paper, 4), "within": near and narrow}
    if needs_hardware:
        row["verdict"], row["why"] = NOT_TESTABLE, claim.beyond
    elif direction is None:
        row["verdict"], row["why"] = UNDECIDED, _UNDECIDED if math.isfinite(lead.error) else _NO_SAMPLES
    elif not direction:
        row["verdict"] = FAILS
        if claim.otherwise:
            row["why"] = claim.otherwise
    elif claim.equal or (near and narrow):
        row["verdict"] = HELD
    else:
        row["verdict"] = DIRECTION_ONLY
        row["why"] = _NO_SIZE if claim.size is None else WIDE if near else claim.otherwise or _OTHER_SIZE
    return row


def _ratios(better: Mapping[str, Figure], worse: Mapping[str, Figure]) -> dict[str, float]:
    """Return how many times more tokens a step, priced and measured speed the first one has, where both have them."""
    metrics = {"tokens_per_step": "tokens_per_step", "priced": PRICED, "measured": "speedup"}
    return {
        name: round(better[metric].mean / worse[metric].mean, 4)
        for name, metric in metrics.items()
        if metric in better and metric in worse and worse[metric].mean > 0
    }


def _direction(lead: _Lead, claim: Claim) -> bool | None:
    if not math.isfinite(lead.error):
        return None
    low, high = lead.interval
    if not claim.equal:
        return True if low > 0 else False if high < 0 else None
    near = math.log1p(claim.tolerance) if lead.is_ratio else 0.0  # counts are the same or not
    return True if -near <= low and high <= near else False if low > near or high < -near else None


def _lead(better: Figure, worse: Figure, claim: Claim) -> _Lead:
    """Return the lead with its standard error by the delta method for ratios of sums."""
    paired = claim.dataset != ALL
    is_ratio = better.mean > 0 and worse.mean > 0
    ahead = math.log(better.mean / worse.mean) if is_ratio else better.mean - worse.mean
    fewest = min(len(better.samples), len(worse.samples))
    if fewest < 2:
        return _Lead(ahead, 0.0 if claim.certain else math.inf, 0, is_ratio)
    moves = [_moves(each, is_ratio) for each in (better, worse)]
    if paired and len(moves[0]) == len(moves[1]):
        error = _standard_error([up - down for up, down in zip(*moves, strict=True)])
    else:
        error = math.hypot(*map(_standard_error, moves))
    return _Lead(ahead, error, fewest - 1, is_ratio)


def _moves(figure: Figure, is_ratio: bool) -> list[float]:
    below = statistics.fmean(under for _, under in figure.samples)
    ratio = statistics.fmean(over for over, _ in figure.samples) / below
    return [(over - ratio * under) / below / (ratio if is_ratio else 1.0) for over, under in figure.samples]


def _standard_error(values: Sequence[float]) -> float:
    error = statistics.stdev(values) / math.sqrt(len(values))
    return error if error > _ROUNDING else 0.0


def _needed(lead: _Lead, claim: Claim) -> int | None:
    """Return the number of records with which four of five runs tell the direction; None if both are the same here."""
    effect = abs(lead.ahead)
    if claim.equal and lead.is_ratio:
        effect = abs(math.log1p(claim.tolerance) - effect)
    if lead.error == 0.0:
        return 2
    if effect <= _ROUNDING:
        return None
    normal = statistics.NormalDist()
    return max(2, math.ceil((lead.freedom + 1) * ((normal.inv_cdf(0.975) + normal.inv_cdf(0.8)) * lead.error / effect) ** 2))


def _t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, above two degrees of freedom by Cornish and Fisher's series (error 1 %)."""
    if freedom < 3:
        return {1: 12.706, 2: 4.303}[freedom]
    z, n = statistics.NormalDist().inv_cdf(0.975), freedom
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def beside(paper: Paper, found: Found, ran: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Return the results of a record.

    Args:
        paper: published numbers.
        found: measurements.
        ran: models and data of the run.
        device: type of the device, ``cpu`` or another.

    Returns:
        ``paper``, ``ran``, ``tables`` by name with the rows of ``paper`` and ``here``, ``claims`` (see ``judged``), the number
        of each of the ``verdicts``, ``measures``, ``figures`` and ``notes``.
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
