"""First difference of two answers to one request, for comparisons and audits."""

from __future__ import annotations

from collections.abc import Sequence


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Return the first index at which two sequences differ, or at which the shorter one ends; None if they are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = None if len(one) == len(other) else min(len(one), len(other))
    return next((place for place, (left, right) in pairs if left != right), shorter)
