"""Threads in which the API works on texts, a text at a time, so that the event loop goes on and API keys take turns.

Tokenizers and the compiler of grammars let go of the interpreter while they work. A text is the piece by which work is cut: a
request that is cancelled ends with the text that is being worked on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from cluster.http.errors import ApiError
from cluster.http.turns import SENDER, Turns
from engine.text.tokenizer import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Bytes of bodies: work on larger ones does not hold up work on smaller ones.
SHORT = 1 << 14
_LONG_NICE = 10  # as processes that read files: a long text takes a core from nobody's tokens
HUGE = 1 << 20  # one at a time: a tokenizer takes up to 200 bytes of memory for each

P = ParamSpec("P")
T = TypeVar("T")


class TextThreads:
    """Threads, and the tokenizer that they share."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, refuse: Callable[[ApiError], ApiError] = lambda error: error) -> None:
        """
        Args:
            tokenizer: of the model.
            refuse: counts the error where too much waits.
        """
        self.tokenizer: Any = tokenizer
        tokenizer.encode("a")  # turns off a truncation that the tokenizer's file may ask for: nothing is set while threads use it
        self._short, self._long = Turns("short-texts", refuse=refuse), Turns("long-texts", refuse=refuse, nice=_LONG_NICE)
        self._huge = Turns("huge-texts", 1, refuse, _LONG_NICE)
        self.readers = Turns("file-readers", refuse=refuse)  # each waits for a process that reads a file

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread, in turns by API key, and return its result. Raises as ``Turns.run``.

        Whether the work is long is told by the whole body of the request that is being answered (``SENDER``): each of its texts,
        tools, arguments and variables is a part of that.
        """
        size = SENDER.get().size
        turns = self._short if size <= SHORT else self._long if size <= HUGE else self._huge
        return await turns.run(work, *args, **kwargs)

    async def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The tokens of a text; with those that the tokenizer begins and ends a text with, or without."""
        return await self.run(token_ids, self.tokenizer, text, special_tokens)

    @functools.cached_property
    def token_lengths(self) -> dict[int, int]:
        """Return the lengths of all tokens, as the vocabulary spells them."""
        return {token: len(text) for text, token in self.tokenizer.get_vocab().items()}
