"""Texts and ends of the live requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerFast

from decoding.request import FinishReason, Request
from engine.text.detokenizer import Detokenizer


class Outputs:
    """End tokens and text of every live request."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, eos_token_ids: Collection[int]) -> None:
        """Without a tokenizer there is no text."""
        self._tokenizer, self._eos_token_ids = tokenizer, tuple(eos_token_ids)
        self._live: dict[str, tuple[frozenset[int], Detokenizer | None]] = {}  # by request id: its end tokens, and its text

    def begin(self, request: Request) -> None:
        """A request that is new here."""
        own = () if request.params.ignore_eos else self._eos_token_ids
        params, detokenizer = request.params, None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, params.stop, params.include_stop, params.skip_special_tokens)
            for token in request.output_ids.tolist():  # emitted elsewhere, and shown
                detokenizer.push(token)
        self._live[request.request_id] = frozenset((*own, *params.stop_token_ids)), detokenizer

    def end(self, request: Request) -> None:
        """A request that is live no more."""
        del self._live[request.request_id]

    def end_tokens(self, request: Request) -> frozenset[int]:
        """The tokens that end a live request."""
        return self._live[request.request_id][0]

    def read(self, request: Request, tokens: Sequence[int]) -> tuple[list[str], FinishReason | None]:
        """The text that each emitted token releases, and why the output ends, if it does: then the tokens behind are not of it.

        Text that was held back is the token's that decided it; what is left at the end is the last token's.

        Args:
            request: live, before the tokens are committed.
            tokens: at least one.

        Returns:
            A piece of text, be it empty, for each token that belongs to the output.
        """
        (end_tokens, detokenizer), room = self._live[request.request_id], request.remaining
        pieces: list[str] = []
        reason: FinishReason | None = None
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
        if reason is not None and detokenizer is not None:
            pieces[-1] += detokenizer.flush()
        return pieces, reason

    def check_integrity(self, live: Collection[str]) -> None:
        """Asserts that nothing is kept but of these requests, by their ids."""
        assert self._live.keys() == set(live), (self._live.keys(), live)
