"""Accepted and rejected token counts for OpenAI's ``prediction``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.decoding.arrays import Int32Array


class Predicted:
    """Tokens of a prediction, indexed by token id; shared by all choices of a response."""

    def __init__(self, token_ids: Sequence[int] | Int32Array) -> None:
        self._ids = np.asarray(token_ids, np.int32)  # [n]
        self._order = np.argsort(self._ids, kind="stable")
        self._sorted = self._ids[self._order]

    def __len__(self) -> int:
        return len(self._ids)

    def places(self, token: int) -> int:
        """Return the positions of a token as a bit mask."""
        first, last = np.searchsorted(self._sorted, (token, token + 1))
        if first == last:
            return 0
        flags = np.zeros(len(self._ids), np.uint8)
        flags[self._order[first:last]] = 1
        return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


class PredictionMatch:
    """Counter of predicted tokens that the output contains in order: their longest common subsequence.

    Example: of the prediction ``a b c d`` the answer ``a x c d e`` holds ``a c d``: three accepted, one rejected.
    """

    def __init__(self, prediction: Predicted) -> None:
        self._prediction, self._length = prediction, len(prediction)
        self._all = self._row = (1 << self._length) - 1

    def push(self, tokens: Sequence[int]) -> None:
        """Count the next tokens of the output."""
        row = self._row
        for token in tokens:
            if places := self._prediction.places(token):
                matched = row & places
                # Hyyrö's bit-vector algorithm (Bit-parallel LCS-length computation revisited, AWOCA 2004): one bit per predicted
                # token.
                row = (row + matched | row - matched) & self._all
        self._row = row

    @property
    def accepted(self) -> int:
        """Return the number of predicted tokens in the output so far."""
        return self._length - self._row.bit_count()

    @property
    def rejected(self) -> int:
        """Return the number of the other predicted tokens."""
        return self._length - self.accepted
