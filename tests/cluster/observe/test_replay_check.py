"""The core of audits, comparisons and the shadow, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.cluster.cli.audit import compare
from outrider.cluster.observe.replay_check import Difference, Figure, difference, figures, median_interval, verdict


def choice(tokens: str, text: str | None = None, reason: str = "length") -> dict[str, Any]:
    """A choice of a completion with log-probabilities -0.1, -0.2, and so on, 0.5 lower for an x."""
    logprobs = [-0.1 * (at + 1) - (0.5 if token == "x" else 0) for at, token in enumerate(tokens)]
    return {"text": text or tokens, "finish_reason": reason, "logprobs": {"tokens": list(tokens), "token_logprobs": logprobs}}


@pytest.mark.parametrize(
    ("served", "plain", "expected"),
    [
        ("abc", "abc", None),
        ("", "", None),
        ("abx", "abc", Difference(2, "x", "c")),
        ("axc", "abc", Difference(1, "x", "b")),
        ("ab", "abc", Difference(2, None, "c")),
        ("abc", "ab", Difference(2, "c", None)),
        ("", "a", Difference(0, None, "a")),
    ],
)
def test_first_differences(served: str, plain: str, expected: Difference[str] | None) -> None:
    assert difference(served, plain) == expected
    row = compare(choice(served), choice(plain))  # the same of two completions
    assert (row["result"], row["tokens"]) == ("identical" if expected is None else "different", len(served))
    if expected is None:
        assert "difference" not in row
        return
    found = row["difference"]
    assert found["position"] == expected.position
    assert [found[side] and found[side]["text"] for side in ("served", "plain")] == [expected.served, expected.plain]
    gap = None if None in (expected.served, expected.plain) else pytest.approx(0.5)
    assert found["gap"] == gap


def test_completions_of_equal_tokens_that_differ() -> None:
    assert "text: 'abC' with drafts" in compare(choice("abc", "abC"), choice("abc"))["detail"]
    assert "finish_reason" in compare(choice("abc"), choice("abc", reason="stop"))["detail"]


@pytest.mark.parametrize(
    ("speeds", "begins"),
    [
        ([2.0, 2.1, 2.2] * 5, "The engine is ahead of the tensor baseline, with 2.10 times (2.00-2.20)"),
        ([0.5] * 6, "The tensor baseline is ahead of the engine, with 2.00 times (2.00-2.00)"),
        ([0.5, 2.0, 0.6, 1.5], "Neither is ahead: the engine has 1.05 times"),
        ([2.0], "1 requests were answered by both: too few to compare."),
    ],
)
def test_who_is_ahead(speeds: list[float], begins: str) -> None:
    pairs = [({"tokens_per_s": speed, "ttft_s": 0.4}, {"tokens_per_s": 1.0, "ttft_s": 0.2}) for speed in speeds]
    found = figures(["tokens_per_s", "ttft_s", "joules_per_token"], pairs)
    assert verdict("tensor", len(pairs), found, {"equal": 3, "near_tie": 0}).startswith(begins)
    assert "joules_per_token" not in found and found["ttft_s"] == Figure(len(speeds), 0.4, 0.2, 2.0, 2.0, 2.0)


def test_the_interval_of_a_median_holds_it() -> None:
    low, high = median_interval(np.array([1.0, 1.1, 1.2, 1.3, 9.0]), np.random.default_rng(0))
    assert 1.0 <= low <= 1.2 <= high <= 9.0
