"""The door before real Serve replicas: clients that leave, and replicas of which one is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from cluster.app import build_app
from configs.schema import Config
from configs.slices import EngineOptions, ModelOptions, ServerOptions, SpeculationOptions

MAX_RUNNING, MAX_WAITING = 3, 4  # as conftest.py sets them
LONG = {"model": "circle", "prompt": "<", "max_tokens": 16000, "ignore_eos": True}  # minutes, unless it is ended


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for a condition, and fails when it does not come about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def idle(api_server: Any) -> bool:
    health = api_server.health()
    return (health["running"], health["waiting"], health["free_slots"]) == (0, 0, MAX_RUNNING)


def test_fifty_clients_that_leave_without_a_stream(api_server: Any) -> None:
    """In waves of as many as are held: where one wave kept a place, the next one would not fit."""
    held = MAX_RUNNING + MAX_WAITING

    async def wave(http: httpx.AsyncClient) -> None:
        tasks = [asyncio.create_task(http.post("/v1/completions", json=LONG)) for _ in range(held)]
        await asyncio.to_thread(until, lambda: api_server.health()["waiting"] == MAX_WAITING or any(t.done() for t in tasks))
        assert not any(task.done() for task in tasks), "one was refused"
        refused = await http.post("/v1/completions", content="{not JSON")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(until, lambda: idle(api_server))

    async def run() -> None:
        async with httpx.AsyncClient(base_url=api_server.url, timeout=60) as http:
            for _ in range(8):
                await wave(http)

    asyncio.run(run())


def test_a_deadline_ends_what_runs(api_server: Any, http: httpx.Client) -> None:
    late = http.post("/v1/completions", json=LONG | {"timeout": 0.5})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    until(lambda: idle(api_server))


@pytest.fixture
def pair(api_server: Any, circle_model: Path) -> Iterator[str]:
    """Two replicas that hold one request each, beside the other application on its Ray."""
    config = Config(
        model=ModelOptions(path=str(circle_model), dtype="float32", threads=1),
        engine=EngineOptions(max_running=1, max_waiting=0),
        speculation=SpeculationOptions(strategy="autoregressive"),
        server=ServerOptions(cpus_per_replica=0.25, replicas=2),
    )
    serve.run(build_app(config), name="pair", route_prefix="/pair")
    yield f"{api_server.url}/pair"
    serve.delete("pair")


@pytest.mark.slow
def test_a_replica_that_is_full_is_left_for_another(pair: str) -> None:
    two = {"model": "circle", "prompt": "<", "n": 2, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=pair, timeout=60) as http:
        until(lambda: http.get("/ready").status_code == 200, 60)
        answers = [http.post("/v1/completions", json=two) for _ in range(20)]
        assert [answer.status_code for answer in answers] == [200] * 20
        assert all(len(answer.json()["choices"]) == 2 for answer in answers)
        assert http.post("/v1/completions", json=two | {"n": 3}).status_code == 429
