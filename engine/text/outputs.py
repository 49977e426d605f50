"""Text and end tokens of the live requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerFast

from outrider.decoding.request import FinishReason, Request
from outrider.engine.text.detokenizer import Detokenizer


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
        """Return a piece of text, possibly empty, for each token that belongs to the output, and the reason if the output ends.

        Text that was held back is released by the token that decided it, and the rest at the end by the last token. Call it with
        at least one token, before the tokens are committed.
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
        """Assert that the ids of the requests kept are ``live``."""
        assert self._live.keys() == set(live), (self._live.keys(), live)
