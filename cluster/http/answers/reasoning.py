"""Incremental separation of reasoning, which is written between tags, from the rest of the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.engine.text.chat_format import Tags


@dataclass(frozen=True, slots=True)
class Thought:
    """Piece of reasoning text."""

    text: str


class Reader(Protocol):
    """Incremental parser of reasoning."""

    has_thought: bool  # whether there was reasoning so far

    @property
    def is_over(self) -> bool:
        """Return whether all reasoning has ended."""

    @property
    def is_within(self) -> bool | None:
        """Return whether the next text is reasoning; None if not known yet."""

    def push(self, text: str) -> Sequence[Any]:
        """Parse more text and return the new parts."""


class ReasoningReader:
    """Incremental parser of reasoning at the beginning of the output.

    Example: ``push("<think>Two and two")`` gives ``[Thought("Two and two")]``, and then ``push(" is four.</think>\\n\\n4")``
    gives ``[Thought(" is four."), "4"]``.
    """

    def __init__(self, tags: Tags, begins_within: bool | None) -> None:
        """Set the state: whether the prompt opens the reasoning (true) or closes it (false); None if the output decides."""
        self._tags, self._opened = tags, begins_within is True
        self._held = ""
        self._is_first = True  # no text of the current part was emitted yet
        self.is_within: bool | None = None if begins_within is not False else False  # None if not known yet
        self.has_thought = begins_within is True  # true for empty reasoning too

    @property
    def is_over(self) -> bool:
        """Return whether all reasoning has ended."""
        return self.is_within is False

    def push(self, text: str) -> list[str | Thought]:
        """Parse more text and return the new parts, none of them empty."""
        if self.is_within is False and not self.has_thought:
            return [text] if text else []
        self._held += text
        found: list[str | Thought] = []
        # The tags and the whitespace around them are dropped, as chat templates do for earlier messages.
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
        """Return the parts that were held back. Call it when the text has ended."""
        left, self._held = self._held, ""
        if self.is_within or (self.is_within is None and self._opened):
            left = left.strip() if self._is_first else left.rstrip()
            return [Thought(left)] if left else []
        return [left] if left else []

    def _enter(self, rest: str) -> None:
        self.is_within, self.has_thought, self._held = True, True, rest


class ReasoningTokens:
    """Counter of the output's reasoning tokens, including tags and the whitespace before them."""

    def __init__(self, reader: Reader, token_bytes: TokenBytes) -> None:
        self._reader, self._bytes = reader, token_bytes  # the reader must be new and not shared
        self._unsure = 0  # tokens that are not classified yet
        self.count = 0

    def push(self, tokens: Sequence[int]) -> None:
        """Count the next tokens of the output."""
        for token in tokens:
            if self._reader.is_over:
                return
            was_within = self._reader.is_within
            self._unsure += 1
            self._reader.push(self._bytes(token).decode("latin-1"))  # one character per byte, which suffices for ASCII tags
            is_within = self._reader.is_within
            if was_within or is_within or (was_within is None and self._reader.has_thought):
                self.count, self._unsure = self.count + self._unsure, 0
            elif is_within is not None or was_within is not None:
                self._unsure = 0


def held_back(text: str, mark: str) -> int:
    """Return the length of a text's end that may be whitespace before a mark plus the beginning of the mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            break
    else:
        length = 0
    bare = text[: len(text) - length]
    return length + len(bare) - len(bare.rstrip())
