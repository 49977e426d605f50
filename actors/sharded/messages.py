"""Messages between the leader and the ranks that hold parts of one model."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.actors.wire import Message
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.sharded import Move


@dataclass(frozen=True, slots=True)
class JoinMessage(Message):
    """Address of the process group, and the KV slots of each rank."""

    host: str
    port: int
    slots: int
    capacity: int


@dataclass(frozen=True, slots=True)
class ReadyMessage(Message):
    """Report that a rank has its part of the model and waits for steps."""

    device: str  # as ``engine.measures.energy`` names it


@dataclass(frozen=True, slots=True)
class DoneMessage(Message):
    """Report that an emulated device has computed a step, see ``EmulatedClock.join``."""

    ended_s: float  # by the wall clock of this machine
    hidden_s: float  # wall seconds of the step that dilation hid


@dataclass(frozen=True, slots=True)
class ShardedStep(Message):
    """KV slot moves, and the batch to compute afterwards. Raises ``ValueError`` for invalid rows, slots or masks."""

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
