"""Packed trees against a walk row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.request import Request, SamplingParams
from outrider.engine.forward.batch import ScheduledRequest, pack
from tests.helpers.models import tree_of
from tests.helpers.targets import is_chain


@st.composite
def works(draw: st.DrawFn) -> list[ScheduledRequest]:
    """Requests that decode, with and without drafts, that prefill, and that lag behind."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(0, 99), min_size=2, max_size=9))
        request = Request(str(number), prompt, SamplingParams())
        request.slot = draw(st.integers(0, 20))
        start = draw(st.integers(0, len(prompt) - 1)) if draw(st.booleans()) else len(prompt) - 1
        if draw(st.booleans()):
            rows = draw(st.integers(1, 7))
            parents = [-1] + [draw(st.integers(max(0, i - 2), i - 1)) for i in range(1, rows)]
            tokens = [prompt[-1], *draw(st.lists(st.integers(0, 99), min_size=rows - 1, max_size=rows - 1))]
            found.append(ScheduledRequest(request, start, len(prompt), tree_of(tokens, parents), frozenset()))
        else:
            found.append(ScheduledRequest(request, start, draw(st.integers(start + 1, len(prompt))), None, frozenset()))
    return found


@given(works())
def test_rows_stand_where_a_walk_puts_them(step: list[ScheduledRequest]) -> None:
    batch = pack(step)
    tokens: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for work, segment, logit_start in zip(step, batch.segments, batch.logit_starts, strict=True):
        offset, spine = len(tokens), work.end - work.start
        tokens += work.request.tokens[work.start : work.end].tolist()
        positions += range(work.start, work.end)
        tree, sees = work.tree, [list(range(row + 1)) for row in range(spine)]
        assert (logit_start is None) == (tree is None)
        if tree is not None:
            assert logit_start == len(logit_rows)
            logit_rows += range(offset + spine - 1, offset + spine - 1 + len(tree))
            tokens += tree.tokens[1:].tolist()
            positions += (work.end - 1 + tree.depths()[1:]).tolist()
            for row in range(1, len(tree)):
                sees.append([*range(spine), *(spine - 1 + above for above in tree.path(row))])
        assert (segment.slot, segment.start, segment.offset, segment.rows) == (work.request.slot, work.start, offset, len(sees))
        if segment.mask is None:
            assert sees == [list(range(row + 1)) for row in range(len(sees))]
        else:
            assert tree is not None and not is_chain(tree) and segment.mask.dtype == np.bool_
            assert [np.flatnonzero(line).tolist() for line in segment.mask] == sees
    assert batch.token_ids.tolist() == tokens and batch.token_ids.dtype == np.int64
    assert batch.positions.tolist() == positions and batch.positions.dtype == np.int64
    assert batch.logit_rows.tolist() == logit_rows and batch.logit_rows.dtype == np.int64
