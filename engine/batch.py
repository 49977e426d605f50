"""Trees of several requests as the flat arrays of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decoding.request import Request
from decoding.tree import BoolArray, DraftTree


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one request in the flat batch."""

    slot: int
    start: int  # KV entries that all rows see
    offset: int  # first row in the batch
    rows: int
    mask: BoolArray | None  # [rows, rows] which new rows see each other; None where each sees all before it


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward. Rows of a request lie side by side: committed tokens first, then the tree without its root."""

    token_ids: npt.NDArray[np.int64]  # [rows]
    positions: npt.NDArray[np.int64]  # [rows]
    segments: tuple[Segment, ...]
    logit_rows: npt.NDArray[np.int64]  # [m] rows whose logits are wanted: all of each tree
    logit_starts: tuple[int | None, ...]  # per request, where its tree begins in logit_rows; None without a tree


def pack(works: Sequence[Work]) -> Batch:
    """Flattens the work of one step. Every request has a slot and at least one row."""
    tokens: list[npt.NDArray[np.int32]] = []
    positions: list[npt.NDArray[np.int64]] = []
    segments: list[Segment] = []
    logit_rows: list[npt.NDArray[np.int64]] = []
    logit_starts: list[int | None] = []
    offset = wanted = 0
    for work in works:
        slot = work.request.slot
        assert slot is not None and 0 <= work.start < work.end, (slot, work.start, work.end)
        spine = work.end - work.start
        rows, mask = spine, None
        tokens.append(work.request.tokens[work.start : work.end])
        positions.append(np.arange(work.start, work.end))
        if work.tree is None:
            logit_starts.append(None)
        else:
            rows += len(work.tree) - 1
            tokens.append(work.tree.tokens[1:])
            positions.append(work.end - 1 + work.tree.depths()[1:].astype(np.int64))
            mask = None if work.tree.is_chain else _below_spine(work.tree, spine)
            logit_starts.append(wanted)
            root = offset + spine - 1
            logit_rows.append(np.arange(root, root + len(work.tree)))
            wanted += len(work.tree)
        segments.append(Segment(slot, work.start, offset, rows, mask))
        offset += rows
    return Batch(
        np.concatenate(tokens).astype(np.int64),
        np.concatenate(positions),
        tuple(segments),
        np.concatenate(logit_rows) if logit_rows else np.zeros(0, np.int64),
        tuple(logit_starts),
    )


def _below_spine(tree: DraftTree, spine: int) -> BoolArray:
    """[rows, rows]: a causal spine whose last row is the root, and the tree below it, which sees the whole spine."""
    rows = spine - 1 + len(tree)
    mask = np.zeros((rows, rows), np.bool_)
    mask[:spine, :spine] = np.tri(spine, dtype=np.bool_)
    mask[spine:, :spine] = True
    mask[spine - 1 :, spine - 1 :] = tree.ancestor_mask()
    return mask
