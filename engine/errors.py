"""Exceptions that callers can act on."""

from __future__ import annotations


class ModelLoadError(RuntimeError):
    """The model or its tokenizer cannot be used; the message says why in one line, and what to do."""


class RequestError(ValueError):
    """A request that cannot be served as it is.

    ``field`` is the name of the parameter at fault, as the caller knows it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str]]:
        return type(self), (self.field, self.message)


class ContextLengthError(RequestError):
    """Prompt and ``max_tokens`` together exceed the context of the model."""


class QueueFullError(RuntimeError):
    """As many requests wait as the configuration allows (``engine.max_waiting``); try again later."""


def one_line(error: BaseException) -> str:
    """An exception's type and message, for logs and messages of one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
