"""Measurements of the service at a size of seconds: requests of every kind, clients that leave, overload and attacks."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from outrider.experiments.service.asks import KINDS, Answer, Ask, ask, make_asks, play
from outrider.experiments.service.attacks.attacker import once
from outrider.experiments.service.attacks.forms import all_forms
from outrider.experiments.service.attacks.shots import Target, fire, is_fault, post
from outrider.experiments.service.served import until_whole

MODEL = "circle"
TOGETHER = 3  # requests, as many as run at once
HELD = 7  # requests that run or wait, as conftest.py sets it


def run(api_server: Any, what: Callable[[httpx.AsyncClient], Any]) -> Any:
    """What a coroutine returns that is given a client."""

    async def body() -> Any:
        async with httpx.AsyncClient(base_url=api_server.url, timeout=60) as client:
            return await what(client)

    return asyncio.run(asyncio.wait_for(body(), 120))


def test_every_kind_of_request_is_answered_and_again_the_same(api_server: Any) -> None:
    asks = make_asks(len(KINDS), 40, seed=3)

    async def twice(client: httpx.AsyncClient) -> tuple[list[Answer], list[Answer]]:
        return (await play(client, MODEL, asks, TOGETHER))[0], [await ask(client, MODEL, request) for request in asks]

    together, alone = run(api_server, twice)
    assert [told.error for told in together] == [None] * len(KINDS)
    assert [one.differs(other) for one, other in zip(together, alone, strict=True)] == [[]] * len(KINDS)
    two = together[[kind[0] for kind in KINDS].index("two choices")]
    assert two.choices.keys() == {0, 1}
    assert two.usage["completion_tokens"] == sum(len(choice.tokens) for choice in two.choices.values()) == 80


async def leave(target: Target, request: Ask, rng: random.Random) -> str:
    """Send a request, close the socket at a random moment and return the state of the answer."""
    await asyncio.sleep(rng.uniform(0, 0.5))
    stay_s = 0.0 if rng.random() < 0.15 else rng.uniform(0.0, 3.0)
    reply = await fire(post(f"/v1/{request.route}", {"model": MODEL, **request.body}, None, stay_s=stay_s), target)
    if reply.status not in (0, 200) or reply.has_ended:
        return f"ended with {reply.status}"
    return "mid-stream" if reply.status else "while it was computed" if stay_s else "at once"


async def until_free(client: httpx.AsyncClient) -> float:
    """Return the seconds until ``/health`` counts no request."""
    began = time.monotonic()
    while (health := (await client.get("/health")).json()).get("running", 1) + health.get("waiting", 1):
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def test_clients_that_leave_free_all_slots(api_server: Any) -> None:
    rng, parts = random.Random(1), urlsplit(api_server.url)
    target = Target(str(parts.hostname), int(parts.port or 0), MODEL)
    asks = make_asks(24, 3000, 0, ["greedy", "sampled", "whole", "text"])

    async def all_leave(client: httpx.AsyncClient) -> tuple[list[str], float, float | None]:
        left = await asyncio.gather(*(leave(target, request, rng) for request in asks))
        return left, await until_free(client), await until_whole(client, 1, timeout_s=5.0)

    left, free_s, whole_s = run(api_server, all_leave)
    assert len(left) == len(asks) and len(set(left)) >= 3, left
    assert free_s < 10.0 and whole_s is not None


def test_what_is_too_much_is_refused_with_the_time_to_come_back(api_server: Any) -> None:
    asks, rng = make_asks(200, 60, 0, ["greedy", "whole"]), random.Random(0)

    async def at_random(client: httpx.AsyncClient, request: Ask) -> Answer:
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        return await ask(client, MODEL, request)

    async def loaded(client: httpx.AsyncClient) -> tuple[list[Answer], list[Answer]]:
        capacity, _ = await play(client, MODEL, asks[:20], HELD)
        return capacity, await asyncio.gather(*(at_random(client, request) for request in asks))

    capacity, over = run(api_server, loaded)
    assert {told.status for told in capacity} == {200} == {told.status for told in over} - {429}
    assert all(told.error is None if told.status == 200 else told.retry_after is not None for told in over)


def test_no_shot_of_an_attack_is_a_fault_of_the_server(api_server: Any) -> None:
    parts = urlsplit(api_server.url)
    target = Target(str(parts.hostname), int(parts.port or 0), MODEL, context=400, vocabulary=250, size=0.02)
    found = asyncio.run(once(all_forms(), target, most=3, at_once=16, within_s=10.0))
    assert len(found) == sum(not form.on_admin_port for form in all_forms())
    assert [(title, statuses) for title, statuses in found.items() if any(map(is_fault, statuses))] == []
    assert {"200", "400"} <= {label for statuses in found.values() for label in statuses}
    api_server.becomes_idle()
