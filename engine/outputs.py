"""What the live requests have said: where each ends, and its text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerFast

from decoding.request import FinishReason, Request
from engine.detokenizer import Detokenizer


class Outputs:
    """End tokens and text of every live request."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, eos_token_ids: Collection[int]) -> None:
        """
        Args:
            tokenizer: without one there is no text.
            eos_token_ids: the model's own, each of which ends a text.
        """
        self._tokenizer, self._eos_token_ids = tokenizer, tuple(eos_token_ids)
        self._end_tokens: dict[str, frozenset[int]] = {}
        self._detokenizers: dict[str, Detokenizer] = {}

    def begin(self, request: Request) -> None:
        """A request that is new here."""
        own = () if request.params.ignore_eos else self._eos_token_ids
        self._end_tokens[request.request_id] = frozenset((*own, *request.params.stop_token_ids))
        if self._tokenizer is not None:
            detokenizer = self._detokenizers[request.request_id] = Detokenizer(self._tokenizer, request.params.stop)
            for token in request.output_ids.tolist():  # emitted elsewhere, and shown
                detokenizer.push(token)

    def end(self, request: Request) -> None:
        """A request that is live no more."""
        del self._end_tokens[request.request_id]
        self._detokenizers.pop(request.request_id, None)

    def end_tokens(self, request: Request) -> frozenset[int]:
        """The tokens that end a live request."""
        return self._end_tokens[request.request_id]

    def read(self, request: Request, tokens: Sequence[int]) -> tuple[int, str, FinishReason | None]:
        """How many of the emitted tokens belong to the output, the text they add, and why it ends there, if it does.

        Args:
            request: live, before the tokens are committed.
            tokens: at least one.
        """
        end_tokens, detokenizer = self._end_tokens[request.request_id], self._detokenizers.get(request.request_id)
        text = ""
        reason: FinishReason | None = None
        for kept, token in enumerate(tokens, start=1):
            if token in end_tokens:
                reason = FinishReason.STOP
                break
            if detokenizer is not None:
                piece, stopped = detokenizer.push(token)
                text += piece
                if stopped:
                    return kept, text, FinishReason.STOP
            if kept == request.remaining:
                reason = FinishReason.LENGTH
                break
        if reason is not None and detokenizer is not None:
            text += detokenizer.flush()
        return kept, text, reason

    def check_integrity(self, live: Collection[str]) -> None:
        """Asserts that nothing is kept but of these requests, by their ids."""
        assert self._end_tokens.keys() == set(live), (self._end_tokens.keys(), live)
        assert self._detokenizers.keys() == (set() if self._tokenizer is None else set(live)), self._detokenizers.keys()
