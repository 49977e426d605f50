"""Log-probabilities in OpenAI's formats: ``content`` entries for chats, parallel lists for completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from tokenizers.decoders import DecodeStream

from outrider.cluster.http.answers.pieces import to_json
from outrider.decoding.request import TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LOWEST = -9999.0  # replaces minus infinity, which JSON cannot represent; same value as OpenAI and vLLM
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # vocabulary entry of a byte-fallback token


class TokenBytes:
    """Map from token ids to the bytes that the tokens stand for in the middle of a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.backend = tokenizer.backend_tokenizer
        self._added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
        self._alphabet = {character: byte for byte, character in bytes_to_unicode().items()}  # byte-level BPE
        # Tokens are decoded after this token, because decoders strip a space at the beginning of a text.
        self._anchor = list(self.backend.encode("a", add_special_tokens=False).ids[-1:])
        self._anchor_text = self.backend.decode(self._anchor, skip_special_tokens=False)
        self._known: dict[int, bytes] = {}  # cache, bounded by the vocabulary

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for ids beyond the vocabulary, which padded embeddings can produce."""
        known = self._known.get(token_id)
        if known is None:
            piece = self.backend.id_to_token(token_id)
            if piece is None:
                return self._added.get(token_id, "").encode()
            known = self._known[token_id] = self._decoded(token_id, piece)
        return known

    def name(self, token_id: int) -> str:
        """Return the token's text, or its bytes in OpenAI's notation if they are not valid UTF-8."""
        data = self(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _decoded(self, token_id: int, piece: str) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        text = self.backend.decode([*self._anchor, token_id], skip_special_tokens=False).removeprefix(self._anchor_text)
        if "\ufffd" not in text:
            return text.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if all(character in self._alphabet for character in piece):
            return bytes(self._alphabet[character] for character in piece)
        return text.encode()


class LogprobWriter:
    """Writer of one choice's log-probabilities, step by step, in the format of its endpoint."""

    def __init__(self, kind: Literal["chat", "text"], token_bytes: TokenBytes, skip_special: bool = True) -> None:
        self._kind, self._bytes, self._skip_special = kind, token_bytes, skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._length = 0  # characters of the text so far

    def write(self, entries: Sequence[TokenLogprob], count: int | None = None) -> dict[str, Any]:
        """Return the ``logprobs`` object of the choice's next tokens, as ready JSON, with ``count`` or all alternatives."""
        if self._kind == "chat":
            return {"content": [to_json(self._chat_entry(entry)) for entry in entries], "refusal": None}
        return {
            "tokens": [self._bytes.name(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [to_json(self._alternatives(entry, count)) for entry in entries],
            "text_offset": [self._offset(entry.token_id) for entry in entries],
        }

    def begin_prompt(self, first: int) -> dict[str, Any]:
        """Return the first token of an echoed prompt as the beginning of ``logprobs``; write the others with ``write``."""
        name, offset = self._bytes.name(first), self._offset(first)
        return {"tokens": [name], "token_logprobs": [None], "top_logprobs": [b"null"], "text_offset": [offset]}

    def end_prompt(self, text: str) -> None:
        """Start the text offsets of the following tokens after the prompt's text."""
        self._stream, self._length = DecodeStream(skip_special_tokens=self._skip_special), len(text)

    def _chat_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._chat_token(token, logprob) for token, logprob in entry.top]
        return self._chat_token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token_id)
        return {"token": data.decode("utf-8", "backslashreplace"), "logprob": finite(logprob), "bytes": list(data)}

    def _alternatives(self, entry: TokenLogprob, count: int | None) -> dict[str, float]:
        """Return the alternatives by text, always including the emitted token, like OpenAI."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top[:count], (entry.token_id, entry.logprob)):
            found.setdefault(self._bytes.name(token), finite(logprob))  # of tokens with equal text, keep the more likely
        return found

    def _offset(self, token_id: int) -> int:
        """Return the start of the token's text in the choice's text; inside a character, the character's start."""
        offset = self._length
        self._length += len(self._stream.step(self._bytes.backend, token_id) or "")
        return offset


def finite(logprob: float) -> float:
    """Return a log-probability with minus infinity replaced, for JSON."""
    return max(logprob, _LOWEST)
