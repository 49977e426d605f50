"""What a simulated deployment costs, and which of several is the cheapest that meets a goal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CONDITION = re.compile(r"([a-z0-9_]+)(<=|>=|<|>)([0-9.]+(?:e-?[0-9]+)?)")
# What a condition may name, and where a row has it: seconds, tokens and requests a second, dollars, GPUs, shares.
QUANTITIES: dict[str, tuple[str, ...]] = {
    "p50": ("e2e_s", "p50"),
    "p99": ("e2e_s", "p99"),
    "mean": ("e2e_s", "mean"),
    "ttft_p50": ("ttft_s", "p50"),
    "ttft_p99": ("ttft_s", "p99"),
    "tpot_p50": ("tpot_s", "p50"),
    "tpot_p99": ("tpot_s", "p99"),
    "tokens_per_s": ("tokens_per_s",),
    "requests_per_s": ("requests_per_s",),
    "usd_per_million": ("usd_per_million",),
    "gpus": ("gpus",),
    "busy": ("busy",),
}


@dataclass(frozen=True, slots=True)
class Condition:
    """One side of a goal."""

    text: str
    quantity: str
    below: bool
    bound: float
    or_equal: bool

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a row meets it; what a row does not know it does not meet."""
        value = quantity(row, self.quantity)
        if value is None:
            return False
        if self.or_equal and value == self.bound:
            return True
        return value < self.bound if self.below else value > self.bound


def read_goal(text: str) -> list[Condition]:
    """Reads conditions with commas between them, all of which are to hold.

    Example: ``p99<2,ttft_p99<=0.5`` asks for 99 of 100 answers within 2 s, and 99 of 100 first tokens within half a second.

    Raises:
        ValueError: it cannot be read, or names no quantity of ``QUANTITIES``.
    """
    conditions = []
    for part in text.replace(" ", "").split(","):
        found = _CONDITION.fullmatch(part)
        if found is None or found[1] not in QUANTITIES:
            raise ValueError(f"--find {part!r} must be such as p99<2.0, of one of {', '.join(QUANTITIES)}")
        name, sign, bound = found.groups()
        conditions.append(Condition(part, name, sign[0] == "<", float(bound), sign.endswith("=")))
    return conditions


def quantity(row: Mapping[str, Any], name: str) -> float | None:
    """What a row has of a quantity."""
    value: Any = row
    for key in QUANTITIES[name]:
        value = value[key]
    return None if value is None else float(value)


def usd_per_million(gpus: int, usd_per_hour: float, tokens_per_s: float) -> float:
    """Dollars for a million output tokens.

    Example: 8 GPUs at 1.64 $ an hour and 1,000 tokens a second: 3.6 million tokens an hour for 13.12 $, so 3.64 $ a million.
    """
    return gpus * usd_per_hour / 3600 / tokens_per_s * 1e6


def cheapest(rows: Sequence[Mapping[str, Any]], goal: Sequence[Condition]) -> list[Mapping[str, Any]]:
    """The rows that meet a goal: those with the fewest GPUs first, of equals the one with the lowest p99."""
    met = [row for row in rows if all(condition.holds(row) for condition in goal)]
    return sorted(met, key=lambda row: (row["gpus"], row["usd_per_million"], quantity(row, "p99") or 0.0))


def nearest(rows: Sequence[Mapping[str, Any]], goal: Sequence[Condition]) -> list[str]:
    """Where nothing meets a goal: of each condition the best that any row reaches."""
    lines = []
    for condition in goal:
        known = [value for row in rows if (value := quantity(row, condition.quantity)) is not None]
        if known:
            lines.append(f"{condition.text}: the best is {min(known) if condition.below else max(known):.4g}")
    return lines
