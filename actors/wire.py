"""Messages between ranks as msgpack by their field types: no pickle, bytes are validated, arrays are little-endian."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

MAX_MESSAGE_BYTES = 1 << 26  # enough for prompts of millions of tokens; longer messages are refused
_MESSAGES: dict[str, Any] = {}


class WireError(ValueError):
    """Error of bytes that are not a message."""


class Message:
    """Base of the messages between ranks: dataclasses of numbers, strings, arrays, other dataclasses, and tuples of these."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _MESSAGES[cls.__name__] = cls


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    kind: Any = type(message)
    packed = kind.__name__, _form(kind).pack(message)
    data: bytes = msgpack.packb(packed, unicode_errors="surrogatepass")  # ids and stop strings may contain lone surrogates
    return data


def decode(data: bytes) -> Message:
    """Return the message that bytes encode. Raises ``WireError`` if they are not a message."""
    try:
        name, packed = msgpack.unpackb(data, use_list=False, unicode_errors="surrogatepass")
        message: Message = _form(_MESSAGES[name]).build(packed)
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
        raise WireError(f"not a message of a group: {type(error).__name__}: {error}") from None
    return message


@dataclass(frozen=True, slots=True)
class _Codec:
    pack: Callable[[Any], Any]  # converts to types that msgpack supports
    build: Callable[[Any], Any]  # inverse of pack; raises ValueError or TypeError for invalid input


def _as_is(value: Any) -> Any:
    return value


@cache
def _form(hint: Any) -> _Codec:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _object(hint)
    if origin is np.ndarray:
        (number,) = get_args(arguments[1])
        return _array(np.dtype(number))
    if origin is tuple and arguments[-1] is ...:
        return _sequence(_form(arguments[0]))
    if origin is tuple:
        forms = [_form(one) for one in arguments]
        return _Codec(_as_is, lambda packed: tuple([form.build(one) for form, one in zip(forms, _tuple(packed), strict=True)]))
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not types.NoneType]
        form = _form(kinds[0]) if len(kinds) == 1 else _one_of(kinds)
        return form if len(kinds) == len(arguments) else _optional(form)
    return _plain((int, float) if hint is float else (hint,))


def _tuple(packed: Any) -> tuple[Any, ...]:
    if type(packed) is not tuple:
        raise ValueError(f"expected a tuple, got {type(packed).__name__}")
    return packed


def _plain(kinds: tuple[type, ...]) -> _Codec:
    def build(value: Any) -> Any:
        if type(value) not in kinds:  # True is not a number
            raise ValueError(f"expected {kinds}, got {type(value).__name__}")
        return value

    return _Codec(_as_is, build)


def _object(kind: Any) -> _Codec:
    hints = get_type_hints(kind)
    forms = [_form(hint) for hint in hints.values()]
    packs = [(name, None if form.pack is _as_is else form.pack) for name, form in zip(hints, forms, strict=True)]
    builds = [form.build for form in forms]

    def pack(value: Any) -> list[Any]:
        return [getattr(value, name) if inner is None else inner(getattr(value, name)) for name, inner in packs]

    def build(packed: Any) -> Any:
        if type(packed) is not tuple:
            raise ValueError(f"expected fields of {kind.__name__}, got {type(packed).__name__}")
        return kind(*[inner(value) for inner, value in zip(builds, packed, strict=True)])

    return _Codec(pack, build)


def _array(dtype: np.dtype[Any]) -> _Codec:
    little = dtype.newbyteorder("<")

    def build(packed: Sequence[Any]) -> Any:
        shape, data = packed
        if shape and min(shape) < 0:
            raise ValueError(f"an array of shape {shape}")
        return np.frombuffer(data, little).reshape(shape).astype(dtype)

    return _Codec(lambda array: (array.shape, array.astype(little, copy=False).tobytes()), build)


def _sequence(form: _Codec) -> _Codec:
    def build(packed: Any) -> tuple[Any, ...]:
        build_one = form.build
        return tuple([build_one(one) for one in _tuple(packed)])

    return _Codec(_as_is if form.pack is _as_is else lambda values: [form.pack(one) for one in values], build)


def _optional(form: _Codec) -> _Codec:
    return _Codec(
        lambda value: None if value is None else form.pack(value), lambda packed: None if packed is None else form.build(packed)
    )


def _one_of(kinds: Sequence[Any]) -> _Codec:
    """Return the codec of a union of dataclasses: the index of the class, then its fields."""
    forms = [_form(kind) for kind in kinds]

    def pack(value: Any) -> tuple[int, Any]:
        number = kinds.index(type(value))
        return number, forms[number].pack(value)

    def build(packed: Sequence[Any]) -> Any:
        number, fields = packed
        if type(number) is not int or not 0 <= number < len(kinds):
            raise ValueError(f"class {number!r} of {len(kinds)}")
        return forms[number].build(fields)

    return _Codec(pack, build)
