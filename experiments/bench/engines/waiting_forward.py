"""A forward that computes nothing: the host waits as it does while a GPU computes, and the text goes on as it stands.

So the host's part of a step can be timed as it is beside a GPU: a forward on the CPU leaves nothing of the host's code and data
in the processor's caches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from decoding.request import Request
from engine.forward.batch import Batch


class WaitingForward:
    """In the place of ``ModelRunner.forward``."""

    def __init__(self, tokens: Sequence[int], vocab_size: int, rows: int, wait_s: float) -> None:
        """
        Args:
            tokens: of the text from which the prompts are cut.
            vocab_size: of the logits.
            rows: the most of a forward.
            wait_s: of a forward.
        """
        self._tokens, self._wait_s = np.array(tokens, np.int64), wait_s
        self._logits = torch.zeros(rows, vocab_size)
        self._set: tuple[torch.Tensor, torch.Tensor] | None = None
        self.live: list[tuple[Request, int]] = []  # with the place of each prompt in the text

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Logits whose largest is the token that follows in the text; they are there until the next call."""
        ends = time.perf_counter() + self._wait_s
        if self._set is not None:
            self._logits[self._set] = 0.0
        place = np.zeros(len(batch.token_ids), np.int64)
        for segment in batch.segments:
            (start,) = (start for request, start in self.live if request.slot == segment.slot)
            place[segment.offset : segment.offset + segment.rows] = start
        wanted = (place + batch.positions)[batch.logit_rows] + 1
        following = torch.from_numpy(self._tokens[wanted % len(self._tokens)])
        self._set = torch.arange(len(following)), following
        self._logits[self._set] = 1.0
        while time.perf_counter() < ends:
            pass
        return self._logits[: len(following)]
