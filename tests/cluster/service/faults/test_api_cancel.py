"""Clients that go away, deadlines, queues that are full, and a replica that dies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import ray
from openai import OpenAI
from ray import serve

from outrider.cluster.admission.http_limits import HEADER_TIMEOUT_S
from outrider.cluster.app import build_app
from outrider.configs.schema import Config
from outrider.configs.slices import EngineOptions, ModelOptions, ServerOptions, SpeculationOptions
from tests.cluster.circle import (
    CHATS,
    CIRCLE,
    COMPLETIONS,
    ENDLESS,
    MAX_RUNNING,
    MAX_WAITING,
    MESSAGES,
    TEXT,
    Server,
    check_error,
)
from tests.helpers import waiting

SLOW_HEADERS = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
HELD = MAX_RUNNING + MAX_WAITING
# Slots are free within a second; a busy machine may be late to look.
eventually = functools.partial(waiting.eventually, timeout_s=3.0)


@pytest.fixture(autouse=True)
def _leaves_nothing(api_server: Server) -> Iterator[None]:
    yield
    eventually(lambda: api_server.load() == (0, 0, MAX_RUNNING))


@contextlib.asynccontextmanager
async def asking(api_server: Server, *bodies: dict[str, Any], path: str = COMPLETIONS) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Requests that are under way, and cancelled in the end."""
    async with httpx.AsyncClient(base_url=api_server.url, timeout=60) as http:
        tasks = [asyncio.create_task(http.post(path, json=body)) for body in bodies]
        yield tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def reach(api_server: Server, running: int, waiting_: int, timeout_s: float = 20.0) -> None:
    """Waits for a load."""
    wanted = running, waiting_, MAX_RUNNING - running
    await asyncio.to_thread(eventually, lambda: api_server.load() == wanted, timeout_s=timeout_s)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body", "load"), [
    (COMPLETIONS, ENDLESS, (1, 0)),
    (CHATS, {"model": "circle", "messages": MESSAGES, "max_tokens": 16000, "ignore_eos": True}, (1, 0)),
    (COMPLETIONS, ENDLESS | {"prompt": ["<"] * 5}, (MAX_RUNNING, 2)),
])  # fmt: skip
def test_a_client_that_leaves_frees_the_slots(
    api_server: Server, path: str, body: dict[str, Any], load: tuple[int, int], stream: bool
) -> None:
    async def run() -> None:
        async with asking(api_server, body | {"stream": stream}, path=path):
            await reach(api_server, *load)

    asyncio.run(run())


def test_a_stream_goes_on_while_the_old_one_is_still_computed(api_server: Server) -> None:
    def read(lines: Iterator[str], events: int) -> tuple[str, str]:
        text = event_id = ""
        for line in itertools.islice(lines, 3 * events):
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            elif line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return text, event_id

    body = ENDLESS | {"temperature": 0, "stream": True}
    asked = {"json": body, "headers": {"Accept": "text/event-stream"}}
    with httpx.Client(base_url=api_server.url, timeout=60) as http, http.stream("POST", COMPLETIONS, **asked) as old:
        lines = old.iter_lines()
        text, event_id = read(lines, 5)
        with http.stream("POST", COMPLETIONS, json=body, headers={"Last-Event-ID": event_id}) as new:
            text += read(new.iter_lines(), 20)[0]
            assert any('"stream_taken"' in line for line in lines)
    assert len(text) >= 25 and (CIRCLE * len(text))[1:].startswith(text)


def test_a_stream_that_is_closed_halfway_frees_the_slot(api_server: Server, client: OpenAI) -> None:
    endless = {"ignore_eos": True}
    with client.completions.create(model="circle", prompt="<", max_tokens=16000, stream=True, extra_body=endless) as stream:
        for _, _ in zip(stream, range(5), strict=False):
            pass
        eventually(lambda: api_server.load() == (1, 0, MAX_RUNNING - 1))


def test_several_at_once_and_those_that_wait(api_server: Server) -> None:
    async def run() -> None:
        async with asking(api_server, *({**ENDLESS, "stream": index % 2 == 0} for index in range(MAX_RUNNING))) as running:
            await reach(api_server, MAX_RUNNING, 0)
            async with asking(api_server, ENDLESS, ENDLESS | {"stream": True}):
                await reach(api_server, MAX_RUNNING, 2)
            await reach(api_server, MAX_RUNNING, 0, timeout_s=3.0)
            assert not any(task.done() for task in running)

    asyncio.run(run())


