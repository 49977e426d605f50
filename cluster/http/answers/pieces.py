"""Incremental building and serialization of responses, with pauses for the event loop between pieces."""
# JSON that is ready is `bytes` in a list. Such lists, which may have a million entries, are joined without visiting each entry.

from __future__ import annotations

import asyncio
import functools
from asyncio import AbstractEventLoop, Lock
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pydantic_core
from pydantic import BaseModel

PIECE = 1 << 16  # maximum bytes of JSON built in one turn of the event loop, about a millisecond
_ITEMS = 1024  # list items written at once
_ENTRY = 64  # cost of the smallest piece besides its bytes, in bytes of JSON

to_json: Callable[[Any], bytes] = functools.partial(pydantic_core.to_json, inf_nan_mode="null")  # same as for models
_TURNS: WeakKeyDictionary[AbstractEventLoop, Lock] = WeakKeyDictionary()


def event_data(data: bytes) -> str:
    """Return the ``data:`` field of a server-sent event, for JSON.

    U+0085, U+2028 and U+2029, which JSON allows in strings, are escaped: many clients take them for ends of lines.
    """
    text = data.decode()
    if not text.isascii():
        for character in "\x85\u2028\u2029":
            text = text.replace(character, f"\\u{ord(character):04x}")
    return f"data: {text}\n\n"


class Pauses:
    """Counter of the work on one response, which yields to the event loop after each piece."""

    # A lock shared by all responses of an event loop lets only one of them build a piece per turn of the loop.

    def __init__(self) -> None:
        self._left = PIECE

    async def after(self, size: int) -> None:
        """Count ``size`` bytes of JSON, and yield to the event loop if a piece is full."""
        self._left -= size
        if self._left <= 0:
            self._left = PIECE
            async with _TURNS.setdefault(asyncio.get_running_loop(), Lock()):
                await asyncio.sleep(0)


async def written(value: Any, pauses: Pauses, dump: Callable[[Any], bytes] = to_json) -> bytes:
    """Return the JSON of a value, equal to ``dump(value)``; for a model, of the fields that were set."""
    found: list[bytes] = []
    for piece in json_pieces(value, dump):
        found.append(piece)
        await pauses.after(len(piece) + _ENTRY)
    return b"".join(found)


def json_pieces(value: Any, dump: Callable[[Any], bytes] = to_json) -> Iterator[bytes]:
    """Yield the JSON of a value in pieces; ``dump`` writes keys, scalars and lists of scalars."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields if name in value.model_fields_set}
    if not isinstance(value, dict | list) or not value:
        yield dump(value)
    elif isinstance(value, dict):
        opening = b"{"
        for name, inner in value.items():
            yield opening + dump(name) + b":"
            yield from json_pieces(inner, dump)
            opening = b","
        yield b"}"
    else:
        opening = b"["
        for start in range(0, len(value), _ITEMS):
            for piece in _items(value[start : start + _ITEMS], dump):
                yield opening + piece
                opening = b""
            opening = b","
        yield b"]"


def _items(items: list[Any], dump: Callable[[Any], bytes]) -> Iterator[bytes]:
    if isinstance(items[0], bytes):
        yield b",".join(items)
    elif any(isinstance(item, dict | list | BaseModel) for item in items):
        for place, item in enumerate(items):
            opening = b"," if place else b""
            for piece in json_pieces(item, dump):
                yield opening + piece
                opening = b""
    else:
        yield dump(items)[1:-1]
