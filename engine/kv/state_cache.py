"""States of recurrent layers and short convolutions: one place for each slot, and snapshots from which requests may begin.

Keys and values of a text are there for each of its tokens; a state is there for one position alone, and no way leads back from
it. So a forward advances the state of a slot over committed tokens only, up to the *anchor*, the root of a tree. What it computes
below that leaves the state as it is, and the inputs of these rows are kept: the next forward of the slot advances the state over
those that were accepted, before its own rows. Whoever needs fewer of them, because another rank's walk was the one that counts,
advances over fewer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from decoding.tree import Int32Array

_ALIGNED = 64  # bytes: the state of a layer begins at a multiple of them
_ANYWHERE, _LOST = -1, -2  # positions of a state that says nothing of a text, and of one that a forward left behind
_SNAPSHOTS = 3  # for each slot that there is room for, and as many again
_FIRST = 128  # tokens of a prompt behind which there is a snapshot, and behind twice as many, four times, ...


class StateSite(NamedTuple):
    """A place in a layer that keeps something of the tokens before: a convolution or a rule."""

    state_bytes: int  # of one slot
    row_bytes: int  # of the inputs of one row


class SegmentRows(Protocol):
    """What is told of the rows of a request: see ``engine.forward.batch.Segment``."""

    slot: int
    start: int
    rows: int
    parents: Int32Array | None


@dataclass(slots=True)
class StatePlan:
    """What a forward does with the state of one slot."""

    slot: int
    fresh: bool  # it begins from nothing
    path: Sequence[int]  # rows of the last forward that it advances over first, of those whose inputs are kept
    spine: int  # rows that it advances over then
    saves: list[tuple[int, int]]  # after so many rows of the spine it is copied to a place
    keep: int  # rows behind the spine whose inputs are kept: those of a tree, none of rows that have nothing in common
    known: bool  # it is that of a text


class StateSnapshot(NamedTuple):
    """The state behind a text."""

    scope: str
    tokens: Int32Array


class StateCache:
    """States of ``slots`` sequences, and as many snapshots as there is room for; what was used longest ago gives way.

    A *place* holds the state of all layers after one text. The first places are those of the slots.
    """

    kept_rows = 65  # of a tree, its root included, whose inputs a slot keeps; more when larger trees come

    def __init__(self, sites: Sequence[StateSite], slots: int) -> None:
        """For the sites of a model, in the order in which they are numbered."""
        self.sites, self.slots = tuple(sites), slots
        self._offsets, self.place_bytes = _laid([site.state_bytes for site in sites])
        places = slots + self._snapshots(slots)
        self._places = torch.zeros(places, self.place_bytes, dtype=torch.uint8)
        self._kept = self._room(self.kept_rows)
        self._anchors = [_ANYWHERE] * slots  # the position of each slot's state
        self._paths: list[Sequence[int]] = [()] * slots  # committed rows behind the anchor, of those whose inputs are kept
        self._snapshot: list[StateSnapshot | None] = [None] * (places - slots)
        self._used, self._clock = [0] * (places - slots), itertools.count(1)
        self._wanted: dict[int, list[tuple[int, int, StateSnapshot]]] = {}  # by slot: position, place and text

    @classmethod
    def bytes_of(cls, sites: Sequence[StateSite], slots: int) -> int:
        """Memory that states, snapshots and kept inputs take."""
        places = slots + cls._snapshots(slots)
        rows = sum(site.row_bytes for site in sites)
        return _laid([site.state_bytes for site in sites])[1] * places + rows * slots * cls.kept_rows

    def _room(self, rows: int) -> list[torch.Tensor]:
        """For each site [slots, rows, bytes of a row]; memory that is never written to is never taken."""
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
        """Of a site's state in the first place; the next place is ``place_bytes`` further."""
        return self._places.data_ptr() + self._offsets[site]

    def kept_address(self, site: int) -> int:
        """Of a site's kept inputs, [slots, kept_rows, bytes of a row]."""
        return self._kept[site].data_ptr()

    def state(self, slot: int, site: int) -> torch.Tensor:
        """[bytes] of a site's state of a slot, a copy: for checks."""
        begin = self._offsets[site]
        return self._places[slot, begin : begin + self.sites[site].state_bytes].clone()

    # ---- a forward ------------------------------------------------------------------------------------------------------------

    def begin(self, segments: Sequence[SegmentRows]) -> list[StatePlan]:
        """What a forward is to do; until ``finish`` nobody may count on the states of its slots.

        Raises:
            RuntimeError: a slot's state is not where the rows begin, nor can be brought there.
        """
        plans = []
        for segment in segments:
            slot, anchor = segment.slot, self._anchors[segment.slot]
            spine = segment.rows - (0 if segment.parents is None else len(segment.parents))
            path: Sequence[int] = ()
            if segment.start and anchor != _ANYWHERE:
                path = self._paths[slot][: max(0, segment.start - anchor)]
                if anchor == _LOST or anchor + len(path) != segment.start:
                    raise RuntimeError(
                        f"the state of slot {slot} is at token {anchor}, and rows from {segment.start} on are to be computed"
                    )
            wanted = self._wanted.get(slot, ())
            saves = [(at - segment.start, place) for at, place, _ in wanted if 0 < at - segment.start <= spine]
            keep = segment.rows - spine
            if segment.parents is not None and (segment.parents[1:] < 0).any():
                keep = 0
            if keep > self.kept_rows:
                self._make_room(keep)
            plans.append(StatePlan(slot, segment.start == 0, path, spine, saves, keep, not segment.start or anchor != _ANYWHERE))
        for segment in segments:
            self._anchors[segment.slot] = _LOST
        return plans

    def finish(self, segments: Sequence[SegmentRows], plans: Sequence[StatePlan]) -> None:
        """Says that the forward of ``begin`` was computed."""
        for segment, plan in zip(segments, plans, strict=True):
            slot = segment.slot
            self._anchors[slot] = segment.start + plan.spine if plan.known else _ANYWHERE
            self._paths[slot] = (0,) if plan.keep else ()
            for _, place, snapshot in self._wanted.pop(slot, ()):
                self._snapshot[place - self.slots] = snapshot

    def accept(self, slot: int, rows: Sequence[int]) -> None:
        """Says which rows of the last forward's tree, its root first, are committed; until then it is the root alone."""
        self._paths[slot] = tuple(rows)

    def forget(self, slot: int) -> None:
        """Says that a slot's state is that of no text: it is taken as it is until a text begins there."""
        self._anchors[slot], self._paths[slot] = _ANYWHERE, ()

    def anchor(self, slot: int) -> int:
        """Where the state of a slot is; below 0 where it is that of no text."""
        return self._anchors[slot]

    # ---- snapshots ------------------------------------------------------------------------------------------------------------

    def want(self, slot: int, scope: str | None, tokens: Int32Array, start: int, anchor: int, num_prompt: int) -> None:
        """Has the next forward, which brings a slot's state from ``start`` to ``anchor``, leave snapshots of a prompt behind.

        Args:
            slot: of the request.
            scope: of the request; None keeps nothing.
            tokens: of the request.
            start: where its rows begin.
            anchor: where its state will be.
            num_prompt: tokens of the prompt, of which the last one is always computed.

        Raises:
            RuntimeError: the slot's state is that of no text, and rows behind one are to be computed.
        """
        if start and self._anchors[slot] == _ANYWHERE:
            raise RuntimeError(f"the state of slot {slot} is that of no text, and rows from {start} on are to be computed")
        self._wanted.pop(slot, None)
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
        """Its place, where there is one; it counts as used."""
        for at, held in enumerate(self._snapshot):
            if held is not None and held.scope == snapshot.scope and np.array_equal(held.tokens, snapshot.tokens):
                self._used[at] = next(self._clock)
                return self.slots + at
        return None

    def _take(self) -> int | None:
        """A place for a snapshot: that which was used longest ago, of those that no forward is to write to."""
        busy = {place - self.slots for wanted in self._wanted.values() for _, place, _ in wanted}
        at = min((at for at in range(len(self._snapshot)) if at not in busy), key=self._used.__getitem__, default=None)
        if at is None:
            return None
        self._snapshot[at], self._used[at] = None, next(self._clock)
        return self.slots + at

    def usable(self, slot: int, scope: str, tokens: Int32Array, common: int) -> tuple[int, int]:
        """How many of a request's first ``common`` tokens, which a slot holds, can be built upon, and the place of the state.

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
        """Makes the state of a slot that of a place, which is behind ``length`` tokens."""
        if not length:
            self.forget(slot)
            return
        if place >= self.slots:
            self._used[place - self.slots] = next(self._clock)
        if place != slot:
            self._places[slot] = self._places[place]
        self._anchors[slot], self._paths[slot] = length, ()

    def clear(self) -> None:
        """Forgets all states and snapshots."""
        self._snapshot = [None] * len(self._snapshot)
        self._wanted.clear()
        for slot in range(self.slots):
            self.forget(slot)


def _laid(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where things of some sizes begin, one behind the other, and the bytes of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return offsets, end
