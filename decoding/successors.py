"""What the target ranked next after each token when it last computed it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from decoding.tree import Int32Array

WIDTH = 8  # tokens kept after each
_PRIOR = (4.0, 1.2, 0.7, 0.5, 0.35, 0.3, 0.25, 0.2)  # hits by rank that a new table starts from, out of _PRIOR_TRIALS
_PRIOR_TRIALS = 10.0
_MAX_TRIALS = 4096.0  # then hits and trials are halved, so that the rates follow the traffic


class SuccessorTable:
    """The tokens last seen as the target's most likely ones after each token, and how often each rank was right.

    It takes vocab * 32 bytes.
    """

    def __init__(self, vocab_size: int, first: Int32Array | None = None) -> None:
        """
        Args:
            vocab_size: tokens are below it.
            first: [vocab, <= 8] what stands for a token until something was learned of it; empty rows when absent.
        """
        self.width = min(WIDTH, vocab_size)
        self.entries: Int32Array = np.full((vocab_size, self.width), -1, np.int32)  # [vocab, width], -1 where nothing is known
        self._first = first
        self._hits: npt.NDArray[np.float64] = np.array(_PRIOR[: self.width])
        self._trials = _PRIOR_TRIALS

    def after(self, token: int) -> list[int]:
        """The tokens kept after ``token``, the most likely first; empty when nothing is known."""
        entry: list[int] = self.entries[token].tolist()
        if entry[0] >= 0:
            return entry
        first: list[int] = [] if self._first is None else self._first[token].tolist()
        return first

    def learn(self, tokens: Int32Array, successors: Int32Array) -> None:
        """Replaces the entries of some tokens; of a token that stands twice, the later row stays.

        Args:
            tokens: [n].
            successors: [n, width] the most likely tokens after each, the most likely first.
        """
        last = {int(token): at for at, token in enumerate(tokens)}
        self.entries[list(last)] = successors[list(last.values())]

    def count(self, token: int, follower: int) -> None:
        """Counts at which rank the entry of ``token`` held what the target then emitted."""
        entry = self.after(token)
        if not entry:
            return
        self._trials += 1.0
        if follower in entry:
            self._hits[entry.index(follower)] += 1.0
        if self._trials > _MAX_TRIALS:
            self._hits, self._trials = self._hits / 2, self._trials / 2

    def rates(self) -> list[float]:
        """[width] how often the token of each rank is right."""
        rates: list[float] = (self._hits / self._trials).tolist()
        return rates
