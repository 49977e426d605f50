"""Predicted outputs speed an answer up, change nothing of it, and are counted alike whoever drafted."""

from __future__ import annotations

from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from outrider.cluster.http.answers.predicted import Predicted, PredictionMatch
from tests.cluster.circle import CIRCLE, LAP, MESSAGES


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the longest common subsequence, by its definition."""

    @cache
    def of(i: int, j: int) -> int:
        if i == len(one) or j == len(other):
            return 0
        return of(i + 1, j + 1) + 1 if one[i] == other[j] else max(of(i + 1, j), of(i, j + 1))

    return of(0, 0)


TOKENS = st.lists(st.integers(0, 4), max_size=12)


@given(TOKENS, TOKENS, st.integers(0, 12))
def test_counts_are_those_of_the_longest_common_subsequence(predicted: list[int], said: list[int], cut: int) -> None:
    match = PredictionMatch(Predicted(predicted))
    match.push(said[:cut])
    match.push(said[cut:])
    assert match.accepted == common(tuple(predicted), tuple(said))
    assert match.accepted + match.rejected == len(predicted)


def test_the_example() -> None:
    match = PredictionMatch(Predicted([1, 2, 3, 4]))
    match.push([1, 9, 3, 4, 5])
    assert (match.accepted, match.rejected) == (3, 1)


@pytest.mark.parametrize("content", [CIRCLE, [{"type": "text", "text": CIRCLE[:9]}, {"type": "text", "text": CIRCLE[9:]}]])
def test_a_prediction_is_drafted_from_and_counted(client: OpenAI, http: httpx.Client, content: Any) -> None:
    prediction: Any = {"type": "content", "content": content}

    def ask(**more: Any) -> Any:
        return client.chat.completions.create(
            model="circle", messages=MESSAGES, max_tokens=LAP, temperature=0, prediction=prediction, **more
        )

    for speculation in ({}, {"max_draft_tokens": 0}, {"strategy": "prompt_lookup"}):
        answer = ask(extra_body={"speculation": speculation})
        assert answer.choices[0].message.content == CIRCLE
        details = answer.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (LAP, 0)
    pieces = [chunk.choices[0].delta.content for chunk in ask(stream=True) if chunk.choices[0].delta.content]
    assert "".join(pieces) == CIRCLE and max(map(len, pieces)) > 1  # bursts: it was drafted from


def test_what_does_not_come_true_is_rejected(client: OpenAI) -> None:
    prediction: Any = {"type": "content", "content": "<abXYcd"}
    answer = client.chat.completions.create(
        model="circle", messages=MESSAGES, max_tokens=5, temperature=0, n=2, prediction=prediction
    )
    assert [choice.message.content for choice in answer.choices] == ["<abcd"] * 2
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    details = answer.usage.completion_tokens_details.model_dump(exclude_none=True)
    assert details == {"accepted_prediction_tokens": 10, "rejected_prediction_tokens": 4}
    without = client.chat.completions.create(model="circle", messages=MESSAGES, max_tokens=5, temperature=0)
    assert without.usage is not None and without.usage.completion_tokens_details is None
