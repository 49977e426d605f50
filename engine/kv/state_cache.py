"""States of recurrent layers and short convolutions: one per slot, and snapshots from which requests may start.

A state cannot be rewound. So a forward advances the state of a slot over committed tokens only, up to the *anchor*, the root of
the draft tree. The inputs of the rows below are kept: the next forward first advances the state over those that were accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from outrider.decoding.arrays import Int32Array

_ALIGNED = 64  # bytes; alignment of the state of a layer
_ANYWHERE, _LOST = -1, -2  # positions: state of no text; state of an unfinished forward
_SNAPSHOTS = 3  # snapshots per slot, plus the same number once
_FIRST = 128  # tokens of a prompt before its first snapshot; then twice as many, four times, ...


class StateSite(NamedTuple):
    """Module of a layer with a state: a convolution or a recurrent rule."""

    state_bytes: int  # bytes of the state of one slot
    row_bytes: int  # bytes of the inputs of one row


class SegmentRows(Protocol):
    """Rows of a request: see ``engine.forward.batch.SequenceRows``."""

    slot: int
    start: int
    rows: int
    parents: Int32Array | None


@dataclass(slots=True)
class StatePlan:
    """Operations of a forward on the state of one slot."""

    slot: int
    fresh: bool  # starts from the zero state
    path: Sequence[int]  # kept rows of the last forward to advance over first
    spine: int  # committed rows to advance over next
    saves: list[tuple[int, int]]  # (rows of the spine, place to copy the state to)
    keep: int  # rows of the tree, whose inputs are kept; 0 if the tree has several roots
    known: bool  # whether the state belongs to a text


class StateSnapshot(NamedTuple):
    """Scope and tokens of a stored state."""

    scope: str
    tokens: Int32Array


class StateCache:
    """States of ``slots`` sequences, and snapshots with least-recently-used eviction, each in a *place*; slots come first."""

    kept_rows = 65  # rows per slot whose inputs are kept, with the root; grows with larger trees

    def __init__(self, sites: Sequence[StateSite], slots: int) -> None:
        self.sites, self.slots = tuple(sites), slots
        self._offsets, self.place_bytes = _laid([site.state_bytes for site in sites])
        places = slots + self._snapshots(slots)
        self._places = torch.zeros(places, self.place_bytes, dtype=torch.uint8)
        self._kept = self._room(self.kept_rows)
        self._anchors = [_ANYWHERE] * slots  # position of each slot's state
        self._paths: list[Sequence[int]] = [()] * slots  # committed rows behind the anchor, among the kept ones
        self._snapshot: list[StateSnapshot | None] = [None] * (places - slots)
        self._used, self._clock = [0] * (places - slots), itertools.count(1)
        self._wanted: dict[int, list[tuple[int, int, StateSnapshot]]] = {}  # by slot: position, place and text

    @classmethod
    def bytes_of(cls, sites: Sequence[StateSite], slots: int) -> int:
        """Return the bytes of states, snapshots and kept inputs."""
        places = slots + cls._snapshots(slots)
        rows = sum(site.row_bytes for site in sites)
        return _laid([site.state_bytes for site in sites])[1] * places + rows * slots * cls.kept_rows

    def _room(self, rows: int) -> list[torch.Tensor]:
        # Memory is committed only when it is written.
        return [torch.empty(self.slots, rows, site.row_bytes, dtype=torch.uint8) for site in self.sites]

    def _make_room(self, rows: int) -> None:
        kept, self.kept_rows = self._kept, 2 * rows
        self._kept = self._room(self.kept_rows)
        for new, old in zip(self._kept, kept, strict=True):
            new[:, : old.shape[1]] = old

    @staticmethod
    def _snapshots(slots: int) -> int:
        return _SNAPSHOTS * (slots + 1)

    def address(self, site: int) -> int:
        """Return the address of a site's state in the first place; the next place is ``place_bytes`` further."""
        return self._places.data_ptr() + self._offsets[site]

    def kept_address(self, site: int) -> int:
        """Return the address of a site's kept inputs, [slots, kept_rows, bytes of a row]."""
        return self._kept[site].data_ptr()

    def state(self, slot: int, site: int) -> torch.Tensor:
        """Copy the state of a slot and site, [bytes]; for checks."""
        begin = self._offsets[site]
        return self._places[slot, begin : begin + self.sites[site].state_bytes].clone()

    # ---- a forward ------------------------------------------------------------------------------------------------------------

    def begin(self, segments: Sequence[SegmentRows]) -> list[StatePlan]:
        """Plan a forward; its slots' states are invalid until ``finish``. Raises ``RuntimeError`` for an unreachable row."""
        plans = []
        for segment in segments:
            slot, anchor = segment.slot, self._anchors[segment.slot]
            spine = segment.rows - (0 if segment.parents is None else len(segment.parents))
            path: Sequence[int] = ()
            if segment.start and anchor != _ANYWHERE:
                # The path is cut if this rank accepted more rows than the rank whose verification counted.
                path = self._paths[slot][: max(0, segment.start - anchor)]
                if anchor == _LOST or anchor + len(path) != segment.start:
                    raise RuntimeError(
                        f"the state of slot {slot} is at token {anchor}, but a step computes rows from {segment.start} on"
                    )
            wanted = self._wanted.get(slot, ())
            saves = [(at - segment.start, place) for at, place, _ in wanted if 0 < at - segment.start <= spine]
            keep = segment.rows - spine
            # Rows with several roots are no draft tree: none of them is accepted.
            if segment.parents is not None and (segment.parents[1:] < 0).any():
                keep = 0
            if keep > self.kept_rows:
                self._make_room(keep)
            plans.append(StatePlan(slot, segment.start == 0, path, spine, saves, keep, not segment.start or anchor != _ANYWHERE))
        # A forward that fails leaves its states somewhere between two positions.
        for segment in segments:
            self._anchors[segment.slot] = _LOST
        return plans

    def finish(self, segments: Sequence[SegmentRows], plans: Sequence[StatePlan]) -> None:
        """Record that the forward of ``begin`` was computed."""
        for segment, plan in zip(segments, plans, strict=True):
            slot = segment.slot
            self._anchors[slot] = segment.start + plan.spine if plan.known else _ANYWHERE
            self._paths[slot] = (0,) if plan.keep else ()
            for _, place, snapshot in self._wanted.pop(slot, ()):
                self._snapshot[place - self.slots] = snapshot

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        """Set the committed rows of the last forward's tree, its root first; before the call it is the root alone."""
        self._paths[slot] = tuple(rows)

    def forget(self, slot: int) -> None:
        """Mark the state of a slot as belonging to no text; it is used unchecked until a text begins there."""
        self._anchors[slot], self._paths[slot] = _ANYWHERE, ()

    def anchor(self, slot: int) -> int:
        """Return the position of a slot's state; negative if it belongs to no text."""
        return self._anchors[slot]

    # ---- snapshots ------------------------------------------------------------------------------------------------------------

    def request_snapshot(
        self, slot: int, scope: str | None, tokens: Int32Array, start: int, anchor: int, num_prompt: int
    ) -> None:
        """Request snapshots of a prompt from the next forward, to ``anchor``. Raises ``RuntimeError`` without a state."""
        if start and self._anchors[slot] == _ANYWHERE:
            raise RuntimeError(f"slot {slot} holds no state, but a step computes rows from {start} on")
        self._wanted.pop(slot, None)
        # Nothing is stored without a scope.
        if scope is None or anchor <= start or start >= num_prompt:
            return
        doubling = itertools.takewhile(lambda at: at <= anchor, (_FIRST << power for power in itertools.count()))
        found = []
        for at in sorted({*doubling, num_prompt - 1}):
            if not start < at <= min(anchor, num_prompt - 1):
                continue
            snapshot = StateSnapshot(scope, tokens[:at].copy())
            if self._find(snapshot) is None:
                place = self._take()
                if place is not None:
                    found.append((at, place, snapshot))
        if found:
            self._wanted[slot] = found

    def _find(self, snapshot: StateSnapshot) -> int | None:
        for at, held in enumerate(self._snapshot):
            if held is not None and held.scope == snapshot.scope and np.array_equal(held.tokens, snapshot.tokens):
                self._used[at] = next(self._clock)
                return self.slots + at
        return None

    def _take(self) -> int | None:
        """Evict the least recently used snapshot that no forward will write to, and return its place."""
        busy = {place - self.slots for wanted in self._wanted.values() for _, place, _ in wanted}
        at = min((at for at in range(len(self._snapshot)) if at not in busy), key=self._used.__getitem__, default=None)
        if at is None:
            return None
        self._snapshot[at], self._used[at] = None, next(self._clock)
        return self.slots + at

    def usable(self, slot: int, scope: str, tokens: Int32Array, common: int) -> tuple[int, int]:
        """Return how many of a slot's first ``common`` tokens a request can reuse, and the place of the state behind them.

        Example: a slot holds 300 tokens of a request's text, and there are snapshots behind 128 and 256 of them: 256.
        """
        anchor = self._anchors[slot]
        best, place = (anchor, slot) if 0 < anchor <= common else (0, slot)
        for at, held in enumerate(self._snapshot):
            if held is None or held.scope != scope or not best < len(held.tokens) <= common:
                continue
            if np.array_equal(held.tokens, tokens[: len(held.tokens)]):
                best, place = len(held.tokens), self.slots + at
        return best, place

    def restore(self, slot: int, place: int, length: int) -> None:
        """Set the state of a slot to that of a place, which is behind ``length`` tokens."""
        if not length:
            self.forget(slot)
            return
        if place >= self.slots:
            self._used[place - self.slots] = next(self._clock)
        if place != slot:
            self._places[slot] = self._places[place]
        self._anchors[slot], self._paths[slot] = length, ()

    def clear(self) -> None:
        """Forget all states and snapshots."""
        self._snapshot = [None] * len(self._snapshot)
        self._wanted.clear()
        for slot in range(self.slots):
            self.forget(slot)


def _laid(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the aligned offsets of consecutive items and their total size in bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return offsets, end
