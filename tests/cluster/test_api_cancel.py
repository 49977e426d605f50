"""Clients that go away, queues that are full, and a replica that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import ray
from openai import OpenAI

MAX_RUNNING, MAX_WAITING = 3, 4  # as conftest.py sets them
CIRCLE = "<abcdefgh-é_日:🦙;ijklm>"  # as conftest.py has the model walk around
# The promise is one second; a busy machine may be late to look.
FREED_WITHIN_S = 3.0
LONG = {"model": "circle", "prompt": "<", "max_tokens": 16000, "ignore_eos": True}  # minutes, unless it is ended


def load(api_server: Any) -> tuple[int, int, int]:
    """Running, waiting, free slots."""
    health = api_server.health()
    return health["running"], health["waiting"], health["free_slots"]


def until(condition: Callable[[], bool], seconds: float = FREED_WITHIN_S) -> None:
    """Waits for a condition, and fails when it does not come about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


@contextlib.asynccontextmanager
async def clients(api_server: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client with as many connections as are needed."""
    async with httpx.AsyncClient(base_url=api_server.url, timeout=60) as many:
        yield many


async def drink(http: httpx.AsyncClient, stream: bool) -> None:
    """Takes what comes until it is cancelled."""
    async with http.stream("POST", "/v1/completions", json=LONG | {"stream": stream}) as response:
        async for _ in response.aiter_bytes():
            pass


async def reach(api_server: Any, wanted: tuple[int, int, int]) -> None:
    """Waits for a load."""
    await asyncio.to_thread(until, lambda: load(api_server) == wanted, 20.0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_slot(api_server: Any, path: str, stream: bool) -> None:
    body = LONG | {"stream": stream}
    if "chat" in path:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "hi"}]

    async def run() -> None:
        async with clients(api_server) as http:
            task = asyncio.create_task(http.post(path, json=body))
            await reach(api_server, (1, 0, MAX_RUNNING - 1))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(run())
    until(lambda: load(api_server) == (0, 0, MAX_RUNNING))


def test_a_stream_that_is_closed_halfway_frees_the_slot(api_server: Any, client: OpenAI) -> None:
    endless = {"ignore_eos": True}
    with client.completions.create(model="circle", prompt="<", max_tokens=16000, stream=True, extra_body=endless) as stream:
        for _, _ in zip(stream, range(5), strict=False):
            pass
        assert load(api_server) == (1, 0, MAX_RUNNING - 1)
    until(lambda: load(api_server) == (0, 0, MAX_RUNNING))


def test_several_at_once_and_those_that_wait(api_server: Any) -> None:
    async def run() -> None:
        async with clients(api_server) as http:
            running = [asyncio.create_task(drink(http, stream=index % 2 == 0)) for index in range(MAX_RUNNING)]
            await reach(api_server, (MAX_RUNNING, 0, 0))
            waiting = [asyncio.create_task(drink(http, stream=index % 2 == 0)) for index in range(2)]
            await reach(api_server, (MAX_RUNNING, 2, 0))
            for task in waiting:
                task.cancel()
            await asyncio.to_thread(until, lambda: load(api_server) == (MAX_RUNNING, 0, 0))
            assert not any(task.done() for task in running)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, *waiting, return_exceptions=True)

    asyncio.run(run())
    until(lambda: load(api_server) == (0, 0, MAX_RUNNING))


@pytest.mark.parametrize("stream", [True, False])
def test_several_prompts_are_ended_together(api_server: Any, stream: bool) -> None:
    async def run() -> None:
        async with clients(api_server) as http:
            task = asyncio.create_task(http.post("/v1/completions", json=LONG | {"prompt": ["<"] * 5, "stream": stream}))
            await reach(api_server, (MAX_RUNNING, 2, 0))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(run())
    until(lambda: load(api_server) == (0, 0, MAX_RUNNING))


def test_a_full_queue_refuses_and_says_when_to_come_back(api_server: Any) -> None:
    async def run() -> None:
        async with clients(api_server) as http:
            taken = [asyncio.create_task(drink(http, stream=True)) for _ in range(MAX_RUNNING + MAX_WAITING)]
            await reach(api_server, (MAX_RUNNING, MAX_WAITING, 0))
            for stream in (False, True):
                refused = await http.post("/v1/completions", json=LONG | {"stream": stream})
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                error = refused.json()["error"]
                assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "queue_full", None)
                assert "max_waiting" in error["message"]
            assert load(api_server) == (MAX_RUNNING, MAX_WAITING, 0)
            for task in taken:
                task.cancel()
            await asyncio.gather(*taken, return_exceptions=True)

    asyncio.run(run())
    until(lambda: load(api_server) == (0, 0, MAX_RUNNING))


def test_prompts_that_do_not_all_fit_leave_nothing_behind(api_server: Any, http: httpx.Client) -> None:
    refused = http.post("/v1/completions", json=LONG | {"prompt": ["<"] * (MAX_RUNNING + MAX_WAITING + 1)})
    assert refused.status_code == 429
    until(lambda: load(api_server) == (0, 0, MAX_RUNNING))


def test_a_replica_that_dies(api_server: Any, http: httpx.Client) -> None:
    """/health says 503 until the next replica is there, and a stream that the former one was at goes on then."""
    seen: set[int] = set()

    def recovered() -> bool:
        response = http.get("/health")
        seen.add(response.status_code)
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "engine_unavailable"
        return response.status_code == 200

    text = ""
    with http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "temperature": 0}) as response:
        for line in response.iter_lines():
            if not line:
                continue
            assert line.startswith("data: {") and "error" not in json.loads(line[6:])
            text += json.loads(line[6:])["choices"][0]["text"]
            if not seen:
                actors = ray.util.list_named_actors(all_namespaces=True)
                (replica,) = [actor for actor in actors if actor["name"].startswith("SERVE_REPLICA::outrider#engine#")]
                ray.kill(ray.get_actor(replica["name"], replica["namespace"]))
                until(lambda: recovered() and 503 in seen, 60)
                before = len(text)
            if len(text) > before + 4000:  # more than the former one can have sent before it ended
                break
    assert seen == {200, 503}
    assert ("<" + text) == (CIRCLE * (len(text) // len(CIRCLE) + 1))[: len(text) + 1]
    until(lambda: load(api_server) == (0, 0, MAX_RUNNING))
    answer = http.post("/v1/completions", json={"model": "circle", "prompt": "<", "max_tokens": 3, "temperature": 0})
    assert answer.json()["choices"][0]["text"] == "abc"