@pytest.mark.parametrize("wave", range(8))
def test_a_full_queue_refuses_and_says_when_to_come_back(api_server: Server, http: httpx.Client, wave: int) -> None:
    """Fifty clients in waves of as many as are held: where one wave kept a place, the next one would not fit."""

    async def run() -> None:
        async with asking(api_server, *[ENDLESS | {"stream": wave == 0}] * HELD) as taken:
            await reach(api_server, MAX_RUNNING, MAX_WAITING)
            for stream in (False, True):
                refused = await asyncio.to_thread(http.post, COMPLETIONS, json=ENDLESS | {"stream": stream})
                check_error(refused, 429, "max_waiting", code="queue_full")
                assert int(refused.headers["retry-after"]) >= 1
            check_error(await asyncio.to_thread(http.post, COMPLETIONS, content="{not JSON"), 429, code="queue_full")
            assert api_server.load() == (MAX_RUNNING, MAX_WAITING, 0) and not any(task.done() for task in taken)

    asyncio.run(run())


def test_prompts_that_do_not_all_fit_leave_nothing_behind(http: httpx.Client) -> None:
    check_error(http.post(COMPLETIONS, json=ENDLESS | {"prompt": ["<"] * (HELD + 1)}), 429, code="queue_full")


def test_a_deadline_ends_what_runs(http: httpx.Client) -> None:
    check_error(http.post(COMPLETIONS, json=ENDLESS | {"timeout": 0.5}), 504, code="deadline_exceeded")


@pytest.mark.proof
def test_a_replica_that_dies(api_server: Server, http: httpx.Client) -> None:
    """/health says 503 until the next replica is there, and a stream that the former one was at goes on then."""
    seen: set[int] = set()

    def recovered() -> bool:
        response = http.get("/health")
        seen.add(response.status_code)
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "engine_unavailable"
        return response.status_code == 200

    text = ""
    with http.stream("POST", COMPLETIONS, json=ENDLESS | {"stream": True, "temperature": 0}) as response:
        for line in response.iter_lines():
            if not line:
                continue
            assert line.startswith("data: {") and "error" not in json.loads(line[6:])
            text += json.loads(line[6:])["choices"][0]["text"]
            if not seen:
                actors = ray.util.list_named_actors(all_namespaces=True)
                (replica,) = [actor for actor in actors if actor["name"].startswith("SERVE_REPLICA::outrider#engine#")]
                ray.kill(ray.get_actor(replica["name"], replica["namespace"]))
                waiting.eventually(lambda: recovered() and 503 in seen, 60)
                before = len(text)
            if len(text) > before + 4000:  # more than the former one can have sent before it ended
                break
    assert seen == {200, 503}
    assert ("<" + text) == (CIRCLE * (len(text) // len(CIRCLE) + 1))[: len(text) + 1]
    eventually(lambda: api_server.load() == (0, 0, MAX_RUNNING))
    assert http.post(COMPLETIONS, json=TEXT).json()["choices"][0]["text"] == "abcd"


@pytest.fixture
def pair(api_server: Server, circle_model: Path) -> Iterator[str]:
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


def test_a_replica_that_is_full_is_left_for_another(pair: str) -> None:
    two = TEXT | {"n": 2, "max_tokens": 40, "ignore_eos": True}
    with httpx.Client(base_url=pair, timeout=60) as http:
        waiting.eventually(lambda: http.get("/ready").status_code == 200, 60)
        answers = [http.post(COMPLETIONS, json=two) for _ in range(20)]
        assert [answer.status_code for answer in answers] == [200] * 20
        assert all(len(answer.json()["choices"]) == 2 for answer in answers)
        assert http.post(COMPLETIONS, json=two | {"n": 3}).status_code == 429


def test_headers_that_do_not_come_close_the_connection(api_server: Server) -> None:
    where = urlsplit(api_server.url)
    with socket.create_connection((where.hostname, where.port), timeout=3 * HEADER_TIMEOUT_S) as slow:
        slow.sendall(SLOW_HEADERS)
        began = time.monotonic()
        assert slow.recv(1) == b"", "closed by Serve's proxy"
        assert time.monotonic() - began > HEADER_TIMEOUT_S - 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"x: 1\r\n" * 300 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nx: " + b"v" * 2**20, b"431"),
        (b"GET /" + b"u" * 2**20, b"414"),
    ],
)
def test_large_heads_are_refused_by_serves_proxy(api_server: Server, sent: bytes, status: bytes) -> None:
    where = urlsplit(api_server.url)
    with socket.create_connection((where.hostname, where.port), timeout=60) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(sent)
        received = b""
        while piece := client.recv(65536):
            received += piece
        assert b"HTTP/1.1 " + status in received and b"connection: close" in received
