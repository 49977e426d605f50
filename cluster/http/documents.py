"""OpenAPI document at ``/openapi.json``: response models, and additions to the document that FastAPI generates."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Annotated, Any

from fastapi import FastAPI, Header
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from outrider.cluster.http.answers.anthropic import MessageObject
from outrider.cluster.http.answers.openai_shapes import Answer
from outrider.cluster.http.answers.responses import ResponseObject
from outrider.cluster.http.answers.resume import HEADER, MAX_EVENT_ID
from outrider.cluster.http.types.strict import MAX_NAME

Authorization = Annotated[str | None, Header(include_in_schema=False)]  # documented as a security scheme
SessionId = Annotated[str | None, Header(alias="X-Session-ID", max_length=MAX_NAME)]  # same effect as prompt_cache_key
Accept = Annotated[str | None, Header(include_in_schema=False)]
LastEventId = Annotated[  # with the same body, resumes an interrupted stream after this event
    str | None,
    Header(alias=HEADER, max_length=MAX_EVENT_ID, description="id of the last received event; resumes the stream after it"),
]
NoEventId = Annotated[str | None, Header(alias=HEADER, include_in_schema=False)]  # for routes that cannot resume streams
_PRIVATE = "/admin"  # prefix of routes that are not documented


class ErrorDetails(BaseModel):
    """Error in OpenAI's format."""

    message: str
    type: str  # invalid_request_error, rate_limit_error or server_error
    param: str | None  # path of the field at fault, such as messages[0].content
    code: str | None


class ErrorBody(BaseModel):
    """Body of every error response."""

    error: ErrorDetails


class State(BaseModel):
    """State of the server. The response has more fields than those listed here."""

    status: str


class Version(BaseModel):
    """Version of this server."""

    version: str


class Model(BaseModel):
    """Served model or adapter. The response has more fields than those listed here."""

    id: str
    object: str
    created: int  # Unix time in seconds
    owned_by: str
    root: str  # for an adapter, the name of its folder
    parent: str | None  # for an adapter, its base model
    max_model_len: int  # prompt and output tokens together
    sampling_defaults: dict[str, float]  # sampling parameters of requests that leave them out, where they differ from OpenAI's
    lossless: bool  # true if every strategy that a request may choose is lossless
    strategies: list[str]
    lossless_strategies: list[str]
    exact: bool
    reasoning: list[str] | None  # opening and closing tag; null if the chat template has no known tags
    tool_calls: str | None  # format of tool calls in the chat template


class Models(BaseModel):
    """List of the served model and its adapters."""

    object: str
    data: list[Model]


class AnthropicError(BaseModel):
    """Error in Anthropic's format."""

    type: str  # error
    error: dict[str, str]  # type and message
    request_id: str | None


class TokenCount(BaseModel):
    """Number of the tokens of a prompt."""

    input_tokens: int


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused; the error gives the reason"},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer now"},
}
ANSWERS = ERRORS | {
    200: {
        "model": Answer,
        "description": "The answer; with stream: true, server-sent events, each a chunk as JSON, and [DONE] as the last",
        "content": {"text/event-stream": {}},
    }
}
RESPONSES = ERRORS | {
    200: {
        "model": ResponseObject,
        "description": "The answer; with stream: true, server-sent events, the last of which holds it",
        "content": {"text/event-stream": {}},
    }
}
ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicError, "description": error["description"]} for status, error in ERRORS.items()
}
MESSAGES = ANTHROPIC_ERRORS | {
    200: {
        "model": MessageObject,
        "description": "The message; with stream: true, server-sent events, the last of which is message_stop",
        "content": {"text/event-stream": {}},
    }
}
FILE = {
    "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}
STATES = ERRORS | {200: {"model": State}}


def version() -> str:
    """Return the version of this server; ``unknown`` if the package is not installed."""
    try:
        return installed("outrider")
    except PackageNotFoundError:
        return "unknown"


def install(app: FastAPI) -> None:
    """Replace the application's OpenAPI document by one of its public routes, built at the first request."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            # The operator's routes are no part of the public API.
            routes = [route for route in app.routes if not getattr(route, "path", "").startswith(_PRIVATE)]
            schema = get_openapi(title="Outrider", version=version(), summary=_SUMMARY, routes=routes)
            for operation in (operation for path in schema["paths"].values() for operation in path.values()):
                operation.pop("description", None)  # docstrings of handlers are for developers
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{}, {"key": []}]  # the API key is optional, unless the server requires one
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # the way documented by FastAPI


_SUMMARY = "OpenAI's API on draft-free speculative decoding, which changes no answer"
