"""The OpenAPI document at ``/openapi.json``: what the routes take and answer, as FastAPI tells it, with what it cannot know."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Annotated, Any

from fastapi import FastAPI, Header
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from cluster.http.answers.openai_shapes import Answer
from cluster.http.answers.responses import ResponseObject
from cluster.http.answers.resume import HEADER, MAX_EVENT_ID
from cluster.http.types.strict import MAX_NAME

Authorization = Annotated[str | None, Header(include_in_schema=False)]  # told as the scheme of the whole document
SessionId = Annotated[str | None, Header(alias="X-Session-ID", max_length=MAX_NAME)]  # as the field prompt_cache_key
Accept = Annotated[str | None, Header(include_in_schema=False)]
LastEventId = Annotated[  # of a stream that was cut off: the same body gets the rest of it
    str | None, Header(alias=HEADER, max_length=MAX_EVENT_ID, description="id of the last event of a stream to be gone on with")
]
NoEventId = Annotated[str | None, Header(alias=HEADER, include_in_schema=False)]  # where it is always refused
_PRIVATE = "/admin"  # the operator's routes are not the public's


class ErrorDetails(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str  # invalid_request_error, rate_limit_error or server_error
    param: str | None  # the path of the field at fault, such as messages[0].content
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetails


class State(BaseModel):
    """How the server is; there are more fields than these."""

    status: str


class Version(BaseModel):
    """The version of this server."""

    version: str


class Model(BaseModel):
    """A model that is served; there are more fields than these."""

    id: str
    object: str
    created: int  # seconds since 1970
    owned_by: str
    root: str  # of an adapter its folder
    parent: str | None  # of an adapter the model that it was trained on
    max_model_len: int  # tokens of prompt and output together
    lossless: bool  # whatever is asked for
    strategies: list[str]
    lossless_strategies: list[str]
    exact: bool
    reasoning: list[str] | None  # the tags around it; null where the chat template has none that are known
    tool_calls: str | None  # the form that the chat template has calls written in


class Models(BaseModel):
    """The list of models."""

    object: str
    data: list[Model]


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused, and why"},
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
FILE = {
    "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}
STATES = ERRORS | {200: {"model": State}}


def version() -> str:
    """Of this server; ``unknown`` where it runs from a folder in which it was not installed."""
    try:
        return installed("outrider")
    except PackageNotFoundError:
        return "unknown"


def install(app: FastAPI) -> None:
    """Has the application describe its public routes, when it has all of them."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            routes = [route for route in app.routes if not getattr(route, "path", "").startswith(_PRIVATE)]
            schema = get_openapi(title="Outrider", version=version(), summary=_SUMMARY, routes=routes)
            for operation in (operation for path in schema["paths"].values() for operation in path.values()):
                operation.pop("description", None)  # a docstring is for who reads the code
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{}, {"key": []}]  # an API key where the server asks for one
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way


_SUMMARY = "OpenAI's API on draft-free speculative decoding, which changes no answer"
