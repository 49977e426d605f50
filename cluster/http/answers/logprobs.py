"""Log-probabilities in OpenAI's two shapes: ``content`` entries of a chat, parallel lists of a completion.

A token is reported by its text; one that holds a part of a character only has no text, and is told by its bytes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from tokenizers.decoders import DecodeStream

from decoding.request import TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LOWEST = -9999.0  # as OpenAI and vLLM: JSON has no minus infinity
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how byte fallback spells one byte


class TokenBytes:
    """The bytes that each token of a vocabulary stands for in the middle of a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.backend = tokenizer.backend_tokenizer
        self._added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
        self._alphabet = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE
        # A token before another one: decoders strip the space at the beginning of a text, which is not this token's.
        self._anchor = list(self.backend.encode("a", add_special_tokens=False).ids[-1:])
        self._anchor_text = self.backend.decode(self._anchor, skip_special_tokens=False)

    def __call__(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id beyond the tokenizer's vocabulary, which a padded embedding can have."""
        piece = self.backend.id_to_token(token_id)
        if piece is None or token_id in self._added:
            return self._added.get(token_id, "").encode()
        text = self.backend.decode([*self._anchor, token_id], skip_special_tokens=False).removeprefix(self._anchor_text)
        if "\ufffd" not in text:
            return text.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if all(character in self._alphabet for character in piece):
            return bytes(self._alphabet[character] for character in piece)
        return text.encode()


class LogprobWriter:
    """Log-probabilities of one choice, step by step, in the shape of its endpoint."""

    def __init__(self, kind: Literal["chat", "text"], token_bytes: TokenBytes, skip_special: bool = True) -> None:
        self._kind, self._bytes, self._skip_special = kind, token_bytes, skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._length = 0  # characters that the tokens before gave

    def write(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The ``logprobs`` object for the next tokens of the choice."""
        if self._kind == "chat":
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": [self._offset(entry.token_id) for entry in entries],
        }

    def write_prompt(self, first: int, entries: Sequence[TokenLogprob], count: int, text: str) -> dict[str, Any]:
        """The part of a completion's ``logprobs`` object that is about the prompt that its text begins with.

        Args:
            first: token of the prompt; it has no log-probability.
            entries: of the other ones.
            count: alternatives of each that are told.
            text: of the prompt, behind which the text of the tokens begins that are written next.
        """
        cut = [dataclasses.replace(entry, top=entry.top[:count]) for entry in entries]
        written = {
            "tokens": [self._name(token) for token in (first, *(entry.token_id for entry in cut))],
            "token_logprobs": [None, *(finite(entry.logprob) for entry in cut)],
            "top_logprobs": [None, *(self._alternatives(entry) for entry in cut)],
            "text_offset": [self._offset(token) for token in (first, *(entry.token_id for entry in cut))],
        }
        self._stream, self._length = DecodeStream(skip_special_tokens=self._skip_special), len(text)
        return written

    def _chat_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._chat_token(token, logprob) for token, logprob in entry.top]
        return self._chat_token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token_id)
        return {"token": data.decode("utf-8", "backslashreplace"), "logprob": finite(logprob), "bytes": list(data)}

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """The emitted token is always among them, as OpenAI has it; of tokens that read alike, the more likely counts."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(self._name(token), finite(logprob))
        return found

    def _name(self, token_id: int) -> str:
        """The token's text, or its bytes as OpenAI spells those that are no text."""
        data = self._bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _offset(self, token_id: int) -> int:
        """Where the token's text begins in the text of the choice; within a character, where that begins."""
        offset = self._length
        self._length += len(self._stream.step(self._bytes.backend, token_id) or "")
        return offset


def finite(logprob: float) -> float:
    """A log-probability as JSON can have it."""
    return max(logprob, _LOWEST)
