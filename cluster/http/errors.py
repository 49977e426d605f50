"""Error responses in OpenAI's format, ``{"error": {"message", "type", "param", "code"}}``, and in Anthropic's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import Scope

from outrider.cluster.http.request_ids import request_id
from outrider.engine.errors import ContextLengthError, QueueFullError, RequestError, StreamTakenError

logger = logging.getLogger(__name__)

_MESSAGES = "/v1/messages"  # Anthropic's routes begin with it
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ApiError(Exception):
    """Error response to an API request. ``param`` is the path of the field at fault, such as ``messages[0].content``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, dict(headers or {})

    @property
    def type(self) -> str:
        """Return OpenAI's error type for the status."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        # Client input in the message may hold a lone surrogate, which cannot be encoded.
        message = self.message.encode("utf-8", "replace").decode()
        param = None if self.param is None else self.param.encode("utf-8", "replace").decode()
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the JSON object of the response in Anthropic's format."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": kind, "message": self.body()["error"]["message"]}
        return {"type": "error", "error": error, "request_id": request_id()}

    def response(self, scope: Scope) -> JSONResponse:
        """Return the response to a request, in the format of its route."""
        return JSONResponse(self.anthropic_body() if is_anthropic(scope) else self.body(), self.status, self.headers)


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is for one of Anthropic's routes."""
    path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def api_error(error: Exception) -> ApiError:
    """Convert an exception to an error response; unexpected exceptions become a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, RequestError):
        if isinstance(error, StreamTakenError):
            return ApiError(409, str(error), param=error.field, code="stream_taken", headers={"Retry-After": "1"})
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
        return ApiError(400, str(error), param=error.field, code=code)
    # The exception's text may hold data of other requests, or of the operator.
    return ApiError(500, "internal error; see the server's log", code="internal_error")


def logged_error(error: Exception, event: str) -> ApiError:
    """Convert an exception that ended a stream to an error response, and log it; client errors without a traceback."""
    reported = api_error(error)
    if reported.status < 500:
        logger.info("%s: %d %s", event, reported.status, reported.message)
    else:
        logger.error("%s", event, exc_info=error)
    return reported


def renamed(error: Exception, own_name: Callable[[str | None], str | None], prompt: str) -> Exception:
    """Rename the field in an error from a chat request to the request of another API that it was made from.

    Args:
        own_name: from a chat's field to the other request's.
        prompt: the other request's field that is named if ``own_name`` finds none.
    """
    if isinstance(error, RequestError):
        return type(error)(own_name(error.field) or prompt, error.message)
    if isinstance(error, ApiError):
        error.param = own_name(error.param)
    return error


@contextlib.contextmanager
def renamed_errors(own_name: Callable[[str | None], str | None], prompt: str) -> Iterator[None]:
    """Apply ``renamed`` to the errors raised in the block."""
    try:
        yield
    except ApiError as error:
        renamed(error, own_name, prompt)
        raise
    except RequestError as error:
        raise renamed(error, own_name, prompt) from error
