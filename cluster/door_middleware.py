"""The door as ASGI middleware: a request is refused before anything is done for it, and leaves however it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.door import CURRENT, Door, Ticket
from cluster.errors import ApiError

GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/compare"})
_KEYED = ("/v1/", "/tokenize", "/detokenize")
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class DoorMiddleware:
    """Stands before an application: keys for its public routes, tickets for those that generate.

    In this order: the key (401), what the key and the server have left (429), the size of the body (413). Then the body is read
    as a whole, so that a client that sends it slowly holds no place, and the ticket is taken.
    """

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; see ASGI's specification."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))  # as it is routed
        if scope["type"] != "http" or not path.startswith(_KEYED):
            await self._app(scope, receive, send)
            return
        arrived_s, ticket = self._door.now_s(), None
        headers = Headers(scope=scope)
        authorization = headers.get("authorization")
        generates = scope["method"] == "POST" and path in GENERATING
        try:
            if generates:
                self._door.check(authorization)
            else:
                self._door.check_key(authorization)
            body = await self._body(headers, receive) if scope["method"] in _WITH_BODY else b""
            if body is None:
                return  # the client has left
            if generates:
                ticket = self._door.enter(authorization, arrived_s)
        except ApiError as error:
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)
            return
        replay = _Replay(body, receive)
        if ticket is None:
            await self._app(scope, replay if scope["method"] in _WITH_BODY else receive, send)
        else:
            await self._answer(ticket, scope, replay, send)

    async def _answer(self, ticket: Ticket, scope: Scope, replay: _Replay, send: Send) -> None:
        """Has the application answer, until it has, or the client has left."""
        answered = False

        async def send_with_limits(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = message["status"] == 200
                MutableHeaders(scope=message).update(ticket.headers())
            await send(message)

        token = CURRENT.set(ticket)
        try:
            async with asyncio.timeout(None) as stay:
                watch = asyncio.create_task(replay.until_gone(stay))
                try:
                    await self._app(scope, replay, send_with_limits)
                finally:
                    watch.cancel()
        except TimeoutError:
            if not stay.expired():
                raise  # not ours
        finally:
            CURRENT.reset(token)
            ticket.close(answered)

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """All of the body; None when the client leaves before it has sent it. Raises ``ApiError`` (413)."""
        most = self._door.max_request_bytes
        with contextlib.suppress(ValueError):  # a length that is no number: what comes is counted
            self._check_size(int(headers.get("content-length", "0")), most)
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            self._check_size(size, most)
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _check_size(self, size: int, most: int) -> None:
        if size > most:
            message = f"the body has more than the {most} bytes that this server takes (limits.max_request_bytes): shorten it"
            raise self._door.refuse(ApiError(413, message, code="request_too_large", headers={"Connection": "close"}))


class _Replay:
    """The ``receive`` of a request whose body was read: the body once, and then that the client has left, when it has."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._messages: Iterable[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])
        self._receive, self._gone = receive, asyncio.Event()

    async def __call__(self) -> Message:
        for message in self._messages:
            return message
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def until_gone(self, stay: asyncio.Timeout) -> None:
        """Ends a stay when the client leaves: nobody else looks while nothing is sent."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
        stay.reschedule(asyncio.get_running_loop().time())
