"""What a tenant is told, and when, does not depend on what another has asked: pairs of requests between two real replicas."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from openai import OpenAI

from tests.cluster.service.applications import Twins
from tests.helpers.models import VOCAB

PAIRS = 200  # requests that the other tenant has sent, and as many that it has not
SHUFFLES = 20_000
NO_SIGN = 1e-3  # the least share of shuffles that differ as much where nothing is told: one run of a thousand has less
SIGN = 1e-4  # the most where something is


@dataclass(frozen=True)
class Seen:
    """What a client sees of a request besides its text."""

    seconds: float
    cached: int
    steps: int
    drafted: int


def prompt(number: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(5, VOCAB, 96)]


def ask(client: OpenAI, number: int) -> Seen:
    began = time.perf_counter()
    document = " ".join(str(token) for token in prompt(number)[:40])
    body = {"speculation": {"report": True}, "reference_documents": [document]}
    answer = client.completions.create(model="tiny", prompt=prompt(number), max_tokens=12, temperature=0, extra_body=body)
    seconds = time.perf_counter() - began
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    steps = answer.choices[0].speculation["steps"]  # type: ignore[attr-defined]
    return Seen(seconds, answer.usage.prompt_tokens_details.cached_tokens or 0, len(steps), sum(one["drafted"] for one in steps))


def chance(some: Sequence[float], others: Sequence[float]) -> float:
    """How often a random division of the values differs as much in its mean ranks: the p-value of a permutation test."""
    rng = np.random.default_rng(0)
    values = np.concatenate([some, others])
    ranks = np.argsort(np.argsort(values + 1e-9 * rng.random(len(values)))).astype(float)
    ranks -= ranks.mean()
    seen = abs(ranks[: len(some)].sum())
    drawn = [abs(rng.permutation(ranks)[: len(some)].sum()) for _ in range(SHUFFLES)]
    return float((1 + sum(sum_ >= seen for sum_ in drawn)) / (1 + SHUFFLES))


def signs(first: OpenAI, second: OpenAI, pairs: int, start: int) -> dict[str, float]:
    """How probable it is by chance that so much differs of what one client sees where the other has just asked the same.

    Args:
        first: asks before each request of the other: the same, or something else.
        second: sees.
        pairs: of requests of both kinds.
        start: number of the first prompt.
    """
    is_same = [True, False] * pairs
    random.Random(0).shuffle(is_same)
    seen: dict[bool, list[Seen]] = {True: [], False: []}
    for number, same in enumerate(is_same, start=start):
        ask(first, number if same else number + 50_000)
        time.sleep(0.01)  # so that it has travelled
        seen[same].append(ask(second, number))
    return {name: chance(*([getattr(one, name) for one in of] for of in seen.values())) for name in Seen.__annotations__}


@pytest.mark.proof
def test_a_tenant_cannot_tell_what_another_has_just_asked(twins: Twins) -> None:
    twins.becomes_whole()
    with twins.client("watched") as watched, twins.client("watching") as watching:
        others, own = signs(watched, watching, PAIRS, 10_000), signs(watched, watched, PAIRS // 4, 20_000)
    assert min(others.values()) > NO_SIGN, others
    assert max(own["cached"], own["steps"], own["seconds"]) < SIGN, own  # of what it has asked itself, the same look tells
