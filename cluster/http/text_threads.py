"""Threads for work on texts, such as tokenization, so that it does not block the event loop; scheduled fairly by API key."""

# Tokenizers and the grammar compiler release the GIL. Work is scheduled one text at a time: a cancelled request stops after its
# current text.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.turns import SENDER, Turns
from outrider.engine.text.tokenizer import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Limits in bytes of the body. Each class has its own threads, so that larger bodies do not delay smaller ones.
SHORT = 1 << 14
_LONG_NICE = 10  # same as file-reading processes: long texts must not slow down decoding
HUGE = 1 << 20  # above it, one body at a time: a tokenizer needs up to 200 bytes of memory per byte

P = ParamSpec("P")
T = TypeVar("T")


class TextThreads:
    """Thread pools for texts, and the model's tokenizer that they share. ``refuse`` counts errors when too much work waits."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, refuse: Callable[[ApiError], ApiError] = lambda error: error) -> None:
        self.tokenizer: Any = tokenizer
        # Turns off truncation that the tokenizer's file may set, so that no thread changes the tokenizer later.
        tokenizer.encode("a")
        self._short, self._long = Turns("short-texts", refuse=refuse), Turns("long-texts", refuse=refuse, nice=_LONG_NICE)
        self._huge = Turns("huge-texts", 1, refuse, _LONG_NICE)
        self.readers = Turns("file-readers", refuse=refuse)  # threads that wait for file-reading processes

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread at the API key's turn, and return its result. Raises the errors of ``Turns.run``."""
        size = SENDER.get().size  # the body of the current request bounds all its texts, tools, arguments and variables
        turns = self._short if size <= SHORT else self._long if size <= HUGE else self._huge
        return await turns.run(work, *args, **kwargs)

    async def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, with or without the tokenizer's special tokens at its ends."""
        return await self.run(token_ids, self.tokenizer, text, special_tokens)

    @functools.cached_property
    def token_lengths(self) -> dict[int, int]:
        """Return the length of each token's vocabulary entry, by token id."""
        return {token: len(text) for text, token in self.tokenizer.get_vocab().items()}
