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
    # Of each record, or of each repeat, what is summed above and below the line: the mean is one sum over the other, as 30 tokens
    # in 10 steps and 10 in 10 are 2 a step. Empty where there is nothing to tell chance by.
    samples: tuple[tuple[float, float], ...] = ()


def figure_of(values: Sequence[float], samples: Sequence[tuple[float, float]] = ()) -> Figure:
    """Mean and standard deviation of at least one value; without samples of records, the values are the samples."""
    own = tuple(samples) or tuple((value, 1.0) for value in values)
    return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, own)


def figure(values: Sequence[float | None]) -> Figure | None:
    """Mean and standard deviation over repeats; None where nothing was measured."""
    known = [value for value in values if value is not None]
    return figure_of(known) if known else None


ALL = "all"  # the dataset under which measurements of each dataset stand side by side
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
    tolerance: float = 0.02  # share by which two that are the same may be apart
    size: tuple[float, float] | None = None  # lowest and highest in the paper, how many times better; None where it gives none
    otherwise: str = ""  # what is known to lead elsewhere
    beyond: str = ""  # why a CPU cannot show it; where it is one, nothing is concluded
    against: bool = False  # what a CPU lacks speaks against it: where it is so all the same, that counts


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
    rows: int = 1  # of a step with its setting

    def number(self, table: str, row: str, column: str) -> float:
        """A number of a table, or a mean."""
        (value,) = (one.rows[row][column] for one in self.tables if one.name == table)
        return value.mean if isinstance(value, Figure) else value
