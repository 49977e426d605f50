"""Probes of any number of clients cost the engines one question."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from outrider.actors.description import Description
from outrider.cache_service.namespace import hash_key
from outrider.cluster.http.api import Service, create_api
from outrider.cluster.serving import shared_answer
from outrider.cluster.serving.generation import EnginePort
from outrider.cluster.serving.shared_answer import SharedAnswer
from outrider.configs.slices import TenancyOptions, TenantOptions
from tests.cluster.circle import TOKENIZER, bearer

FRESH_S = 0.5
KEYED = TenancyOptions(tenants={"acme": TenantOptions(keys=(hash_key("acme"),))}, admin_keys=(hash_key("admin"),))
PROBES = ("/health", "/health?a=b", "/ping", "/ready", "/metrics")
LOAD = {"running", "waiting", "free_slots"}


class Engines:
    """Counts how often it is asked, and answers when it may."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine, self.asked, self.may_answer = engine, 0, asyncio.Event()
        self.generate = engine.generate

    async def describe(self) -> Sequence[Description]:
        self.asked += 1
        await self.may_answer.wait()
        return await self._engine.describe()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_answer, "FRESH_S", FRESH_S)


def asking(service: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_api(service)), base_url="http://a")


def test_all_probes_at_once_are_one_question(circle_engine: EnginePort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_answer, "FRESH_S", 1e9)

    async def run() -> None:
        engines = Engines(circle_engine)
        async with asking(Service(engines, TOKENIZER, open_metrics=True)) as client:
            probes = [asyncio.create_task(client.get(path)) for path in PROBES * 20]
            for _ in range(1000):
                await asyncio.sleep(0)
            probes[0].cancel()  # a client that leaves: the others get their answer
            engines.may_answer.set()
            answers = await asyncio.gather(*probes[1:])
            assert {answer.status_code for answer in answers} == {200} and engines.asked == 1
            assert [(await client.get(path)).status_code for path in PROBES] == [200] * len(PROBES) and engines.asked == 1

    asyncio.run(run())


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_is_given_again_for_half_a_second_from_its_end(fails: bool) -> None:
    now_s, asked = 100.0, 0

    async def ask() -> int:
        nonlocal asked, now_s
        asked, now_s = asked + 1, now_s + 5  # a replica hangs
        if fails:
            raise ValueError(asked)
        return asked

    async def run() -> list[Any]:
        nonlocal now_s
        answers = []
        for later_s in (0.0, 0.0, 0.4, 0.1, 0.49):
            now_s += later_s
            answers += await asyncio.gather(shared(), return_exceptions=True)
        return answers

    shared = SharedAnswer(ask, lambda: now_s)
    answers = asyncio.run(run())
    assert asked == 2 and list(map(str, answers)) == ["1", "1", "1", "2", "2"]


@pytest.mark.parametrize(
    ("tenancy", "headers", "tells"),
    [
        (KEYED, {}, False),
        (KEYED, bearer("acme"), False),
        (KEYED, bearer("wrong"), False),
        (KEYED, {"Authorization": "Basic x"}, False),
        (KEYED, bearer("admin"), True),
        (None, {}, True),
    ],
)
def test_the_load_of_all_is_the_operators(
    circle_engine: EnginePort, tenancy: TenancyOptions | None, headers: dict[str, str], tells: bool
) -> None:
    async def run() -> None:
        async with asking(Service(circle_engine, TOKENIZER, tenancy)) as client:
            for path in ("/health", "/ping"):
                answer = await client.get(path, headers=headers)
                assert answer.status_code == 200 and answer.json()["status"] == "ok" and answer.json()["replicas"] == 1
                assert answer.json().keys() & LOAD == (LOAD if tells else set())

    asyncio.run(run())
