"""Forwards of a model over so many rows of one request, timed."""

from __future__ import annotations

import time

import numpy as np

from decoding.request import Request, SamplingParams
from decoding.sampling.ranking import argmax_rows
from decoding.tree import DraftTree
from engine.forward.batch import Work, pack
from engine.forward.runner import ModelRunner


class StepTimer:
    """A root and branches below it, behind a context."""

    def __init__(self, runner: ModelRunner, context: int) -> None:
        """
        Args:
            runner: of the model, without requests; its first slot is taken.
            context: tokens before the rows.
        """
        self._runner = runner
        self._request = Request("timed", np.zeros(context, np.int32), SamplingParams(1))
        self._request.slot = 0
        self._runner.forward(pack([Work(self._request, 0, context, DraftTree.chain(0, ()), frozenset())]))

    def seconds(self, rows: int, repeats: int, argmax: bool) -> list[float]:
        """Each of ``repeats`` forwards over ``rows`` rows; with ``argmax`` the likeliest token of each, too."""
        parents = np.minimum(np.arange(-1, rows - 1, dtype=np.int32), 0)
        tree = DraftTree(np.zeros(rows, np.int32), parents, np.zeros(rows, np.int8), rows)
        end = self._request.num_tokens
        batch = pack([Work(self._request, end - 1, end, tree, frozenset())])
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            logits = self._runner.forward(batch)
            if argmax:
                argmax_rows(logits)
            times.append(time.perf_counter() - started)
        return times
