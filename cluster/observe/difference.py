"""Where two answers to one request part: of a comparison, of an audit, of the command that audits."""

from __future__ import annotations

from collections.abc import Sequence


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Where two sequences part, the end of the shorter one included; None where they are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = None if len(one) == len(other) else min(len(one), len(other))
    return next((place for place, (left, right) in pairs if left != right), shorter)
