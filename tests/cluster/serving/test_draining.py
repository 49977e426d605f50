"""A server that stops: what runs ends whole, or is told that it does not, and nothing new begins."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from outrider.cluster.http.api import Service, create_api
from outrider.cluster.serving.generation import EnginePort
from tests.cluster.circle import TEXT, TOKENIZER


@dataclass(frozen=True)
class Stopping:
    """A server in this event loop."""

    service: Service
    client: httpx.AsyncClient

    def body(self, **changes: Any) -> dict[str, Any]:
        return TEXT | {"prompt": "<abc", "max_tokens": 100, "ignore_eos": True} | changes

    async def begin(self, **changes: Any) -> asyncio.Task[list[str]]:
        """A stream that is under way; the task gives its events."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def read() -> list[str]:
            found = []
            body = self.body(stream=True, **changes)
            async with self.client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if line:
                        found.append(line.removeprefix("data: "))
                    if not begun.done():
                        begun.set_result(None)
            return found

        task = asyncio.create_task(read())
        await asyncio.wait_for(begun, 60)
        return task


@contextlib.asynccontextmanager
async def stopping(engine: EnginePort) -> AsyncIterator[Stopping]:
    service = Service(engine, TOKENIZER)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_api(service), log_level="warning", lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
            yield Stopping(service, client)
        server.should_exit = True
        await task


async def refusal(answer: httpx.Response) -> None:
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == "shutting_down" and answer.json()["error"]["type"] == "server_error"


def test_running_streams_end_whole_and_new_requests_are_refused(circle_engine: EnginePort) -> None:
    async def stop() -> None:
        async with stopping(circle_engine) as server:
            whole = (await server.client.post("/v1/completions", json=server.body(max_tokens=200))).json()
            assert server.service.draining.running == 0
            stream = await server.begin(max_tokens=200)
            assert server.service.draining.running == 1
            stop = asyncio.create_task(server.service.draining.stop(60.0))
            await asyncio.sleep(0)
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                await refusal(await server.client.post(path, json=server.body()))
            await refusal(await server.client.get("/ready"))
            assert (await server.client.get("/health")).status_code == 200
            events = await stream
            assert await stop == 0
            assert events[-1] == "[DONE]"
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
            assert text == whole["choices"][0]["text"]

    asyncio.run(stop())


def test_what_takes_too_long_is_broken_off_and_says_so(circle_engine: EnginePort) -> None:
    async def stop() -> None:
        async with stopping(circle_engine) as server:
            stream = await server.begin(max_tokens=16_000)
            whole = asyncio.create_task(server.client.post("/v1/completions", json=server.body(max_tokens=16_000)))
            while server.service.draining.running < 2:
                await asyncio.sleep(0.01)
            assert await server.service.draining.stop(0.05) == 2
            events = await stream
            assert json.loads(events[-1])["error"]["code"] == "shutting_down" and "[DONE]" not in events
            await refusal(await whole)
            for _ in range(500):
                if (await server.client.get("/health")).json()["running"] == 0:
                    break
                await asyncio.sleep(0.01)
            else:
                raise AssertionError("slots are not free")
            assert server.service.draining.running == 0

    asyncio.run(stop())


def test_a_client_that_goes_is_no_request_that_runs(circle_engine: EnginePort) -> None:
    async def leave() -> None:
        async with stopping(circle_engine) as server:
            stream = await server.begin(max_tokens=16_000)
            stream.cancel()
            assert await server.service.draining.stop(60.0) == 0

    asyncio.run(leave())
