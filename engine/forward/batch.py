"""Trees of several requests as the flat arrays of one forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decoding.request import Request
from decoding.tree import BoolArray, DraftTree, Int32Array
from decoding.verify.rules import Rule
from decoding.verify.tree_rows import lay_rows


@dataclass(slots=True)  # not frozen, which would take longer to make: there is one for each request in each step
class Work:
    """What one step computes for one request: committed tokens ``start:end``, and a tree below the last of them.

    ``start`` tokens have their KV in the slot. With a tree, ``end`` is the length of the committed sequence and the root is its
    last token; without one, the chunk ends before the sequence does and nothing is verified. One rule serves decoding (one token
    and its tree), prefill, chunked prefill and recomputation after a preemption.
    """

    request: Request
    start: int
    end: int
    tree: DraftTree | None
    end_tokens: frozenset[int]  # tokens that end the request
    rule: Rule | None = None  # how the tree is verified; None: ``verify_exact``


@dataclass(frozen=True, slots=True)
class Line:
    """A sequence that is no request."""

    slot: int
    tokens: Int32Array  # [n]
    adapter: str | None = None
    reach: int = 0


@dataclass(frozen=True, slots=True)
class LineWork:
    """What is computed of a line, as ``Work`` says it of a request."""

    request: Line
    start: int
    end: int
    tree: DraftTree | None


Span = Work | LineWork


@dataclass(slots=True)  # not frozen, which would take longer to make: there is one for each request in each step
class Segment:
    """The rows of one request in the flat batch."""

    slot: int
    start: int  # KV entries that all rows see
    offset: int  # first row in the batch
    rows: int
    mask: BoolArray | None  # [rows, before + rows] which rows behind ``start`` each sees; None where each sees all before it
    before: tuple[int, ...] = ()  # positions of rows of the tree that an earlier forward computed
    parents: Int32Array | None = None  # of the last rows, which are a tree: see ``DraftTree``; None where all are committed
    adapter: str | None = None  # that computes its rows; None: the model alone
    reach: int = 0  # length of text by which its rows are rotated at least: see ``engine.forward.rope``

    @property
    def end(self) -> int:
        """Entries of the slot behind which nothing is seen or stored."""
        return self.start + len(self.before) + self.rows


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward. Rows of a request lie side by side: committed tokens first, then the tree without its root."""

    token_ids: npt.NDArray[np.int64]  # [rows]
    positions: npt.NDArray[np.int64]  # [rows]
    segments: tuple[Segment, ...]
    logit_rows: npt.NDArray[np.int64]  # [m] rows whose logits are wanted: all of each tree
    logit_starts: tuple[int | None, ...]  # per request, where its tree begins in logit_rows; None without a tree


@dataclass(slots=True)  # not frozen, as above: there is one for each layer in each forward
class AttentionCall:
    """What one layer asks its attention in a forward."""

    layer: int  # its index
    query: torch.Tensor  # [1, heads, rows, head_dim]
    key: torch.Tensor  # [1, kv_heads, rows, head_dim]
    value: torch.Tensor  # [1, kv_heads, rows, value_dim]
    scaling: float | None = None  # of the scores; 1 / sqrt(head_dim) when None
    window: int | None = None  # a row sees only keys less than this many positions before it
    softcap: float | None = None  # scores are bounded by it, ``softcap * tanh(score / softcap)``, before they are masked
    chunk: int | None = None  # a row sees only keys of the chunk of so many positions that it is in
    sinks: torch.Tensor | None = None  # [heads]: of each head the score of one more key, which has no value

    @property
    def within(self) -> tuple[int | None, int | None]:
        """Window and chunk."""
        return self.window, self.chunk

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.query.shape[3] ** -0.5 if self.scaling is None else self.scaling


def pack(works: Sequence[Span]) -> Batch:
    """Flattens the work of one step. Every sequence has a slot and at least one row."""
    if all(work.end - work.start == 1 and work.tree is not None and len(work.tree.tokens) == 1 for work in works):
        return _pack_roots(works)
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


def _pack_roots(works: Sequence[Span]) -> Batch:
    """As ``pack``, where each request has its root alone: plain decoding."""
    segments = []
    for row, work in enumerate(works):
        one = work.request
        assert one.slot is not None and work.start >= 0, (one.slot, work.start)
        assert work.tree is not None, one
        segments.append(Segment(one.slot, work.start, row, 1, None, (), work.tree.parents, one.adapter, one.reach))
    return Batch(
        np.array([work.request.tokens[work.start] for work in works], np.int64),
        np.array([work.start for work in works], np.int64),
        tuple(segments),
        np.arange(len(works)),
        tuple(range(len(works))),
    )


def _segments(works: Sequence[Span], sizes: Sequence[int], chains: Sequence[bool], masks: BoolArray) -> tuple[Segment, ...]:
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
        segments.append(Segment(one.slot, work.start, offset, rows, mask, (), parents, one.adapter, one.reach))
        offset += rows
    return tuple(segments)


def adapters_of(batch: Batch, numbers: Mapping[str, int]) -> npt.NDArray[np.int64] | None:
    """[rows] the number of each row's adapter, -1 for none; None where no row has one."""
    if not numbers or all(segment.adapter is None for segment in batch.segments):
        return None
    found = np.full(len(batch.token_ids), -1, np.int64)
    for segment in batch.segments:
        if segment.adapter is not None:
            found[segment.offset : segment.offset + segment.rows] = numbers[segment.adapter]
    return found


def cut(batch: Batch, rows: int) -> Iterator[tuple[Batch, npt.NDArray[np.int64]]]:
    """Parts of a batch, to be computed in order.

    Example: 100 tokens of a prompt and a tree of 5 rows below them, 64 rows a part: the second part has 36 tokens and the tree,
    and counts the 64 tokens of the first as committed. In parts of 102 rows it has the last three rows of the tree; of the tree's
    first two, which each of them sees or does not, it is told the positions.

    Args:
        batch: that nobody has cut yet.
        rows: the most of a part, at least 1.

    Yields:
        A part, without ``logit_starts``, and for each of its ``logit_rows`` the place in the batch's.
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


def _part(batch: Batch, segment: Segment, first: int, last: int, offset: int) -> Segment:
    """The rows ``first:last`` of the batch, which are of one segment, in a batch that begins at ``offset``."""
    done, end = first - segment.offset, last - segment.offset
    told: dict[str, Any] = {"adapter": segment.adapter, "reach": segment.reach}
    if segment.mask is None:  # each sees all before it: those are as good as committed
        return Segment(segment.slot, segment.start + done, first - offset, end - done, None, **told)
    seen = segment.mask[done:end, :done].all(0)
    common = done if seen.all() else int(seen.argmin())  # rows before, from the first on, that all of these see: a chain
    before = tuple(batch.positions[segment.offset + common : first].tolist())
    mask = np.ascontiguousarray(segment.mask[done:end, common:end])
    return Segment(segment.slot, segment.start + common, first - offset, end - done, mask, before, **told)
