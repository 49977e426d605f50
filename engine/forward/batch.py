"""Scheduled work of a step, and its packing into the flat arrays of one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.decoding.arrays import BoolArray, Int32Array
from outrider.decoding.request import Request
from outrider.decoding.tree import DraftTree, Rule
from outrider.decoding.tree_rows import lay_rows


@dataclass(slots=True)  # not frozen, for speed: one is created per request and step
class ScheduledRequest:
    """Scheduled work of one request in one step: committed tokens ``start:end``, and a draft tree with the last one as root."""

    request: Request
    start: int
    # With a tree the number of committed tokens. Without one (a prefill chunk) it is smaller and nothing is verified.
    end: int
    tree: DraftTree | None
    end_tokens: frozenset[int]  # stop tokens of the request
    rule: Rule | None = None  # verification rule of the tree; None: ``verify_exact``


@dataclass(frozen=True, slots=True)
class DummySequence:
    """Synthetic sequence, used for example by profiling, self-checks and draft models."""

    slot: int
    tokens: Int32Array  # [n]
    adapter: str | None = None
    rope_length: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledDummy:
    """Scheduled work of a ``DummySequence``; same fields as ``ScheduledRequest``."""

    request: DummySequence
    start: int
    end: int
    tree: DraftTree | None


ScheduledSequence = ScheduledRequest | ScheduledDummy


@dataclass(slots=True)  # not frozen, for speed: one is created per request and step
class SequenceRows:
    """Rows of one request in the flat batch."""

    slot: int
    start: int  # KV entries that all rows see
    offset: int  # first row in the batch
    rows: int
    mask: BoolArray | None  # [rows, before + rows] visibility of the entries behind ``start``; None: plain causality
    before: tuple[int, ...] = ()  # positions of this tree's rows that an earlier forward pass computed
    parents: Int32Array | None = None  # of the last rows, which form a tree, see ``DraftTree``; None without a tree
    adapter: str | None = None  # LoRA adapter of the rows; None: base model
    rope_length: int = 0  # least sequence length for length-dependent RoPE, see ``engine.forward.rope``

    @property
    def end(self) -> int:
        """Return the end of the slot entries that this forward pass reads or writes."""
        return self.start + len(self.before) + self.rows


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one forward pass; each request's rows are adjacent, committed tokens first, then the tree without its root."""

    token_ids: npt.NDArray[np.int64]  # [rows]
    positions: npt.NDArray[np.int64]  # [rows]
    segments: tuple[SequenceRows, ...]
    logit_rows: npt.NDArray[np.int64]  # [m] rows whose logits are computed: all rows of each tree
    logit_starts: tuple[int | None, ...]  # per request, index of its tree's first row in logit_rows; None without a tree


@dataclass(slots=True)  # not frozen, for speed: one is created per layer and forward pass
class AttentionCall:
    """Inputs of one layer's attention."""

    layer: int  # layer index
    query: torch.Tensor  # [1, heads, rows, head_dim]
    key: torch.Tensor  # [1, kv_heads, rows, head_dim]
    value: torch.Tensor  # [1, kv_heads, rows, value_dim]
    scaling: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    window: int | None = None  # a row sees only keys less than this many positions before it
    softcap: float | None = None  # bound of the scores before masking, ``softcap * tanh(score / softcap)``
    chunk: int | None = None  # a row sees only keys in its own chunk of this many positions
    sinks: torch.Tensor | None = None  # [heads] attention sinks: the score of one extra key per head that has no value

    @property
    def within(self) -> tuple[int | None, int | None]:
        """Return window and chunk."""
        return self.window, self.chunk

    @property
    def scale(self) -> float:
        """Return the scaling of the scores."""
        return self.query.shape[3] ** -0.5 if self.scaling is None else self.scaling


def pack(works: Sequence[ScheduledSequence]) -> Batch:
    """Flatten the work of one step; every sequence has a slot and at least one row."""
    if all(work.end - work.start == 1 and work.tree is not None and len(work.tree.tokens) == 1 for work in works):
        return _pack_roots(works)  # plain decoding
    tokens: list[npt.NDArray[np.int32]] = []
    parents: list[npt.NDArray[np.int32]] = []
    sizes: list[int] = []
    logit_starts: list[int | None] = []
    rows = wanted = cells = 0
    for work in works:
        request, tree = work.request, work.tree
        assert request.slot is not None and 0 <= work.start < work.end, (request.slot, work.start, work.end)
        tokens.append(request.tokens[work.start : work.end])
        size = 0 if tree is None else len(tree.tokens)
        sizes.append(size)
        logit_starts.append(None if tree is None else wanted)
        rows += work.end - work.start
        wanted += size
        if tree is not None:
            parents.append(tree.parents)
            if size > 1:
                tokens.append(tree.tokens[1:])
                rows += size - 1
                cells += (work.end - work.start + size - 1) ** 2
    positions, logit_rows = np.empty(rows, np.int64), np.empty(wanted, np.int64)
    chains, masks = np.empty(len(works), np.bool_), np.empty(cells, np.int8)
    starts, ends = np.array([work.start for work in works], np.int64), np.array([work.end for work in works], np.int64)
    forest = np.concatenate(parents, dtype=np.int32) if parents else np.zeros(0, np.int32)
    lay_rows(forest, np.array(sizes, np.int64), starts, ends, positions, logit_rows, chains, masks)
    segments = _segments(works, sizes, chains.tolist(), masks.view(np.bool_))
    return Batch(np.concatenate(tokens, dtype=np.int64), positions, segments, logit_rows, tuple(logit_starts))


