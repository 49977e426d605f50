"""Threads in which the API works on texts, a text at a time, so that the event loop goes on and API keys take turns.

Tokenizers and the compiler of grammars let go of the interpreter while they work. A text is the piece by which work is cut: a
request that is cancelled ends with the text that is being worked on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from cluster.http.turns import ASKING, Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHORT = 1 << 14  # bytes of a body: work on larger ones does not hold up work on smaller ones

P = ParamSpec("P")
T = TypeVar("T")


class TextThreads:
    """Threads, and the tokenizer that they share."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer: Any = tokenizer
        tokenizer.encode("a")  # turns off a truncation that the tokenizer's file may ask for: nothing is set while threads use it
        self._short, self._long = Turns("short-texts"), Turns("long-texts")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread, in turns by API key, and return its result. Raises as ``Turns.run``.

        Whether the work is long is told by the whole body of the request that is being answered (``ASKING``): each of its texts,
        tools, arguments and variables is a part of that.
        """
        turns = self._long if ASKING.get().size > SHORT else self._short
        return await turns.run(work, *args, **kwargs)

    async def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The tokens of a text; with those that the tokenizer begins and ends a text with, or without."""
        ids: list[int] = await self.run(self.tokenizer.encode, text, add_special_tokens=special_tokens)
        return ids
