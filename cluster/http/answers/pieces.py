"""Answers are built and written in pieces, between which the event loop goes on.

JSON that was written already is ``bytes`` in a list: such a list of a million entries is joined, and not walked through.
"""

from __future__ import annotations

import asyncio
import functools
from asyncio import AbstractEventLoop, Lock
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pydantic_core
from pydantic import BaseModel

PIECE = 1 << 16  # bytes of JSON, about a millisecond: the most that is built in one turn of the loop
_ITEMS = 1024  # of a list that are written at once
_ENTRY = 64  # bytes: what building the smallest part of an answer takes, in bytes that are written

to_json: Callable[[Any], bytes] = functools.partial(pydantic_core.to_json, inf_nan_mode="null")  # as that of a model
_TURNS: WeakKeyDictionary[AbstractEventLoop, Lock] = WeakKeyDictionary()


class Pauses:
    """Count what is built of one answer, and let the event loop go on after each piece.

    Of all answers that are built in a loop, one goes on in a turn of it: the loop is held by one piece, however many there are.
    """

    def __init__(self) -> None:
        self._left = PIECE

    async def after(self, size: int) -> None:
        """Let the loop go on if a piece is full, with ``size`` bytes of JSON more."""
        self._left -= size
        if self._left <= 0:
            self._left = PIECE
            async with _TURNS.setdefault(asyncio.get_running_loop(), Lock()):
                await asyncio.sleep(0)


async def written(value: Any, pauses: Pauses, dump: Callable[[Any], bytes] = to_json) -> bytes:
    """Return the JSON of a value, as ``dump`` writes it at once; of a model the fields that were set."""
    found: list[bytes] = []
    for piece in json_pieces(value, dump):
        found.append(piece)
        await pauses.after(len(piece) + _ENTRY)
    return b"".join(found)


def json_pieces(value: Any, dump: Callable[[Any], bytes] = to_json) -> Iterator[bytes]:
    """Write the JSON of a value piece by piece; ``dump`` writes keys, single values and lists of them."""
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
    """Write some items of a list, with commas between them."""
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
