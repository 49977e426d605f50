"""Parsing and validation of request bodies in threads, scheduled fairly by API key, so that no body blocks the event loop."""

# Compiled parsers hold the GIL while they run. Numbers and objects are therefore passed through Python callbacks, where another
# thread can take over. The number of strings, lists and objects in a body is bounded to some milliseconds of parsing.

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute

from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.text_threads import SHORT, TextThreads
from outrider.cluster.http.types.strict import UNKNOWN

logger = logging.getLogger(__name__)

# Strings (names and values), and objects plus lists. No body within all other bounds has as many.
MAX_STRINGS, MAX_NESTED = 1 << 17, 1 << 15
_NAMES, _NAME_CHARS = 16, 80  # unknown fields named in a warning, and characters of a name
_PIECE_CHARS = 1 << 16  # characters scanned at once by _check_counts


def checking_route(threads: TextThreads, warns_of_unknown: bool = False) -> type[APIRoute]:
    """Return a route class that validates bodies in ``threads``; bodies of at most ``SHORT`` bytes in the event loop.

    ``warns_of_unknown``: unknown fields are left out with a warning; otherwise they are errors.
    """

    class CheckingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer, field = super().get_route_handler(), self.body_field
            if field is None:
                return answer

            async def checked(request: Request) -> Response:
                body = _CheckedBody(request, field, threads, warns_of_unknown)
                try:
                    return await answer(body)
                except RequestValidationError as error:
                    if body.refusal is not None:
                        raise body.refusal from None
                    if not body.errors:
                        raise
                    others = [found for found in error.errors() if found["loc"][0] != "body"]  # errors in headers
                    raise RequestValidationError([*others, *body.errors], body=body.parsed) from None

            return checked

    return CheckingRoute


class _CheckedBody(Request):
    """Request whose ``json()`` is the validated object of the route; None if invalid, with the reasons in ``errors``."""

    def __init__(self, request: Request, field: Any, threads: TextThreads, warns_of_unknown: bool) -> None:
        super().__init__(request.scope, request.receive)
        self._field, self._threads, self._warns_of_unknown = field, threads, warns_of_unknown
        self.parsed: Any = None
        self.errors: list[dict[str, Any]] = []
        self.refusal: ApiError | None = None

    async def json(self) -> Any:
        """Parse and validate the body. Raises ``json.JSONDecodeError``."""
        try:
            check_encoding(self)
            body = await self.body()
            return self._check(body) if len(body) <= SHORT else await self._threads.run(self._check, body)
        except ApiError as error:  # FastAPI would replace it by its own error for unreadable bodies
            self.refusal = error
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            self.refusal = ApiError(400, f"the body is not JSON: {_fault(error)}", code="invalid_json")
        return None

    def _check(self, body: bytes) -> Any:
        self.parsed = parse(body)
        unknown: list[str] | None = [] if self._warns_of_unknown else None
        token = UNKNOWN.set(unknown)
        try:
            value, self.errors = self._field.validate(self.parsed, {}, loc=("body",))
        finally:
            UNKNOWN.reset(token)
        if unknown:
            names = ", ".join(name[:_NAME_CHARS] for name in dict.fromkeys(unknown[:_NAMES]))
            logger.warning("left unknown fields out of a request to %s: %s", self.url.path, ascii(names))
        return value


def check_encoding(request: Request) -> None:
    """Raise ``ApiError`` (415) if the body of a request is compressed."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding: bodies in {encoding[:20]!r} are not supported: send the body uncompressed"
        raise ApiError(415, message, param="Content-Encoding", code="unsupported_content_encoding")


def _fault(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "it holds an integer with too many digits"


def parse(body: bytes) -> Any:
    """Parse JSON. Raises the errors of ``json.loads``, and ``ApiError`` (400) if the body has too many strings or objects."""
    if len(body) <= SHORT:
        return json.loads(body)
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    _check_counts(text)
    return json.loads(text, object_hook=lambda value: value, parse_int=_int, parse_float=_float)


def _int(digits: str) -> int:
    return int(digits)  # a Python callback, so that other threads can run: see above


def _float(digits: str) -> float:
    return float(digits)


def _check_counts(text: str) -> None:
    """Raise ``ApiError`` (400) if JSON text has too many strings, objects or lists, before it is parsed."""
    quotes = nested = 0
    escape = ""  # backslash at the end of a piece; the character that it escapes is in the next piece
    for start in range(0, len(text), _PIECE_CHARS):
        piece = escape + text[start : start + _PIECE_CHARS]
        if "\\" in piece:
            piece = piece.replace("\\\\", "")
            escape = "\\" if piece.endswith("\\") else ""
            piece = piece.removesuffix(escape).replace('\\"', "")
        else:
            escape = ""
        between = piece.split('"')
        outside = between[quotes % 2 :: 2]  # the parts that are not inside strings
        nested += sum(each.count("{") + each.count("[") for each in outside)
        quotes += len(between) - 1
        if quotes // 2 > MAX_STRINGS:
            raise _too_many("names and texts", MAX_STRINGS)
        if nested > MAX_NESTED:
            raise _too_many("objects and lists", MAX_NESTED)


def _too_many(kind: str, most: int) -> ApiError:
    return ApiError(400, f"the body holds more than {most} {kind}: send less in one request", code="invalid_value")
