"""Handlers that turn exceptions, FastAPI's and pydantic's included, into error responses."""

from __future__ import annotations

import difflib
import itertools
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from outrider.cluster.http.errors import ApiError, api_error
from outrider.cluster.http.types.anthropic import CountTokensRequest, MessagesRequest
from outrider.cluster.http.types.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ScoreRequest,
    TokenizeRequest,
)
from outrider.cluster.http.types.responses import ResponsesRequest
from outrider.cluster.http.types.strict import Strict
from outrider.engine.errors import QueueFullError, RequestError

_LONGEST = 80  # maximum characters of client input shown in an error
_SORTED = 1024  # maximum names of an object that are sorted to show the first ones in an error
_BODIES: dict[str, type[Strict]] = {
    "/chat/completions": ChatCompletionRequest,
    "/completions": CompletionRequest,
    "/responses": ResponsesRequest,
    "/messages": MessagesRequest,
    "/count_tokens": CountTokensRequest,
    "/score": ScoreRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}  # by the end of the URL path


class _Repr(reprlib.Repr):
    """Short representation of client input, which may be as large as a body."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Return the first names of an object; those of a large object are not sorted."""
        return super().repr_dict(x if len(x) <= _SORTED else dict(itertools.islice(x.items(), self.maxdict + 1)), level)


_REPR = _Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _LONGEST
_REPR.maxlist = _REPR.maxdict = 4
_REPR.maxlevel = 3


def install(app: FastAPI) -> None:
    """Make the application return all errors in OpenAI's format, including those of FastAPI and Starlette."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            return _invalid(error.errors(), error.body, request.url.path).response(request.scope)
        if isinstance(error, HTTPException):
            return _refused(error, request).response(request.scope)
        return api_error(error).response(request.scope)

    for kind in (ApiError, QueueFullError, RequestError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)


def _refused(error: HTTPException, request: Request) -> ApiError:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return ApiError(404, f"unknown URL ({where})", code="unknown_url")
    if error.status_code == 405:
        return ApiError(405, f"method not allowed ({where})", code="method_not_allowed", headers=error.headers)
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


_VALUE_ERRORS = ("value_error", "string_unicode")  # of values that have the right type


def _invalid(findings: Sequence[Mapping[str, Any]], body: Any, url_path: str) -> ApiError:
    """Return a 400 for one of pydantic's findings: the one that reaches deepest into the body."""
    paths = [_resolve(finding["loc"], body, finding["type"] == "missing") for finding in findings]
    # Of a union, pydantic reports findings of every member: the deepest one is most likely of the member that was meant. A value
    # of the right type is what is wrong, rather than that it has not another type of the union.
    best = max(range(len(findings)), key=lambda index: (len(paths[index]), findings[index]["type"] in _VALUE_ERRORS, -index))
    finding, path = findings[best], paths[best]
    kind, context = finding["type"], finding.get("ctx", {})
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {context.get('error', finding['msg'])}", code="invalid_json")
    if kind == "string_unicode" and finding["loc"] == ("body",):  # a name that is not valid Unicode
        name = finding["input"]
        return ApiError(400, f"unknown parameter {_shown(name)}; remove it", param=_short(name), code="unknown_parameter")
    if finding["loc"] == ("body",) and "param" not in context:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json", code="invalid_json")
    if kind in ("unsupported_parameter", "unknown_parameters"):
        code = kind.removesuffix("s") if kind == "unknown_parameters" else kind
        return ApiError(400, finding["msg"], param=_dotted([*path, context["param"]]), code=code)
    param, others = _dotted(path), _others(paths, path)
    if kind == "extra_forbidden":
        return ApiError(400, _unknown(param, path, url_path) + others, param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param} is required{others}", param=param, code="missing_required_parameter")
    message = "must not hold half of a surrogate pair" if kind == "string_unicode" else finding["msg"]
    message = message.removeprefix("Value error, ")
    message = f"{param}: {message[:1].lower()}{message[1:]}, got {_shown(finding['input'])}{others}"
    return ApiError(400, message, param=param, code="invalid_value")


def _others(paths: Sequence[Sequence[int | str]], reported: Sequence[int | str]) -> str:
    """Return a note on the number of other wrong fields; containers of wrong fields do not count."""
    found = {tuple(path) for path in paths}
    holding = {path[:length] for path in (*found, tuple(reported)) for length in range(len(path))}
    count = len(found - holding - {tuple(reported)})
    return f" (and {count} more {'field is' if count == 1 else 'fields are'} wrong)" if count else ""


def _resolve(loc: Sequence[int | str], body: Any, is_missing: bool) -> list[int | str]:
    """Return the path of a finding in the body, or the name of a header, without pydantic's names of union members."""
    if loc[0] == "header":
        return list(loc[1:])
    path: list[int | str] = []
    node = body
    for position, step in enumerate(loc[1:], start=1):
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            if is_missing and position == len(loc) - 1:
                path.append(step)
            continue
        path.append(step)
    return path


def _dotted(path: Sequence[int | str]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{_short(step)}" for step in path)
    return text.removeprefix(".")


def _unknown(param: str, path: Sequence[int | str], url_path: str) -> str:
    near = difflib.get_close_matches(_short(str(path[-1])), _known_names(url_path, path), n=1)
    advice = f"did you mean {near[0]}?" if near else "remove it"
    return f"unknown parameter {param}; {advice}"


def _shown(value: Any) -> str:
    return _short(_REPR.repr(value))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _known_names(url_path: str, path: Sequence[int | str]) -> list[str]:
    """Return the valid field names at ``path`` in a request to ``url_path``."""
    kinds = (kind for ending, kind in _BODIES.items() if url_path.endswith(ending))
    kind: type[Strict] = next(kinds, CompletionRequest)
    for step in path[:-1]:
        found = kind.model_fields.get(step) if isinstance(step, str) else None
        kind = (None if found is None else _model_in(found.annotation)) or kind
    return [*(field.alias or name for name, field in kind.model_fields.items()), *kind.NO_OPS]


def _model_in(annotation: Any) -> type[Strict] | None:
    """Return the type of the objects that a field holds, directly or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    inner = (_model_in(argument) for argument in get_args(annotation))
    return next((kind for kind in inner if kind is not None), None)
