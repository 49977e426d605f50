"""A real server under 32 streams at once, of which some are closed halfway: every text is the one that the request gets alone,
and nothing is left behind."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.schema import Config
from configs.slices import EngineOptions, ModelOptions, ServerOptions, SpeculationOptions, TenancyOptions
from decoding.request import Request, SamplingParams
from engine.engine import Engine
from tests import waiting
from tests.models import SENTENCES, llama_config, save_model
from tests.services import Service, serving

eventually = functools.partial(waiting.eventually, timeout_s=30.0)
STREAMS, EACH = 32, 3  # streams at once, and requests that each makes one after another
RUNNING = 8
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
    text: str
    tokens: int
    reason: str


def ask_alone(folder: Path) -> list[Question]:
    """Questions with prompts that share beginnings, under all settings."""
    options = EngineOptions(max_running=1)
    engine = Engine.load(ModelOptions(str(folder), dtype="float32", threads=1), options, SpeculationOptions("autoregressive"))
    assert engine.tokenizer is not None
    made = []
    for number in range(16):
        setting = SETTINGS[number % len(SETTINGS)]
        prompt = " ".join(SENTENCES[: 1 + number % 3]) + f" {number // 3}" * (number % 4)
        params = SamplingParams(LONG - number, **{"temperature": 0.0, **setting})
        engine.add(Request("alone", engine.tokenizer.encode(prompt), params))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        text, reason = "".join(output.text for output in outputs), outputs[-1].finish_reason
        assert reason is not None
        body = {"model": "tiny", "prompt": prompt, "max_tokens": LONG - number, "temperature": 0.0, **setting}
        made.append(Question(body, text, sum(len(output.token_ids) for output in outputs), reason.value))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama_config(max_position_embeddings=1024, tie_word_embeddings=True)
    return save_model(tmp_path_factory.mktemp("models") / "tiny", config, seed=4)


@pytest.fixture(scope="module")
def questions(folder: Path) -> list[Question]:
    return ask_alone(folder)


@pytest.fixture(scope="module")
def service(api_server: Any, folder: Path) -> Iterator[Service]:
    """One replica, for which all requests are of one tenant: it drafts from all answers and reuses the KV of all prompts."""
    config = Config(
        model=ModelOptions(path=str(folder), dtype="float32", threads=1),
        engine=EngineOptions(max_running=RUNNING, scheduling_policy="priority"),
        speculation=SpeculationOptions("auto", max_draft_tokens=8, strategies=("suffix", "recycling")),
        server=ServerOptions(cpus_per_replica=0.25, stop_timeout_s=1.0),
        tenancy=TenancyOptions(anonymous="all"),
    )
    with serving(api_server.url, "streams", config, SamplingParams(8)) as made:
        yield made


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
            assert question.text.startswith(text)
            events += 1
            if events == leave_after:
                return False
    assert (text, reason) == (question.text, question.reason)
    assert usage is not None and usage["completion_tokens"] == question.tokens
    return True


def test_many_streams_at_once_say_what_each_says_alone(service: Service, questions: list[Question]) -> None:
    assert sum(question.tokens for question in questions) > len(questions) * LONG // 3  # most do not end at once

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
        async with httpx.AsyncClient(base_url=service.url, timeout=120, limits=limits) as http:
            return sum(await asyncio.gather(*(client(http, number) for number in range(STREAMS))))

    whole = asyncio.run(run())
    assert STREAMS * EACH // 2 < whole < STREAMS * EACH  # some left
    health: dict[str, Any] = {}

    def idle() -> bool:
        health.update(service.health())
        return (health["running"], health["waiting"], health["free_slots"]) == (0, 0, RUNNING)

    eventually(idle)
    assert health["status"] == "ok"
