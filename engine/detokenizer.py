"""Text of a growing output, token by token: unfinished characters and stop strings are decided before anything is shown."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast


class Detokenizer:
    """The text of one request.

    A token goes in, the text that is certain comes out. Text that may be the beginning of a stop string is held back until
    that is decided. Every token is looked at alone, also inside an accepted burst, so that a stop string ends the output at the
    token that completes it.
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
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._backend = tokenizer.backend_tokenizer
        # Proper beginnings of stop strings, the longest first.
        self._beginnings = tuple(sorted({text[:size] for text in stop for size in range(1, len(text))}, key=len, reverse=True))
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._ids: list[int] = []
        self._decoded = ""  # all that the stream gave
        self._shown = 0
        self._longest = max((len(text) for text in self._stop), default=0)

    def push(self, token_id: int) -> tuple[str, bool]:
        """Takes one token in.

        Returns:
            The text to show now, and whether a stop string is complete; nothing may be pushed after that.
        """
        self._ids.append(token_id)
        piece = self._stream.step(self._backend, token_id)
        if not piece:
            return "", False
        if not self._stop:
            self._decoded += piece
            self._shown += len(piece)
            return piece, False
        before = len(self._decoded)
        self._decoded += piece
        start = max(0, before - self._longest + 1)
        found = [(at, len(text)) for text in self._stop if (at := self._decoded.find(text, start)) >= 0]
        if found:
            at, size = min(found)
            return self._show(at + size if self._include_stop else at), True
        return self._show(len(self._decoded) - self._held_back()), False

    def flush(self) -> str:
        """The rest of the text at the end of a request without a stop string, unfinished characters included."""
        full = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special)
        if full.startswith(self._decoded):
            self._decoded = full
        return self._show(len(self._decoded))

    def _show(self, end: int) -> str:
        text = self._decoded[self._shown : end]
        self._shown = max(self._shown, end)
        return text

    def _held_back(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        if not self._decoded.endswith(self._beginnings):
            return 0
        return next(len(text) for text in self._beginnings if self._decoded.endswith(text))
