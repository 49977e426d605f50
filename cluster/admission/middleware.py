"""Admission as ASGI middleware: a request is refused before anything is done for it, and leaves however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.admission.controller import CURRENT, AdmissionController, Ticket
from cluster.http.errors import ApiError
from cluster.http.turns import ASKING, Asking

GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/compare"})
_KEYED = ("/v1/", "/tokenize", "/detokenize")
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_CLOSE = {"Connection": "close"}


class HostMiddleware:
    """Refuses requests that address this server by a name that is not its own, before anything else is done for them."""

    def __init__(self, app: ASGIApp, names: frozenset[str] | None, refuse: Callable[[ApiError], ApiError]) -> None:
        """
        Args:
            app: stands behind it.
            names: see ``configs.server_checks.allowed_names``; None: any.
            refuse: counts the error.
        """
        self._app, self._names, self._refuse = app, names, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; see ASGI's specification."""
        if self._names is not None and scope["type"] == "http":
            for host in Headers(scope=scope).getlist("host"):
                if not _is_own(host, self._names):
                    message = (
                        f"this server does not answer to the host {host[:80]!r}: address it as localhost or by its IP address, "
                        "or have its operator add the name to server.allowed_hosts"
                    )
                    error = self._refuse(ApiError(403, message, code="host_not_allowed"))
                    await JSONResponse(error.body(), error.status)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _is_own(host: str, names: frozenset[str]) -> bool:
    """Whether a Host header means this server. No name can be made to lead here under an IP address."""
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    name = name.rstrip(".").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name in names
    return True


class AdmissionMiddleware:
    """Stands before an application: keys for its public routes, tickets for those that generate.

    In this order: the key (401), what the key and the server have left (429), the size of the body (413). Then the body is read
    as a whole, so that a client that sends it slowly holds no place, and the ticket is taken. What bodies hold meanwhile is
    bounded by key (429) and in all (503), and so is the time in which one comes (408). A key that comes again and again without
    waiting is told of its 429 later.
    """

    def __init__(self, app: ASGIApp, admission: AdmissionController) -> None:
        self._app, self._admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; see ASGI's specification."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))  # as it is routed
        if scope["type"] != "http" or not path.startswith(_KEYED):
            await self._app(scope, receive, send)
            return
        authorization = Headers(scope=scope).get("authorization")
        try:
            if scope["method"] == "POST" and path in GENERATING:
                await self._generate(authorization, scope, receive, send)
            else:
                await self._visit(authorization, scope, receive, send)
        except ApiError as error:  # of admission: the application answers with its own
            self._admission.refuse(error)
            if error.status == 429:
                with contextlib.suppress(ApiError):  # its key is gone by now
                    await asyncio.sleep(self._admission.kept_back_s(authorization))
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)

    async def _generate(self, authorization: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = time.monotonic()
        self._admission.check(authorization)
        with self._admission.upload(authorization) as received:
            body = await self._body(scope, receive, received)
            if body is None:
                return  # the client has left
            ticket = self._admission.enter(authorization, arrived_s)
        asking = Asking(ticket.caller.tenant, ticket.caller.key, len(body))
        await self._answer(ticket, asking, scope, _Replay(body, receive), send)

    async def _visit(self, authorization: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as held:
            headers = self._admission.visit(authorization)
            if scope["method"] in _WITH_BODY:  # held until it is answered: nothing else counts it
                body = await self._body(scope, receive, held.enter_context(self._admission.upload(authorization)))
                if body is None:
                    return
                caller = self._admission.caller_of(authorization)
                asking = Asking(caller.tenant, caller.key, len(body))
                await self._while_there(asking, scope, _Replay(body, receive), _with_headers(send, headers))
            else:
                await self._app(scope, receive, _with_headers(send, headers))

    async def _answer(self, ticket: Ticket, asking: Asking, scope: Scope, replay: _Replay, send: Send) -> None:
        """Has the application answer, until it has, or the client has left."""
        answered = False

        async def noted(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = message["status"] == 200
            await send(message)

        token = CURRENT.set(ticket)
        try:
            await self._while_there(asking, scope, replay, _with_headers(noted, lambda: self._admission.headers(ticket)))
        finally:
            CURRENT.reset(token)
            self._admission.leave(ticket, answered)

    async def _while_there(self, asking: Asking, scope: Scope, replay: _Replay, send: Send) -> None:
        """Have the application answer a request whose body was read; it is cancelled when the client leaves."""
        token = ASKING.set(asking)
        try:
            async with asyncio.timeout(None) as stay:
                watch = asyncio.create_task(replay.until_gone(stay))
                try:
                    await self._app(scope, replay, send)
                finally:
                    watch.cancel()
        except TimeoutError:
            if not stay.expired():
                raise  # not ours
        finally:
            ASKING.reset(token)

    async def _body(self, scope: Scope, receive: Receive, received: Callable[[int], None]) -> bytes | None:
        """All of the body; None when the client leaves before it has sent it. Raises ``ApiError`` (408, 413, 429, 503)."""
        limits = self._admission.limits
        try:
            with contextlib.suppress(ValueError):  # a length that is no number: what comes is counted
                _check_size(int(Headers(scope=scope).get("content-length", "0")), limits.max_request_bytes)
            async with asyncio.timeout(limits.body_timeout_s):
                return await _pieces(receive, limits.max_request_bytes, received)
        except TimeoutError:
            message = f"the body was not there within {limits.body_timeout_s:g} s (limits.body_timeout_s): send it again"
            raise ApiError(408, message, code="body_timeout", headers=_CLOSE) from None
        except ApiError as error:
            error.headers |= _CLOSE  # the rest of the body is not waited for
            raise


async def _pieces(receive: Receive, most: int, received: Callable[[int], None]) -> bytes | None:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        _check_size(size, most)
        received(len(pieces[-1]))
        if not message.get("more_body", False):
            return b"".join(pieces)


def _check_size(size: int, most: int) -> None:
    if size > most:
        message = f"the body has more than the {most} bytes that this server takes (limits.max_request_bytes): shorten it"
        raise ApiError(413, message, code="request_too_large")


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


def _with_headers(send: Send, headers: Callable[[], dict[str, str]]) -> Send:
    """Sends with what the answer says of the limits of its key."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers())
        await send(message)

    return sending
