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


class StreamTakenError(RequestError):
    """Another client goes on with the same stream."""


class QueueFullError(RuntimeError):
    """As many requests wait as the configuration allows (``engine.max_waiting``); try again later."""


# What a failed device is counted as (``outrider:device_failures``), by words of the message; "other" for any other one.
_DEVICE_FAULTS = {
    "illegal memory access": "illegal_memory_access",
    "ecc error": "uncorrectable_ecc",
    "nvlink error": "uncorrectable_nvlink",
    "unavailable": "device_lost",
    "no cuda-capable device": "device_lost",
    "is lost": "device_lost",
    "launch": "launch_failure",
    "assert": "device_assert",
    "rank": "rank_lost",
}
DEVICE_FAULTS = (*dict.fromkeys(_DEVICE_FAULTS.values()), "other")


class DeviceError(RuntimeError):
    """The device failed, and every later call of this process fails as well: the process has to end."""

    def __init__(self, reason: str) -> None:
        """``reason``: CUDA's message, in one line."""
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the device failed: {self.reason}"

    @property
    def kind(self) -> str:
        """One of ``DEVICE_FAULTS``."""
        reason = self.reason.lower()
        return next((kind for words, kind in _DEVICE_FAULTS.items() if words in reason), "other")


def one_line(error: BaseException) -> str:
    """An exception's type and message, for logs and messages of one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def fault_of(error: Exception) -> tuple[str, str | None]:
    """Return why a request ends with an exception, and its own field at fault, if one is (``StepOutput.fault_field``)."""
    if isinstance(error, RequestError):
        return error.message, error.field
    return f"the engine failed: {one_line(error)}", None


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
