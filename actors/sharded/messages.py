"""Messages between the leader and the ranks that hold parts of one model.

The leader computes a forward while the others do, so nobody answers a step: that all take part is what makes it succeed.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.wire import Message
from engine.forward.batch import Batch
from engine.forward.sharded import Move


@dataclass(frozen=True, slots=True)
class Join(Message):
    """Where the ranks meet, and the KV slots that each is to have."""

    host: str
    port: int
    slots: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """A rank has its part of the model and waits for steps."""

    device: str  # as ``engine.measures.energy`` knows it


@dataclass(frozen=True, slots=True)
class ShardedStep(Message):
    """What to move in the slots, and what to compute then. Raises ``ValueError`` for what compiled code would not notice."""

    moves: tuple[Move, ...]
    batch: Batch

    def __post_init__(self) -> None:
        batch = self.batch
        total, wanted = len(batch.token_ids), batch.logit_rows
        if len(batch.positions) != total or (len(wanted) and not 0 <= wanted.min() <= wanted.max() < total):
            raise ValueError(f"{total} rows, {len(batch.positions)} positions, logits of rows {wanted.tolist()[:8]}")
        for one in batch.segments:
            if min(one.slot, one.start, one.offset) < 0 or one.rows < 1 or one.offset + one.rows > total:
                raise ValueError(f"rows {one.offset} to {one.offset + one.rows} of {total} for slot {one.slot}")
            if one.before or (one.mask is not None and one.mask.shape != (one.rows, one.rows)):
                raise ValueError(f"a mask that is not of the {one.rows} rows, or rows of another forward")
