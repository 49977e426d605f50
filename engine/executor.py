"""Who computes a step: packs the trees, runs the target, verifies, and keeps the KV of what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from decoding.drafters.base import TargetRows
from decoding.request import Acceptance
from decoding.sampling import argmax_rows, choose
from decoding.tree import Int32Array
from decoding.verify import verify_exact
from engine.batch import Work, pack
from engine.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request's tree."""

    acceptance: Acceptance
    target: TargetRows  # what the model said below each row of the tree


class Executor(Protocol):
    """Runs a batch of trees. One replica, a lookahead-parallel group and a tensor-parallel group are executors alike."""

    def execute(self, works: Sequence[Work]) -> list[Outcome | None]:
        """Computes the rows, and for each request with a tree returns what was accepted; None for those without.

        Afterwards the slot of a request with a tree holds the KV of ``work.end + accepted rows`` tokens, of another ``work.end``.
        """
        ...


class LocalExecutor:
    """The executor of one replica: one model in this process."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def execute(self, works: Sequence[Work]) -> list[Outcome | None]:
        """See ``Executor``."""
        batch = pack(works)
        logits = self.runner.forward(batch)
        greedy = argmax_rows(logits)
        outcomes: list[Outcome | None] = []
        for work, first in zip(works, batch.logit_starts, strict=True):
            if first is None:
                outcomes.append(None)
                continue
            assert work.tree is not None, work.request.request_id
            rows = slice(first, first + len(work.tree))
            outcomes.append(self._verify(work, logits[rows], greedy[rows]))
        return outcomes

    def _verify(self, work: Work, logits: torch.Tensor, greedy: Int32Array) -> Outcome:
        request, tree = work.request, work.tree
        assert tree is not None and request.slot is not None
        sampled = not request.params.greedy
        depths = tree.depths()

        def token_at(row: int) -> int:
            return choose(logits[row], request.params, work.end + int(depths[row])) if sampled else int(greedy[row])

        acceptance = verify_exact(tree, token_at, request.remaining, work.end_tokens)
        # Entries behind ``end - 1``: the root's, then the tree's rows in order.
        self.runner.cache.compact(request.slot, work.end - 1, (0, *acceptance.rows))
        return Outcome(acceptance, TargetRows(greedy, logits))
