"""Text and end tokens of the live requests. Unfinished characters and possible stop strings are held back."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from outrider.decoding.request import FinishReason, Request

_TEXT_CHANGED = "Invalid prefix"  # start of the error of ``DecodeStream`` if a token changes earlier text


class _StopString:
    """Matcher of one stop string over text that arrives in pieces (Knuth-Morris-Pratt)."""

    __slots__ = ("_borders", "_text", "matched")

    def __init__(self, text: str) -> None:
        self._text = text
        self.matched = 0  # length of the longest prefix of the string that ends the text so far
        self._borders = array("H", [0])  # KMP failure function: length of the longest border of each prefix
        length = 0
        for character in text[1:]:
            length = self._next(length, character)
            self._borders.append(length)

    def find(self, piece: str) -> int | None:
        """Return where the string that a piece completes begins, relative to the piece (may be negative); None if incomplete."""
        if not self.matched and self._text[0] not in piece:
            return None
        for end, character in enumerate(piece, start=1):
            self.matched = self._next(self.matched, character)
            if self.matched == len(self._text):
                return end - self.matched
        return None

    def _next(self, length: int, character: str) -> int:
        while length and self._text[length] != character:
            length = self._borders[length - 1]
        return length + (self._text[length] == character)


class Detokenizer:
    """Incremental text of one request.

    Text that was returned stays: if a later byte makes earlier tokens decode to other text, the tokens whose text was not
    returned yet are decoded separately.

    Example: the bytes ``41 FF`` and a token ``b`` decode to two replacement characters and ``b``. ``A`` was shown after the first
    byte; a replacement character and ``b`` follow.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, stop: Sequence[str], include_stop: bool = False, skip_special: bool = True
    ) -> None:
        self._include_stop, self._skip_special = include_stop, skip_special
        self._tokenizer, self._stop = tokenizer, tuple((len(text), _StopString(text)) for text in stop)
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._ids: list[int] = []
        self._whole = 0  # number of ids whose text is decoded
        self._decoded = ""  # all decoded text
        self._shown = 0  # characters returned

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add one token; return the text to show now, and whether a stop string is complete. Do not push after that."""
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
        """Return the rest of the text at the end of a request without a stop string, unfinished characters included."""
        if self._whole < len(self._ids):
            full = self._text(self._ids)
            self._decoded = full if full.startswith(self._decoded) else self._decoded + self._text(self._ids[self._whole :])
        return self._show(len(self._decoded))

    def _decode(self, token_id: int) -> str | None:
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


class Outputs:
    """End tokens and detokenizers of all live requests."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, eos_token_ids: Collection[int]) -> None:
        self._tokenizer, self._eos_token_ids = tokenizer, tuple(eos_token_ids)
        self._live: dict[str, tuple[frozenset[int], Detokenizer | None]] = {}  # by request id

    def begin(self, request: Request) -> None:
        """Add a request, with the tokens that it emitted elsewhere."""
        own = () if request.params.ignore_eos else self._eos_token_ids
        params, detokenizer = request.params, None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, params.stop, params.include_stop, params.skip_special_tokens)
            for token in request.output_ids.tolist():  # already emitted and shown by another replica
                detokenizer.push(token)
        self._live[request.request_id] = frozenset((*own, *params.stop_token_ids)), detokenizer

    def end(self, request: Request) -> None:
        """Remove a request."""
        del self._live[request.request_id]

    def end_tokens(self, request: Request) -> frozenset[int]:
        """Return the tokens that end a live request."""
        return self._live[request.request_id][0]

    def read(self, request: Request, tokens: Sequence[int]) -> tuple[list[str], FinishReason | None]:
        """Return a piece of text, maybe empty, for each of at least one uncommitted token, and the reason if the output ends."""
        (end_tokens, detokenizer), room = self._live[request.request_id], request.remaining
        pieces: list[str] = []
        reason: FinishReason | None = None
        # One at a time, also within an accepted burst, so that a stop string ends the output at the token that completes it.
        for token in tokens:
            if token in end_tokens:
                reason = FinishReason.STOP
                if not request.params.include_stop or token not in request.params.stop_token_ids:
                    pieces.append("")
                    break
            piece, stopped = ("", False) if detokenizer is None else detokenizer.push(token)
            pieces.append(piece)
            if stopped:
                return pieces, FinishReason.STOP
            if reason is not None:
                break
            if len(pieces) == room:
                reason = FinishReason.LENGTH
                break
        # Text that was held back is released by the token that decided it, and the rest at the end by the last token.
        if reason is not None and detokenizer is not None:
            pieces[-1] += detokenizer.flush()
        return pieces, reason

    def check_integrity(self, live: Collection[str]) -> None:
        """Assert that the ids of the requests kept are ``live``."""
        assert self._live.keys() == set(live), (self._live.keys(), live)