def _pack_roots(works: Sequence[ScheduledSequence]) -> Batch:
    segments = []
    for row, work in enumerate(works):
        one = work.request
        assert one.slot is not None and work.start >= 0, (one.slot, work.start)
        assert work.tree is not None, one
        segments.append(SequenceRows(one.slot, work.start, row, 1, None, (), work.tree.parents, one.adapter, one.rope_length))
    return Batch(
        np.array([work.request.tokens[work.start] for work in works], np.int64),
        np.array([work.start for work in works], np.int64),
        tuple(segments),
        np.arange(len(works)),
        tuple(range(len(works))),
    )


def _segments(
    works: Sequence[ScheduledSequence], sizes: Sequence[int], chains: Sequence[bool], masks: BoolArray
) -> tuple[SequenceRows, ...]:
    segments = []
    offset = cell = 0
    for work, size, chain in zip(works, sizes, chains, strict=True):
        rows, mask = work.end - work.start, None
        if size > 1:
            rows += size - 1
            if not chain:
                mask = masks[cell : cell + rows * rows].reshape(rows, rows)
            cell += rows * rows
        one, parents = work.request, None if work.tree is None else work.tree.parents
        assert one.slot is not None
        segments.append(SequenceRows(one.slot, work.start, offset, rows, mask, (), parents, one.adapter, one.rope_length))
        offset += rows
    return tuple(segments)


def adapters_of(batch: Batch, numbers: Mapping[str, int]) -> npt.NDArray[np.int64] | None:
    """Return the adapter number of each row, [rows], -1 for none; None if no row has an adapter."""
    if not numbers or all(segment.adapter is None for segment in batch.segments):
        return None
    found = np.full(len(batch.token_ids), -1, np.int64)
    for segment in batch.segments:
        if segment.adapter is not None:
            found[segment.offset : segment.offset + segment.rows] = numbers[segment.adapter]
    return found


def cut(batch: Batch, rows: int) -> Iterator[tuple[Batch, npt.NDArray[np.int64]]]:
    """Split a batch into parts of at most ``rows`` rows, to be computed in order.

    Example: 100 tokens of a prompt and a tree of 5 rows below them, 64 rows a part: the second part has 36 tokens and the tree,
    and treats the 64 tokens of the first part as committed. With 102 rows a part, the second part has the last three rows of the
    tree; its ``before`` holds the positions of the tree's first two rows, which each of its rows may or may not see.

    Yields:
        A part without ``logit_starts``, and the indices of its ``logit_rows`` in the batch's.
    """
    assert rows >= 1 and not any(segment.before for segment in batch.segments), (rows, batch.segments)
    for first in range(0, len(batch.token_ids), rows):
        last = min(first + rows, len(batch.token_ids))
        wanted = np.flatnonzero((batch.logit_rows >= first) & (batch.logit_rows < last))
        segments = tuple(
            _part(batch, segment, max(first, segment.offset), min(last, segment.offset + segment.rows), first)
            for segment in batch.segments
            if segment.offset < last and first < segment.offset + segment.rows
        )
        part = slice(first, last)
        yield Batch(batch.token_ids[part], batch.positions[part], segments, batch.logit_rows[wanted] - first, ()), wanted


def _part(batch: Batch, segment: SequenceRows, first: int, last: int, offset: int) -> SequenceRows:
    """Return rows ``first:last`` of the batch, all of one segment, for a part that starts at ``offset``."""
    done, end = first - segment.offset, last - segment.offset
    shared: dict[str, Any] = {"adapter": segment.adapter, "rope_length": segment.rope_length}
    if segment.mask is None:  # plain causality: earlier rows count as committed
        return SequenceRows(segment.slot, segment.start + done, first - offset, end - done, None, **shared)
    seen = segment.mask[done:end, :done].all(0)
    common = done if seen.all() else int(seen.argmin())  # leading earlier rows that all rows of this part see
    before = tuple(batch.positions[segment.offset + common : first].tolist())
    mask = np.ascontiguousarray(segment.mask[done:end, common:end])
    return SequenceRows(segment.slot, segment.start + common, first - offset, end - done, mask, before, **shared)
