"""One batch as several forwards of a few rows each: what a row sees of its own batch is then in the slot already."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from engine.forward.batch import Batch, Segment


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
    if segment.mask is None:  # each sees all before it: those are as good as committed
        return Segment(segment.slot, segment.start + done, first - offset, end - done, None)
    seen = segment.mask[done:end, :done].all(0)
    common = done if seen.all() else int(seen.argmin())  # rows before, from the first on, that all of these see: a chain
    before = tuple(batch.positions[segment.offset + common : first].tolist())
    mask = np.ascontiguousarray(segment.mask[done:end, common:end])
    return Segment(segment.slot, segment.start + common, first - offset, end - done, mask, before)
