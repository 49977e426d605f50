"""A target that is a set of known outputs, as drafters see it."""

from __future__ import annotations

from decoding.budget.latency import LatencyCurve
from decoding.tree import Int32Array


class KnownTarget:
    """What drafters may ask of a target that is a set of known outputs."""

    def __init__(self, vocab_size: int, end_token: int, max_model_len: int, curve: LatencyCurve) -> None:
        """
        Args:
            vocab_size: tokens are below it.
            end_token: ends a text.
            max_model_len: tokens of prompt and output together.
            curve: of its steps.
        """
        self.end_token_ids: tuple[int, ...] = (end_token,)
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._curve = curve

    def bigram_table(self, width: int) -> Int32Array:
        """See ``Target``. Raises ``ValueError``: known outputs rank nothing."""
        raise ValueError("a strategy drafts from the model's own ranking, which known outputs do not have")

    def unigram_ranking(self, width: int) -> Int32Array:
        """See ``bigram_table``."""
        return self.bigram_table(width)

    def latency(self) -> LatencyCurve:
        """See ``Target``."""
        return self._curve
