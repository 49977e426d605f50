"""Text of a growing output, token by token: unfinished characters and stop strings are decided before anything is shown."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

_TEXT_CHANGED = "Invalid prefix"  # how the message of a stream begins whose text a token has changed


class _StopString:
    """A stop string that is looked for in a text that comes in pieces (Knuth, Morris and Pratt)."""

    __slots__ = ("_borders", "_text", "matched")

    def __init__(self, text: str) -> None:
        """Of at least one character; two bytes are kept for each."""
        self._text = text
        self.matched = 0  # characters at the end of what came that the string begins with
        self._borders = array("H", [0])  # of each beginning of the string, the length of the longest other that it ends with
        length = 0
        for character in text[1:]:
            length = self._next(length, character)
            self._borders.append(length)

    def find(self, piece: str) -> int | None:
        """Where the string that a piece completes begins, counted from the piece's beginning; None while it is not complete."""
        if not self.matched and self._text[0] not in piece:
            return None
        for end, character in enumerate(piece, start=1):
            self.matched = self._next(self.matched, character)
            if self.matched == len(self._text):
                return end - self.matched
        return None

    def _next(self, length: int, character: str) -> int:
        """The characters that match with one more behind ``length`` that do."""
        while length and self._text[length] != character:
            length = self._borders[length - 1]
        return length + (self._text[length] == character)


class Detokenizer:
    """The text of one request.

    A token goes in, the text that is certain comes out. Text that may be the beginning of a stop string is held back until
    that is decided. Every token is looked at alone, also inside an accepted burst, so that a stop string ends the output at the
    token that completes it.

    What was shown stays. Where a byte behind whole characters makes the run of bytes invalid, so that the tokens have another
    text now, those whose text is not shown yet are decoded for themselves.

    Example: the bytes ``41 FF`` and a token ``b`` decode to two replacement characters and ``b``. ``A`` was shown after the first
    byte; a replacement character and ``b`` follow.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, stop: Sequence[str], include_stop: bool = False, skip_special: bool = True
    ) -> None:
        """
        Args:
            tokenizer: of the model.
            stop: strings that end the text.
            include_stop: the one that ends it is part of it.
            skip_special: special tokens give no text.
        """
        self._include_stop, self._skip_special = include_stop, skip_special
        self._tokenizer, self._stop = tokenizer, tuple((len(text), _StopString(text)) for text in stop)
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._ids: list[int] = []
        self._whole = 0  # of the ids, those whose text came
        self._decoded = ""  # all that came
        self._shown = 0

    def push(self, token_id: int) -> tuple[str, bool]:
        """Takes one token in.

        Returns:
            The text to show now, and whether a stop string is complete; nothing may be pushed after that.
        """
        piece = self._decode(token_id)
        if not piece:
            return "", False
        before = len(self._decoded)
        self._decoded += piece
        if not self._stop:
            self._shown += len(piece)
            return piece, False
        found = [(before + at, size) for size, stop in self._stop if (at := stop.find(piece)) is not None]
        if found:
            at, size = min(found)
            return self._show(at + size if self._include_stop else at), True
        return self._show(len(self._decoded) - max(stop.matched for _, stop in self._stop)), False

    def flush(self) -> str:
        """The rest of the text at the end of a request without a stop string, unfinished characters included."""
        if self._whole < len(self._ids):
            full = self._text(self._ids)
            self._decoded = full if full.startswith(self._decoded) else self._decoded + self._text(self._ids[self._whole :])
        return self._show(len(self._decoded))

    def _decode(self, token_id: int) -> str | None:
        """The text that a token makes whole, with those before it that were unfinished."""
        self._ids.append(token_id)
        try:
            piece: str | None = self._stream.step(self._backend, token_id)
        except Exception as error:
            if not str(error).startswith(_TEXT_CHANGED):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            piece = self._stream.step(self._backend, self._ids[self._whole :])
        if piece:
            self._whole = len(self._ids)
        return piece

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        return text

    def _show(self, end: int) -> str:
        text = self._decoded[self._shown : end]
        self._shown = max(self._shown, end)
        return text
