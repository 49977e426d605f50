"""Reasoning of a model, which it writes between tags before its answer, told apart from the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.http.answers.logprobs import TokenBytes
from engine.text.chat_format import Tags


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


class Reader(Protocol):
    """Takes the reasoning out of a text that comes in pieces."""

    has_thought: bool  # there is reasoning, be it not known yet whether more comes

    @property
    def is_over(self) -> bool:
        """No more reasoning will come."""

    @property
    def is_within(self) -> bool | None:
        """What comes next is reasoning; None: that is not known yet."""

    def push(self, text: str) -> Sequence[Any]:
        """What is known of the text so far and was not given before."""


class ReasoningReader:
    """Takes the reasoning out of a text that comes in pieces.

    Reasoning stands at the beginning of the text, or nowhere. The tags are dropped, and the space around reasoning and answer at
    them, which the templates of earlier turns drop as well.

    Example: ``push("<think>Two and two")`` gives ``[Thought("Two and two")]``, and then ``push(" is four.</think>\\n\\n4")``
    gives ``[Thought(" is four."), "4"]``.
    """

    def __init__(self, tags: Tags, begins_within: bool | None) -> None:
        """
        Args:
            tags: of the model.
            begins_within: the prompt has opened the reasoning already (true), or closed it (false); None: the text decides.
        """
        self._tags, self._opened = tags, begins_within is True
        self._held = ""
        self._is_first = True  # nothing was given of the part that the text is in
        self.is_within: bool | None = None if begins_within is not False else False  # None: that is not known yet
        self.has_thought = begins_within is True  # there is reasoning, be it empty

    @property
    def is_over(self) -> bool:
        """No more reasoning will come."""
        return self.is_within is False

    def push(self, text: str) -> list[str | Thought]:
        """What is known of the text so far and was not given before. No piece is empty."""
        if self.is_within is False and not self.has_thought:
            return [text] if text else []
        self._held += text
        found: list[str | Thought] = []
        if self.is_within is None:
            bare, opening = self._held.lstrip(), self._tags.opening
            if bare.startswith(opening):
                self._enter(bare[len(opening) :])
            elif opening.startswith(bare):
                return []
            elif self._opened:
                self._enter(self._held)
            else:
                self.is_within, left, self._held = False, self._held, ""
                return [left]
        if self.is_within:
            before, closing, after = self._held.partition(self._tags.closing)
            shown = before.rstrip() if closing else before[: len(before) - held_back(before, self._tags.closing)]
            if kept := shown.lstrip() if self._is_first else shown:
                found.append(Thought(kept))
                self._is_first = False
            self._held = after if closing else self._held[len(shown) :]
            if closing:
                self.is_within, self._is_first = False, True
        if self.is_within is False:
            left = self._held.lstrip() if self._is_first else self._held
            self._held = ""
            if left:
                found.append(left)
                self._is_first = False
        return found

    def finish(self) -> list[str | Thought]:
        """What was held back, when the text has ended."""
        left, self._held = self._held, ""
        if self.is_within or (self.is_within is None and self._opened):
            left = left.strip() if self._is_first else left.rstrip()
            return [Thought(left)] if left else []
        return [left] if left else []

    def _enter(self, rest: str) -> None:
        self.is_within, self.has_thought, self._held = True, True, rest


class ReasoningTokens:
    """Counts the tokens of the reasoning of an answer, the tags and the space before them included."""

    def __init__(self, reader: Reader, token_bytes: TokenBytes) -> None:
        """
        Args:
            reader: at its beginning, and this object's own.
            token_bytes: what the tokens of the model stand for.
        """
        self._reader, self._bytes = reader, token_bytes
        self._unsure = 0  # tokens of which it is not known yet
        self.count = 0

    def push(self, tokens: Sequence[int]) -> None:
        """The next tokens of the answer."""
        for token in tokens:
            if self._reader.is_over:
                return
            was_within = self._reader.is_within
            self._unsure += 1
            self._reader.push(self._bytes(token).decode("latin-1"))  # a character for each byte: tags are ASCII
            is_within = self._reader.is_within
            if was_within or is_within or (was_within is None and self._reader.has_thought):
                self.count, self._unsure = self.count + self._unsure, 0
            elif is_within is not None or was_within is not None:
                self._unsure = 0


def held_back(text: str, mark: str) -> int:
    """Length of the end of a text that may be space before a mark and the beginning of the mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            break
    else:
        length = 0
    bare = text[: len(text) - length]
    return length + len(bare) - len(bare.rstrip())
