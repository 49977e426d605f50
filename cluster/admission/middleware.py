"""Admission control as ASGI middleware: a request is refused before any work is done for it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import time
from collections.abc import Callable, Iterable, Set

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.cluster.admission.controller import CURRENT, AdmissionController, Ticket
from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.turns import SENDER, Sender

GENERATING = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/compare", "/v1/score",
})  # fmt: skip
_KEYED = ("/v1/", "/tokenize", "/detokenize")
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_CLOSE = {"Connection": "close"}
_FORM_TYPES = frozenset({"", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded"})
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<name>[a-zA-Z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")
_LAST_PORT = 65535
BODY_TIMEOUT_S = 60.0  # limit for receiving a body


class HostMiddleware:
    """Middleware that refuses foreign host names (DNS rebinding) and form posts from pages of other sites."""

    # A browser sends a preflight before a cross-site request, unless an HTML form could send it: a POST with one of three content
    # types. The server grants no preflight, so only these are refused here.

    def __init__(self, app: ASGIApp, names: frozenset[str] | None, refuse: Callable[[ApiError], ApiError]) -> None:
        """Wrap an application. ``names`` are the allowed ones, see ``configs.server_checks``; None for any."""
        self._app, self._names, self._refuse = app, names, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; see the ASGI specification."""
        error = self._error(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await self._refuse(error).response(scope)(scope, receive, send)

    def _error(self, method: str, headers: Headers) -> ApiError | None:
        hosts = headers.getlist("host")
        for host in hosts:
            if self._names is not None and not _is_own(host, self._names):
                message = (
                    f"this server does not accept the host name {host[:80]!r}: address it as localhost or by its IP address, "
                    "or have its operator add the name to server.allowed_hosts"
                )
                return ApiError(403, message, code="host_not_allowed")
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip().lower() in _FORM_TYPES:
            own = {name for host in hosts if (name := _name_of(host)) is not None} | (self._names or frozenset())
            if _is_foreign(headers, own):
                message = (
                    "this server does not accept this Content-Type from pages of other sites: have its operator add the host of "
                    "the page's Origin to server.allowed_hosts, or send it from a program"
                )
                return ApiError(403, message, code="origin_not_allowed")
        return None


def _is_foreign(headers: Headers, own: Set[str]) -> bool:
    """Return whether a browser reports that a page of another site sends the request. Other clients report nothing."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is None or site == "same-origin":
        return site == "cross-site"
    return _name_of(origin.rpartition("://")[2]) not in own


def _name_of(host: str) -> str | None:
    """Return the host name or IP address in a Host header (``LOCALHOST.:80``: ``localhost``); None if it is malformed."""
    parts = _HOST.fullmatch(host)
    if parts is None or not 0 < int(parts["port"] or 80) <= _LAST_PORT:
        return None
    if parts["ipv6"] is None:
        return parts["name"].removesuffix(".").lower()
    with contextlib.suppress(ValueError):  # not an address
        return str(ipaddress.IPv6Address(parts["ipv6"]))
    return None


def _is_own(host: str, names: frozenset[str]) -> bool:
    """Return whether a Host header names this server."""
    name = _name_of(host)
    try:
        ipaddress.ip_address(name or "")
    except ValueError:
        return name == "localhost" or name in names
    # DNS cannot redirect an IP address.
    return True


class AdmissionMiddleware:
    """Middleware that requires keys on public routes and gives tickets to requests that generate."""

    # Checks in order: the key (401), the limits of key and server (429), the size of the body (413). Then the whole body is read
    # before a ticket is taken, so that a slow sender holds no place. Bodies are limited per key (429), in all (503) and in time
    # (408). A key that repeats refused requests without waiting gets its 429 later.

    def __init__(self, app: ASGIApp, admission: AdmissionController) -> None:
        self._app, self._admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; see the ASGI specification."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))  # the path that is routed
        if scope["type"] != "http" or not path.startswith(_KEYED):
            await self._app(scope, receive, send)
            return
        scope = _with_authorization(scope)
        authorization = Headers(scope=scope).get("authorization")
        try:
            if scope["method"] == "POST" and path in GENERATING:
                await self._generate(authorization, scope, receive, send)
            else:
                await self._visit(authorization, scope, receive, send)
        except ApiError as error:  # refusals by admission; the application handles its own errors
            self._admission.refuse(error)
            if error.status == 429:
                with contextlib.suppress(ApiError):  # the key was removed meanwhile
                    await asyncio.sleep(self._admission.kept_back_s(authorization))
            await error.response(scope)(scope, receive, send)

    async def _generate(self, authorization: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = time.monotonic()
        self._admission.check(authorization)
        with self._admission.upload(authorization) as received:
            body = await self._body(scope, receive, received)
            if body is None:
                return  # the client has left
            ticket = self._admission.enter(authorization, arrived_s)
        sender = Sender(ticket.caller.tenant, ticket.caller.key, len(body))
        await self._answer(ticket, sender, scope, _Replay(body, receive), send)

    async def _visit(self, authorization: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as held:
            headers = self._admission.visit(authorization)
            if scope["method"] in _WITH_BODY:  # held until the request is answered, because nothing else counts it
                body = await self._body(scope, receive, held.enter_context(self._admission.upload(authorization)))
                if body is None:
                    return
                caller = self._admission.caller_of(authorization)
                sender = Sender(caller.tenant, caller.key, len(body))
                await self._while_there(sender, scope, _Replay(body, receive), _with_headers(send, headers))
            else:
                await self._app(scope, receive, _with_headers(send, headers))

    async def _answer(self, ticket: Ticket, sender: Sender, scope: Scope, replay: _Replay, send: Send) -> None:
        """Run the application until it has answered or the client has left, then give the ticket back."""
        answered = False

        async def noted(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = message["status"] == 200
            await send(message)

        token = CURRENT.set(ticket)
        try:
            await self._while_there(sender, scope, replay, _with_headers(noted, lambda: self._admission.headers(ticket)))
        finally:
            CURRENT.reset(token)
            self._admission.leave(ticket, answered)

    async def _while_there(self, sender: Sender, scope: Scope, replay: _Replay, send: Send) -> None:
        """Run the application for a request whose body was read; cancel it when the client leaves."""
        token = SENDER.set(sender)
        try:
            async with asyncio.timeout(None) as stay:
                watch = asyncio.create_task(replay.until_gone(stay))
                try:
                    await self._app(scope, replay, send)
                finally:
                    watch.cancel()
        except TimeoutError:
            if not stay.expired():
                raise  # raised by the application
        finally:
            SENDER.reset(token)

    async def _body(self, scope: Scope, receive: Receive, received: Callable[[int], None]) -> bytes | None:
        """Return the whole body; None if the client leaves first. Raise ``ApiError`` (408, 413, 429, 503)."""
        limits = self._admission.limits
        try:
            with contextlib.suppress(ValueError):  # not a number: the received bytes are counted
                _check_size(int(Headers(scope=scope).get("content-length", "0")), limits.max_request_bytes)
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await _pieces(receive, limits.max_request_bytes, received)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s: send it again"
            raise ApiError(408, message, code="body_timeout", headers=_CLOSE) from None
        except ApiError as error:
            error.headers |= _CLOSE  # the rest of the body is not read
            raise


def _with_authorization(scope: Scope) -> Scope:
    """Return a request whose key is in ``Authorization``, if it is in Anthropic's ``x-api-key`` instead."""
    headers = Headers(scope=scope)
    if "authorization" in headers or "x-api-key" not in headers:
        return scope
    key = headers["x-api-key"].encode("latin-1")
    return {**scope, "headers": [*scope["headers"], (b"authorization", b"Bearer " + key)]}


async def _pieces(receive: Receive, most: int, received: Callable[[int], None]) -> bytes | None:
    body = bytearray()  # a list of many tiny pieces would take far more memory
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece = message.get("body", b"")
        body += piece
        _check_size(len(body), most)
        received(len(piece))
        if not message.get("more_body", False):
            return bytes(body)


def _check_size(size: int, most: int) -> None:
    if size > most:
        message = f"the body has more than {most} bytes (limits.max_request_bytes): shorten it"
        raise ApiError(413, message, code="request_too_large")


class _Replay:
    """ASGI ``receive`` of a request whose body was read: the body once, then a disconnect when the client leaves."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._messages: Iterable[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])
        self._receive, self._gone = receive, asyncio.Event()

    async def __call__(self) -> Message:
        for message in self._messages:
            return message
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def until_gone(self, stay: asyncio.Timeout) -> None:
        """End ``stay`` when the client leaves."""
        # The application does not notice a disconnect while it sends nothing.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
        stay.reschedule(asyncio.get_running_loop().time())


def _with_headers(send: Send, headers: Callable[[], dict[str, str]]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers())
        await send(message)

    return sending
