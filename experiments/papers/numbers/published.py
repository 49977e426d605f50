"""Numbers and statements of papers, read from the YAML files of this folder and checked."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ALL = "all"  # dataset whose labels are the other datasets
DEVICE = "device"  # dataset of measurements that need no prompts
KNOWN = "known"  # dataset of texts whose outputs are those of their files, in any paper
_FOLLOWS = ("files", "written", "own")


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean with its standard deviation."""

    mean: float
    spread: float = 0.0  # standard deviation over runs; 0 if unknown
    # Numerator and denominator of each record or repeat; the mean is the ratio of the sums, as 30 tokens in 10 steps and 10 in 10
    # are 2 tokens per step. Empty if the error of the mean is unknown.
    samples: tuple[tuple[float, float], ...] = ()


Value = float | Figure


def figure_of(values: Sequence[float], samples: Sequence[tuple[float, float]] = ()) -> Figure:
    """Return mean and standard deviation of values, which are the samples unless others are given."""
    own = tuple(samples) or tuple((value, 1.0) for value in values)
    return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, own)


@dataclass(frozen=True, slots=True)
class PaperTable:
    """Numbers of one table or figure, as printed in the paper."""

    name: str  # "table 3"
    section: str
    title: str
    rows: Mapping[str, Mapping[str, Value]]  # row -> column -> number


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of a paper: one measurement is better than another, or equals it.

    Example: ``Claim("figure 3", "retrieval", "speedup", "n=1 k=15", "n=4 k=15", "n = 1 gives larger speed-ups")`` holds in a run
    whose stand-in for the paper's retrieval set has more ``speedup`` under the first label than under the second.
    """

    where: str
    dataset: str  # key of ``Paper.datasets``, ``ALL`` or ``DEVICE``
    metric: str
    better: str  # labels of measurements
    worse: str
    words: str  # what the paper says
    equal: bool = False  # the paper says that the two are the same
    lower: bool = False  # less is better
    tolerance: float = 0.02  # relative difference up to which two measurements are the same
    size: tuple[float, float] | None = None  # lowest and highest ratio in the paper; None if it gives none
    otherwise: str = ""  # known reason for another result
    beyond: str = ""  # reason why other hardware is needed, unless the paper's GPU can be priced; nothing is concluded on a CPU
    certain: bool = False  # measured once, and not by chance
    headline: str = ""  # row of ``outrider bench papers`` that it is part of


@dataclass(frozen=True, slots=True)
class Paper:
    """Published numbers of a paper, and the setting of its command."""

    key: str  # name on the command line
    source: str
    title: str
    ran: str  # models, data and devices of the paper
    datasets: Mapping[str, str]  # name -> description
    tables: tuple[PaperTable, ...]
    claims: tuple[Claim, ...]
    rows: int = 1  # rows of a step with the paper's setting
    follows: str = "own"  # source of outputs: ``files`` follow known ones, ``written`` the model's own, ``own`` are generated
    workloads: Mapping[str, Sequence[str]] = field(default_factory=dict)  # dataset -> file stems in the folder of ``--workloads``
    records: Mapping[str, int] = field(default_factory=dict)  # preset -> records of each file
    strategies: Mapping[str, str] = field(default_factory=dict)  # label -> strategy with the paper's options
    explained: Mapping[str, str] = field(default_factory=dict)  # headline -> why it is otherwise here, as was tried

    @property
    def headlines(self) -> list[str]:
        """Return the headlines in their order."""
        return list(dict.fromkeys(claim.headline for claim in self.claims if claim.headline))

    def rows_of(self, table: str) -> Mapping[str, Mapping[str, Value]]:
        """Return the rows of a table."""
        (found,) = (one.rows for one in self.tables if one.name == table)
        return found

    def number(self, table: str, row: str, column: str) -> float:
        """Return a number of a table, or its mean."""
        value = self.rows_of(table)[row][column]
        return value.mean if isinstance(value, Figure) else value


def load(key: str, folder: Path = Path(__file__).parent) -> Paper:
    """Read a paper.

    Raises:
        ValueError: a key is missing or unknown, a table row lacks a column, or a claim names no dataset of the paper.
    """
    path = folder / f"{key}.yaml"
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    for texts in ("reasons", "headlines"):  # that several claims refer to
        data.pop(texts, None)
    try:
        tables = tuple(_table(name, table) for name, table in data.pop("tables").items())
        claims = tuple(_claim(row) for row in data.pop("claims"))
        paper = Paper(key, tables=tables, claims=claims, **data)
        _check(paper)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    return paper


def _table(name: str, table: Mapping[str, Any]) -> PaperTable:
    rows = {}
    for row, cells in table["rows"].items():
        named = cells if isinstance(cells, Mapping) else dict(zip(table["columns"], cells, strict=True))
        rows[row] = {column: _value(cell) for column, cell in named.items()}
    return PaperTable(name, table["section"], table["title"], rows)


def _value(cell: Any) -> Value:
    """Return a number, or a figure of ``[mean, spread]``."""
    found = Figure(*cell) if isinstance(cell, list) else cell
    numbers = (found.mean, found.spread) if isinstance(found, Figure) else (found,)
    if any(type(number) not in (int, float) for number in numbers):
        raise ValueError(f"must be a number or [mean, spread], got {cell!r}")
    return found


def _claim(row: Mapping[str, Any]) -> Claim:
    size = row.get("size")
    if size is None:
        return Claim(**row)
    low, high = (_ratio(each) for each in (size if isinstance(size, list) else (size, size)))
    if not 0 < low <= high:
        raise ValueError(f"size must be a ratio or [lowest, highest], got {size!r}")
    return Claim(**{**row, "size": (low, high)})


def _ratio(value: float | str) -> float:
    """Return a number, or the quotient of two published numbers such as ``280.7/254.5``."""
    over, slash, under = str(value).partition("/")
    return float(over) / float(under) if slash else float(over)


def _check(paper: Paper) -> None:
    if paper.follows not in _FOLLOWS:
        raise ValueError(f"follows must be one of {', '.join(_FOLLOWS)}, got {paper.follows!r}")
    if paper.workloads and paper.workloads.keys() != paper.datasets.keys():
        raise ValueError("workloads must name the datasets")
    if unknown := paper.explained.keys() - {claim.headline for claim in paper.claims}:
        raise ValueError(f"explained: no claim has the headline {min(unknown)!r}")
    for claim in paper.claims:
        if claim.dataset not in {*paper.datasets, ALL, DEVICE}:
            raise ValueError(f"{claim.where}: no dataset is called {claim.dataset!r}")
        if claim.better == claim.worse or not claim.words:
            raise ValueError(f"{claim.where}: a claim needs two labels and words, got {claim}")
