"""A real server under 32 streams at once, of which some are closed halfway: every text is the one that the request gets alone,
and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from decoding.request import SamplingParams
from tests.cluster.circle import bearer
from tests.cluster.service.applications import TWIN_RUNNING, Answer, Twins, plain_answers
from tests.helpers.models import SENTENCES

STREAMS, EACH = 32, 3  # streams at once, and requests that each makes one after another
LONG = 64  # tokens
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.7, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
)
STRATEGIES = (None, "suffix", "autoregressive", "recycling")


@dataclass(frozen=True)
class Question:
    """The body of a request, and what plain decoding answers alone."""

    body: dict[str, Any]
    answer: Answer


@pytest.fixture(scope="module")
def questions(twins: Twins) -> list[Question]:
    """With prompts that share beginnings, under all settings."""
    prompts = [" ".join(SENTENCES[: 1 + number % 3]) + f" {number // 3}" * (number % 4) for number in range(16)]
    bodies = [{"max_tokens": LONG - number, "temperature": 0.0, **SETTINGS[number % len(SETTINGS)]} for number in range(16)]
    asked = [(prompts[number], SamplingParams(**settings)) for number, settings in enumerate(bodies)]
    answers = plain_answers(twins.model, *asked)
    return [
        Question({"model": "tiny", "prompt": prompt, **settings}, answer)
        for prompt, settings, answer in zip(prompts, bodies, answers, strict=True)
    ]


async def stream(http: httpx.AsyncClient, question: Question, leave_after: int | None, **more: Any) -> bool:
    """Reads an answer to its end, or closes the stream after some events. Whether it was read to its end."""
    text, reason, usage = "", None, None
    body = {**question.body, **more, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        events = 0
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event["usage"]
            for choice in event["choices"]:
                text, reason = text + choice["text"], choice["finish_reason"]
            assert question.answer.text.startswith(text)
            events += 1
            if events == leave_after:
                return False
    assert (text, reason) == (question.answer.text, question.answer.reason)
    assert usage is not None and usage["completion_tokens"] == len(question.answer.ids)
    return True


def test_many_streams_at_once_say_what_each_says_alone(twins: Twins, questions: list[Question]) -> None:
    assert sum(len(question.answer.ids) for question in questions) > len(questions) * LONG // 3  # most do not end at once

    async def client(http: httpx.AsyncClient, number: int) -> int:
        whole = 0
        for turn in range(EACH):
            question = questions[(7 * number + turn) % len(questions)]
            leave_after = 1 + number % 5 if (number + turn) % 3 == 0 else None
            strategy = STRATEGIES[(number + turn) % len(STRATEGIES)]
            more: dict[str, Any] = {"priority": (number + turn) % 4}
            if strategy is not None:
                more["speculation"] = {"strategy": strategy}
            whole += await stream(http, question, leave_after, **more)
        return whole

    async def run() -> int:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=twins.url, headers=bearer("key of many"), timeout=120, limits=limits) as http:
            return sum(await asyncio.gather(*(client(http, number) for number in range(STREAMS))))

    whole = asyncio.run(run())
    assert STREAMS * EACH // 2 < whole < STREAMS * EACH  # some left
    twins.becomes(status="ok", running=0, waiting=0, free_slots=2 * TWIN_RUNNING)
