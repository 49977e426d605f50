"""Bodies that nobody has read yet, in Serve's proxy and in the API: no more than a bound is held of each."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from ray.serve._private import http_util, proxy, replica
from uvicorn.config import HTTP_PROTOCOLS

from outrider.cluster.admission.http_limits import HELD
from outrider.cluster.serving.serve_limits import AHEAD_BYTES, BoundedQueue, BoundedReceive, use_bounded_receive, use_http_limits

MOST = 10_000  # steps of the event loop, far more than a bound lets through


@pytest.mark.parametrize("size", [1, 1000, 2 * AHEAD_BYTES])
def test_a_proxy_holds_no_more_than_a_bound_of_a_body_and_of_messages(size: int) -> None:
    piece = {"type": "http.request", "body": b"b" * size, "more_body": True}

    async def receive_all(queue: BoundedQueue) -> None:
        while True:
            await queue(piece)

    async def run() -> None:
        queue = BoundedQueue()
        client = asyncio.create_task(receive_all(queue))
        for _ in range(3):  # as often as the API takes what is there
            for _ in range(MOST):
                await asyncio.sleep(0)
            assert AHEAD_BYTES <= HELD.bytes <= AHEAD_BYTES + size + 512
            taken = queue.get_messages_nowait()
            assert HELD.bytes == 0 and len(taken) <= AHEAD_BYTES // 512 and (len(taken) - 1) * size < AHEAD_BYTES
        await asyncio.sleep(0)
        client.cancel()
        queue.close()
        assert HELD.bytes == 0

    asyncio.run(run())


def test_an_api_fetches_no_more_than_a_bound_until_it_is_read() -> None:
    messages = [{"type": "http.request", "body": b"b" * 1000, "more_body": True}]
    fetched = 0

    async def fetch(metadata: Any) -> bytes:
        nonlocal fetched
        fetched += 1
        await asyncio.sleep(0)
        return pickle.dumps(messages if fetched < 2000 else [{"type": "http.disconnect"}])

    async def run() -> None:
        receive = BoundedReceive({"type": "http"}, None, fetch)
        fetching = asyncio.create_task(receive.fetch_until_disconnect())
        for _ in range(MOST):
            await asyncio.sleep(0)
        assert fetched <= AHEAD_BYTES // 1000 + 1
        count = 0
        while (await receive())["type"] == "http.request":
            count += 1
        await fetching
        assert count == 1999 and await receive() == {"type": "http.disconnect"}

    asyncio.run(run())


def test_the_private_parts_of_serve_are_as_they_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy.MessageQueue is http_util.MessageQueue and replica.ASGIReceiveProxy is http_util.ASGIReceiveProxy
    for owner, name in ((proxy, "MessageQueue"), (replica, "ASGIReceiveProxy")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    assert use_http_limits() == []
    use_bounded_receive()
    assert "MessageQueue" in proxy.HTTPProxy.send_request_to_replica.__wrapped__.__code__.co_names
    assert proxy.MessageQueue is BoundedQueue and replica.ASGIReceiveProxy is BoundedReceive
