"""Bodies are parsed and checked in threads, in turns by API key, so that the event loop goes on however large a body is.

Compiled code holds the interpreter while it parses and checks. Numbers and objects come back to Python one by one, where another
thread may take over; of strings, lists and objects a body may hold as many as take some milliseconds, and of the names of an
object as many as take that long to be refused one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute

from cluster.http.errors import ApiError
from cluster.http.text_threads import SHORT, TextThreads

# Names and texts, objects and lists: more than a body within all other bounds has.
MAX_STRINGS, MAX_NESTED = 1 << 17, 1 << 15
MAX_NAMES = 1 << 12  # of one object
_PIECE_CHARS = 1 << 16  # that are counted at once


def checking_route(threads: TextThreads) -> type[APIRoute]:
    """Return the class of routes whose bodies are checked in ``threads``, short ones at once."""

    class CheckingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer, field = super().get_route_handler(), self.body_field
            if field is None:
                return answer

            async def checked(request: Request) -> Response:
                body = _CheckedBody(request, field, threads)
                try:
                    return await answer(body)
                except RequestValidationError as error:
                    if body.refusal is not None:
                        raise body.refusal from None
                    if not body.errors:
                        raise
                    others = [found for found in error.errors() if found["loc"][0] != "body"]  # in headers
                    raise RequestValidationError([*others, *body.errors], body=body.parsed) from None

            return checked

    return CheckingRoute


class _CheckedBody(Request):
    """A request whose JSON is given as the object that the route takes; null where it is none, and ``errors`` say why."""

    def __init__(self, request: Request, field: Any, threads: TextThreads) -> None:
        super().__init__(request.scope, request.receive)
        self._field, self._threads = field, threads
        self.parsed: Any = None
        self.errors: list[dict[str, Any]] = []
        self.refusal: ApiError | None = None

    async def json(self) -> Any:
        """Parse and check the body. Raises as ``json.loads``."""
        body = await self.body()
        try:
            return self._check(body) if len(body) <= SHORT else await self._threads.run(self._check, body)
        except ApiError as error:  # FastAPI would take it for a fault of its own
            self.refusal = error
            return None

    def _check(self, body: bytes) -> Any:
        self.parsed = parse(body)
        if len(body) > SHORT:
            check_names(self.parsed)
        value, self.errors = self._field.validate(self.parsed, {}, loc=("body",))
        return value


def parse(body: bytes) -> Any:
    """Return the value of JSON. Raises as ``json.loads``, and ``ApiError`` (400) where it holds too much."""
    if len(body) <= SHORT:
        return json.loads(body)
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    _check_counts(text)
    return json.loads(text, object_hook=lambda value: value, parse_int=_int, parse_float=_float)


def _int(digits: str) -> int:
    return int(digits)  # in Python: see above


def _float(digits: str) -> float:
    return float(digits)


def _check_counts(text: str) -> None:
    """Refuse JSON with too many parts, before it is parsed. Raises ``ApiError`` (400)."""
    quotes = nested = 0
    escape = ""  # a backslash at the end of a piece, whose character is in the next one
    for start in range(0, len(text), _PIECE_CHARS):
        piece = escape + text[start : start + _PIECE_CHARS]
        if "\\" in piece:
            piece = piece.replace("\\\\", "")
            escape = "\\" if piece.endswith("\\") else ""
            piece = piece.removesuffix(escape).replace('\\"', "")
        else:
            escape = ""
        between = piece.split('"')
        outside = between[quotes % 2 :: 2]
        nested += sum(each.count("{") + each.count("[") for each in outside)
        quotes += len(between) - 1
        if quotes // 2 > MAX_STRINGS:
            raise _too_many("names and texts", MAX_STRINGS)
        if nested > MAX_NESTED:
            raise _too_many("objects and lists", MAX_NESTED)


def check_names(value: Any) -> None:
    """Refuse objects with too many names, each of which would be refused by itself. Raises ``ApiError`` (400)."""
    waiting: list[tuple[Any, str | None]] = [(value, None)]  # with the field of the body that it is in
    while waiting:
        value, field = waiting.pop()
        if isinstance(value, dict):
            if len(value) > MAX_NAMES:
                raise _too_many("names in one object", MAX_NAMES, field)
            waiting += [(each, field or name) for name, each in value.items() if isinstance(each, dict | list)]
        elif isinstance(value, list):
            waiting += [(each, field) for each in value if isinstance(each, dict | list)]


def _too_many(kind: str, most: int, field: str | None = None) -> ApiError:
    message = f"{field or 'the body'} holds more than {most} {kind}: send less in one request"
    return ApiError(400, message, param=field, code="invalid_value")
