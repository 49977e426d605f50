"""Runners of a model that is split over several ranks, and the messages from the leader's runner to the others.

All ranks compute the same batches in the same order, each for its heads (tensor parallelism) or layers (pipeline). Only the
leader knows requests: the other ranks repeat its KV copies and compactions before the next forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.engine.forward.attention import StepContext
from outrider.engine.forward.batch import Batch, SequenceRows
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.kv.kv_cache import KVShape, SlotCache


@dataclass(frozen=True, slots=True)
class EntryCopy:
    """Recorded call of ``SlotCache.copy``."""

    source: int
    target: int
    length: int
    start: int


@dataclass(frozen=True, slots=True)
class Compaction:
    """Recorded call of ``SlotCache.compact``."""

    slot: int
    start: int
    rows: tuple[int, ...]


Move = EntryCopy | Compaction

_PROBE_ROWS = 8
Together = Callable[[Sequence[Move], Batch], AbstractContextManager[None]]


class RecordedCache(SlotCache):
    """KV cache that records copies and compactions for the other ranks."""

    def __init__(self, shape: KVShape, slots: int, capacity: int) -> None:
        super().__init__(shape, slots, capacity)
        self._moves: list[Move] = []

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """See ``SlotCache``."""
        # Rows that are in place already move nothing.
        if rows[-1] != len(rows) - 1:
            self._moves.append(Compaction(slot, start, tuple(rows)))
            super().compact(slot, start, rows)

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        """See ``SlotCache``."""
        self._moves.append(EntryCopy(source, target, length, start))
        super().copy(source, target, length, start)

    def take_moves(self) -> list[Move]:
        """Return the recorded copies and compactions since the last call, in order."""
        moves, self._moves = self._moves, []
        return moves


class LeadingRunner(ModelRunner):
    """Runner of the leading rank, which sends each batch to the other ranks and computes its own part."""

    def __init__(self, model: PreTrainedModel, slots: int, capacity: int, shape: KVShape, together: Together, ranks: int) -> None:
        """Create the runner, at the same time as all other ranks, which take part in its first forward pass.

        Args:
            shape: of the local heads and layers.
            together: sends moves and a batch to all other ranks; the leader computes its own part inside the context.
            ranks: number of ranks in the group.
        """
        super().__init__(model, slots, capacity, shape, RecordedCache)
        self._together, self.ranks = together, ranks

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelRunner``."""
        assert isinstance(self.cache, RecordedCache)
        with self._together(self.cache.take_moves(), batch):
            return super().forward(batch)


@torch.inference_mode()
def probe_logits(model: PreTrainedModel, shape: KVShape) -> torch.Tensor:
    """Return the logits of a few made-up rows, [rows, vocab] float32 on the CPU; all ranks of a split model must take part."""
    rows = np.arange(_PROBE_ROWS)
    batch = Batch(rows + 1, rows, (SequenceRows(0, 0, 0, _PROBE_ROWS, None),), rows, (0,))
    positions = torch.from_numpy(rows).to(model.device)
    cache = SlotCache(dataclasses.replace(shape, device=model.device), 1, _PROBE_ROWS)
    output = model(
        input_ids=torch.from_numpy(batch.token_ids)[None].to(model.device),
        position_ids=positions[None],
        use_cache=False,
        tree_step=StepContext(batch, cache, positions, model.dtype, None),
    )
    logits: torch.Tensor = output.logits[0]
    return logits.float().cpu()


def following_runner(model: PreTrainedModel, slots: int, capacity: int, shape: KVShape) -> ModelRunner:
    """Return the runner of another rank's part of the model."""
    runner = ModelRunner(model, slots, capacity, shape)
    # The leader's clearing of slots is not sent to the other ranks.
    for slot in range(slots):
        runner.cache.zero(slot, capacity)
    return runner


def apply_moves(cache: SlotCache, moves: Sequence[Move]) -> None:
    """Apply the leader's copies and compactions to another rank's slots."""
    for move in moves:
        if isinstance(move, EntryCopy):
            cache.copy(move.source, move.target, move.length, move.start)
        else:
            cache.compact(move.slot, move.start, move.rows)
