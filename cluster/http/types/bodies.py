"""Request body types by route, and the names of their fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from outrider.cluster.http.types.openai import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.cluster.http.types.responses import ResponsesRequest
from outrider.cluster.http.types.strict import Strict

BODIES: dict[str, type[Strict]] = {
    "/chat/completions": ChatCompletionRequest,
    "/completions": CompletionRequest,
    "/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}  # by the end of the URL path


def known_names(url_path: str, path: Sequence[int | str]) -> list[str]:
    """Return the valid field names at ``path`` in a request to ``url_path``."""
    kinds = (kind for ending, kind in BODIES.items() if url_path.endswith(ending))
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
