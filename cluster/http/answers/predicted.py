"""Counts of accepted and rejected tokens of OpenAI's ``prediction``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decoding.tree import Int32Array


class Predicted:
    """The tokens of a prediction, by place and by token: what all choices of an answer are compared with."""

    def __init__(self, token_ids: Sequence[int] | Int32Array) -> None:
        """
        Args:
            token_ids: [n].
        """
        self._ids = np.asarray(token_ids, np.int32)
        self._order = np.argsort(self._ids, kind="stable")
        self._sorted = self._ids[self._order]

    def __len__(self) -> int:
        return len(self._ids)

    def places(self, token: int) -> int:
        """A bit for each place that holds a token."""
        first, last = np.searchsorted(self._sorted, (token, token + 1))
        if first == last:
            return 0
        flags = np.zeros(len(self._ids), np.uint8)
        flags[self._order[first:last]] = 1
        return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


class PredictionMatch:
    """Counts the tokens of a prediction that an answer holds, in the prediction's order: their longest common subsequence.

    It depends on the two texts alone, whoever drafted, so the count is the same with and without speculation. The algorithm is
    Hyyrö's bit-vector one (Bit-parallel LCS-length computation revisited, AWOCA 2004): a bit for each predicted token, some
    integer operations for each token of the answer.

    Example: of the prediction ``a b c d`` the answer ``a x c d e`` holds ``a c d``: three accepted, one rejected.
    """

    def __init__(self, prediction: Predicted) -> None:
        self._prediction, self._length = prediction, len(prediction)
        self._all = self._row = (1 << self._length) - 1

    def push(self, tokens: Sequence[int]) -> None:
        """The next tokens of the answer."""
        row = self._row
        for token in tokens:
            if places := self._prediction.places(token):
                matched = row & places
                row = (row + matched | row - matched) & self._all
        self._row = row

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that the answer holds so far."""
        return self._length - self._row.bit_count()

    @property
    def rejected(self) -> int:
        """The others."""
        return self._length - self.accepted
