"""How much of OpenAI's predicted output came true."""

from __future__ import annotations

from collections.abc import Sequence


class PredictionMatch:
    """Counts the tokens of a prediction that an answer holds, in the prediction's order: their longest common subsequence.

    It depends on the two texts alone, whoever drafted, so the count is the same with and without speculation. The algorithm is
    Hyyrö's bit-vector one (Bit-parallel LCS-length computation revisited, AWOCA 2004): a bit for each predicted token, some
    integer operations for each token of the answer.

    Example: of the prediction ``a b c d`` the answer ``a x c d e`` holds ``a c d``: three accepted, one rejected.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        """
        Args:
            prediction: [n] its token ids.
        """
        self._length = len(prediction)
        self._all = self._row = (1 << self._length) - 1
        self._places: dict[int, int] = {}  # by token: a bit for each place in the prediction that holds it
        for place, token in enumerate(prediction):
            self._places[token] = self._places.get(token, 0) | 1 << place

    def push(self, tokens: Sequence[int]) -> None:
        """The next tokens of the answer."""
        row = self._row
        for token in tokens:
            if places := self._places.get(token):
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
