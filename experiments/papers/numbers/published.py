"""The form in which a paper's numbers and statements are kept: one for all papers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean and how far it may be off."""

    mean: float
    spread: float = 0.0  # standard deviation over runs; 0 where there is none


def figure_of(values: Sequence[float]) -> Figure:
    """Mean and standard deviation of at least one value."""
    return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


def figure(values: Sequence[float | None]) -> Figure | None:
    """Mean and standard deviation over repeats; None where nothing was measured."""
    known = [value for value in values if value is not None]
    return figure_of(known) if known else None


Value = float | Figure  # a number, or a mean with its spread


@dataclass(frozen=True, slots=True)
class PaperTable:
    """Numbers of one table or figure, as the paper prints them."""

    name: str  # "table 3"
    section: str  # of the paper
    title: str
    rows: Mapping[str, Mapping[str, Value]]  # row -> column -> number


def by_column(columns: Sequence[str], rows: Mapping[str, Sequence[Value]]) -> dict[str, dict[str, Value]]:
    """The rows of a table as ``PaperTable`` has them, each of as many numbers as there are columns.

    Example: ``by_column(("n", "k"), {"7B": (1, 18)}) == {"7B": {"n": 1, "k": 18}}``.
    """
    return {row: dict(zip(columns, numbers, strict=True)) for row, numbers in rows.items()}


@dataclass(frozen=True, slots=True)
class Claim:
    """Something of which a paper says that it is better than, or the same as, something else.

    Example: ``Claim("figure 3", "retrieval", "speedup", "n=1 k=15", "n=4 k=15", "n = 1 gives larger speed-ups")`` holds in a run
    whose dataset in the place of the paper's retrieval set has more ``speedup`` under the first label than under the second.
    """

    where: str
    dataset: str  # a key of ``Paper.datasets``
    metric: str
    better: str  # labels of measurements
    worse: str
    words: str  # what the paper says
    equal: bool = False  # it says that the two are the same
    lower: bool = False  # less is better
    tolerance: float = 0.02  # share of the larger one within which two are the same
    otherwise: str = ""  # what is known to lead elsewhere


@dataclass(frozen=True, slots=True)
class Paper:
    """What a paper published, as far as it is compared here."""

    key: str  # the name on the command line
    source: str
    title: str
    ran: str  # models, data and devices of the paper
    datasets: Mapping[str, str]  # name -> what it is in the paper
    tables: tuple[PaperTable, ...]
    claims: tuple[Claim, ...]

    def number(self, table: str, row: str, column: str) -> float:
        """A number of a table, or a mean."""
        (value,) = (one.rows[row][column] for one in self.tables if one.name == table)
        return value.mean if isinstance(value, Figure) else value
