"""Messages between the leader and the ranks that hold parts of one model: msgpack, checked on arrival.

The leader computes a forward while the others do, so nobody answers a step: that all take part is what makes it succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from actors.lookahead.wire import WireError
from engine.forward.batch import Batch, Segment
from engine.forward.sharded import Compaction, Copy, Move

_JOIN, _READY, _FAILED, _STEP = range(4)


@dataclass(frozen=True, slots=True)
class Join:
    """Where the ranks meet, and the KV slots that each is to have."""

    host: str
    port: int
    slots: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has its part of the model and waits for steps."""

    device: str  # as ``engine.measures.energy`` knows it


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank cannot go on, and ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """What to move in the slots, and what to compute then."""

    moves: tuple[Move, ...]
    batch: Batch


ShardMessage = Join | Ready | Failed | ShardedStep


def encode_step(moves: Sequence[Move], batch: Batch) -> bytes:
    """The bytes of a ``ShardedStep``."""
    told = [
        (move.source, move.target, move.length, move.start) if isinstance(move, Copy) else (move.slot, move.start, move.rows)
        for move in moves
    ]
    assert not any(one.before for one in batch.segments), batch.segments  # of forwards in parts, which whole models have
    segments = [
        (one.slot, one.start, one.offset, one.rows, None if one.mask is None else np.packbits(one.mask).tobytes())
        for one in batch.segments
    ]
    arrays = [each.astype(np.int64, copy=False).tobytes() for each in (batch.token_ids, batch.positions, batch.logit_rows)]
    data: bytes = msgpack.packb((_STEP, told, arrays, segments))
    return data


def encode_shard(message: Join | Ready | Failed) -> bytes:
    """The bytes of any other message."""
    match message:
        case Join(host, port, slots, capacity):
            fields: tuple[Any, ...] = (_JOIN, host, port, slots, capacity)
        case Ready(device):
            fields = (_READY, device)
        case Failed(reason):
            fields = (_FAILED, reason)
    data: bytes = msgpack.packb(fields)
    return data


def decode_shard(data: bytes) -> ShardMessage:
    """The message of some bytes.

    Raises:
        WireError: they are none.
    """
    try:
        kind, *fields = msgpack.unpackb(data, use_list=False)
        if kind == _STEP:
            return _step(*fields)
        if kind == _JOIN:
            host, port, slots, capacity = fields
            return Join(str(host), int(port), int(slots), int(capacity))
        if kind == _READY:
            return Ready(str(fields[0]))
        if kind == _FAILED:
            return Failed(str(fields[0]))
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise WireError(f"not a message of a group: {type(error).__name__}: {error}") from None
    raise WireError(f"not a message of a group: kind {kind!r}")


def _step(told: Sequence[Any], arrays: Sequence[bytes], segments: Sequence[Any]) -> ShardedStep:
    moves: list[Move] = []
    for move in told:
        if len(move) == 4:
            moves.append(Copy(*map(int, move)))
        else:
            slot, start, rows = move
            moves.append(Compaction(int(slot), int(start), tuple(map(int, rows))))
    tokens, positions, logit_rows = (np.frombuffer(data, np.int64).copy() for data in arrays)
    parts = tuple(_segment(len(tokens), *one) for one in segments)
    if len(positions) != len(tokens) or (len(logit_rows) and not 0 <= logit_rows.min() <= logit_rows.max() < len(tokens)):
        raise ValueError(f"{len(tokens)} rows, {len(positions)} positions, logits of rows {logit_rows.tolist()[:8]}")
    return ShardedStep(tuple(moves), Batch(tokens, positions, parts, logit_rows, ()))


def _segment(total: int, slot: int, start: int, offset: int, rows: int, packed: bytes | None) -> Segment:
    if min(slot, start, offset) < 0 or rows < 1 or offset + rows > total:
        raise ValueError(f"rows {offset} to {offset + rows} of {total} for slot {slot} behind {start} entries")
    mask = None
    if packed is not None:
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=rows * rows)
        if len(packed) != (rows * rows + 7) // 8:
            raise ValueError(f"a mask of {len(packed)} bytes for {rows} rows")
        mask = bits.astype(np.bool_).reshape(rows, rows)
    return Segment(slot, start, offset, rows, mask)
