"""Exceptions that callers can act on."""

from __future__ import annotations


class ModelLoadError(RuntimeError):
    """Model or tokenizer that cannot be used; the message gives the reason and the remedy in one line."""


class RequestError(ValueError):
    """Request that cannot be served; ``field`` is the name of the parameter at fault, as the caller knows it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str]]:
        # The default would create a copy from the joined message alone.
        return type(self), (self.field, self.message)


class ContextLengthError(RequestError):
    """Prompt and ``max_tokens`` together exceed the context of the model."""


class StreamTakenError(RequestError):
    """Stream that another client has resumed."""


class QueueFullError(RuntimeError):
    """Waiting queue at its limit (``engine.max_waiting``); the client may retry later."""


# Label of a device failure in ``outrider:device_failures``, by words of the message; "other" if none match.
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
    """Permanent failure of the device: every later CUDA call of this process fails, so the process has to end."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)  # CUDA's message, in one line
        self.reason = reason

    def __str__(self) -> str:
        return f"the device failed: {self.reason}"

    @property
    def kind(self) -> str:
        """Return the kind of the failure, one of ``DEVICE_FAULTS``."""
        reason = self.reason.lower()
        return next((kind for words, kind in _DEVICE_FAULTS.items() if words in reason), "other")


def one_line(error: BaseException) -> str:
    """Return an exception's type and message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def fault_of(error: Exception) -> tuple[str, str | None]:
    """Return the error message of a request that fails with an exception, and its own field at fault, if any."""
    if isinstance(error, RequestError):
        return error.message, error.field
    return f"the engine failed: {one_line(error)}", None


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has no message."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
