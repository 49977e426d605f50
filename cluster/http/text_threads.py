"""Threads in which the API tokenizes, a text at a time, so that the event loop goes on and tenants take turns.

Tokenizers and the compiler of grammars let go of the interpreter while they work. A text is the piece by which work is cut: a
request that is cancelled ends with the text that is being worked on. Of each API key one text of a kind is worked on at once, so
that whoever sends many leaves a thread to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from cluster.admission.controller import CURRENT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHORT = 1 << 16  # characters, or tokens: what is longer does not hold up what is not
_THREADS = 2  # of each kind

P = ParamSpec("P")
T = TypeVar("T")


class TextThreads:
    """Threads, and the tokenizer that they share."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer: Any = tokenizer
        tokenizer.encode("a")  # turns off a truncation that the tokenizer's file may ask for: nothing is set while threads use it
        self._turns: WeakValueDictionary[tuple[bool, str], asyncio.Lock] = WeakValueDictionary()  # while somebody waits or works
        self._short = ThreadPoolExecutor(_THREADS, thread_name_prefix="short-texts")
        self._long = ThreadPoolExecutor(_THREADS, thread_name_prefix="long-texts")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function gives, or raises, that works on ``size`` characters or tokens."""
        is_long, ticket = size > SHORT, CURRENT.get()
        turn = self._turns.setdefault((is_long, "" if ticket is None else ticket.caller.key), asyncio.Lock())
        async with turn:
            return await asyncio.wrap_future((self._long if is_long else self._short).submit(work, *args, **kwargs))

    async def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The tokens of a text; with those that the tokenizer begins and ends a text with, or without."""
        ids: list[int] = await self.run(len(text), self.tokenizer.encode, text, add_special_tokens=special_tokens)
        return ids
