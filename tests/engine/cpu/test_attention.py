"""Compiled attention against attention written out in float64, every bit of it in other company, and through whole models."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from outrider.decoding.jit import NATIVE
from outrider.engine.cpu.attention import RowAttention, RowStep, laid_out
from outrider.engine.forward.batch import AttentionCall, SequenceRows
from outrider.engine.kv.kv_cache import KVShape, SlotCache
from tests.helpers.attention_reference import reference_attention, tree_mask
from tests.helpers.models import COMPILED

CAPACITY, SLOTS, LAYERS = 150, 4, 2
# Entries before the rows, and rows: full blocks of sixteen keys and rests, blocks of sixteen rows and rests, an empty slot.
REQUESTS = ((16, 1), (93, 1), (0, 5), (40, 37))
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of one rounding; in 16 bits of two
needs_numba = pytest.mark.skipif(not NATIVE, reason="numba is not installed")


def slots(layers: int, kv_heads: int, size: int, dtype: torch.dtype, number: int, capacity: int = CAPACITY) -> SlotCache:
    return SlotCache(laid_out(KVShape(layers, kv_heads, size, dtype, torch.device("cpu"))), number, capacity)


def filled(layers: int, kv_heads: int, size: int, dtype: torch.dtype, number: int) -> SlotCache:
    """Slots with random entries."""
    cache = slots(layers, kv_heads, size, dtype, number)
    for layer in range(layers):
        for slot in range(number):
            cache.write(layer, slot, 0, *torch.randn(2, kv_heads, CAPACITY, size).to(dtype))
    return cache


def all_entries(cache: SlotCache) -> tuple[torch.Tensor, torch.Tensor]:
    """[layers, slots, kv_heads, capacity, head_dim] each."""
    keys, values = zip(*(cache.entries(slot, CAPACITY) for slot in range(cache.slots)), strict=True)
    return torch.stack(keys, 1), torch.stack(values, 1)


class Case:
    """A cache with random entries, and a step of ``REQUESTS``; every other one has a tree."""

    def __init__(self, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> None:
        torch.manual_seed(1)
        rng = np.random.default_rng(1)
        self.cache = filled(LAYERS, kv_heads, size, dtype, SLOTS)
        self.segments, positions, offset = [], [], 0
        for number, (start, rows) in enumerate(REQUESTS):
            mask = tree_mask(rng, rows) if number % 2 and rows > 1 else None
            self.segments.append(SequenceRows((number * 3 + 1) % SLOTS, start, offset, rows, mask))
            depths = np.arange(rows) if mask is None else mask.sum(1) - 1
            positions += (start + depths).tolist()
            offset += rows
        self.positions = torch.tensor(positions)
        # As models hand them over: heads between rows.
        self.query = torch.randn(1, offset, heads, size).to(dtype).transpose(1, 2)
        self.key, self.value = (torch.randn(1, offset, kv_heads, size).to(dtype).transpose(1, 2) for _ in range(2))

    def attend(self, segments: list[SequenceRows], layer: int, window: int | None, softcap: float | None = None) -> torch.Tensor:
        """[rows, heads, head_dim] by compiled code, of which those of other segments have no meaning."""
        attention = RowAttention.over(self.cache)
        call = AttentionCall(layer, self.query, self.key, self.value, 0.3, window, softcap)
        assert attention is not None and attention.fits(call)
        output = RowStep(attention, segments, self.positions).attend(call)
        assert output.shape == (1, self.query.shape[2], self.query.shape[1], self.query.shape[3])
        return output[0]

    def expected(
        self,
        segment: SequenceRows,
        layer: int,
        window: int | None,
        softcap: float | None,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """[rows, heads, head_dim] of one request in float64, from the entries before the step."""
        rows = slice(segment.offset, segment.offset + segment.rows)
        old = (each[layer, segment.slot, :, : segment.start, : self.key.shape[3]] for each in (keys, values))
        all_of_it = (torch.cat([before, new[0, :, rows]], 1) for before, new in zip(old, (self.key, self.value), strict=True))
        mask = torch.ones(segment.rows, segment.rows).tril().bool() if segment.mask is None else torch.from_numpy(segment.mask)
        visible = torch.cat([torch.ones(segment.rows, segment.start, dtype=torch.bool), mask], 1)
        if window is not None:
            at = torch.cat([torch.arange(segment.start), self.positions[rows]])
            visible &= self.positions[rows][:, None] - at[None] < window
        return reference_attention(self.query[0, :, rows], *all_of_it, visible, 0.3, softcap)


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (3, 3, 16), (4, 1, 80), (2, 2, 128), (4, 2, 12), (2, 1, 72)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (45, 1.5), (None, 0.1)])
def test_it_is_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, window: int | None, softcap: float | None
) -> None:
    case = Case(dtype, heads, kv_heads, size)
    keys, values = all_entries(case.cache)
    output = case.attend(case.segments, 1, window, softcap)
    for segment in case.segments:
        rows = slice(segment.offset, segment.offset + segment.rows)
        expected = case.expected(segment, 1, window, softcap, keys, values)
        # In float32 scores are added up number by number, each sum rounded; 16 bits are rounded once, at the end.
        error = UNIT[dtype] * (size if dtype == torch.float32 else 1)
        assert torch.allclose(output[rows].double(), expected, atol=error, rtol=error), segment
        end = segment.start + segment.rows
        keys[1, segment.slot, :, segment.start : end, :size] = case.key[0, :, rows]
        values[1, segment.slot, :, segment.start : end, :size] = case.value[0, :, rows]
    # These entries and no others; behind an entry's numbers there are zeros.
    assert all(torch.equal(*pair) for pair in zip(all_entries(case.cache), (keys, values), strict=True))
    assert not case.cache._values[..., size:].any() and not case.cache._in_panels.contiguous().view(dtype)[..., size:].any()


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize(("size", "window", "softcap"), [(64, None, None), (12, 20, 2.0)])
def test_a_row_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, size: int, window: int | None, softcap: float | None, threads: None
) -> None:
    torch.set_num_threads(2)
    together = Case(dtype, 4, 2, size).attend(Case(dtype, 4, 2, size).segments, 0, window, softcap)
    torch.set_num_threads(1)
    for number in range(len(REQUESTS)):
        case = Case(dtype, 4, 2, size)
        segment = case.segments[number]
        alone = case.attend([segment], 0, window, softcap)
        rows = slice(segment.offset, segment.offset + segment.rows)
        assert torch.equal(alone[rows], together[rows]), segment


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize("window", [None, 50])
def test_a_prompt_at_once_and_in_pieces_has_the_same_bits(dtype: torch.dtype, window: int | None, threads: None) -> None:
    """Threads share the blocks of a long one; pieces of other sizes begin at other places, beside others or alone."""
    torch.manual_seed(2)
    length = 331
    query, key, value = (torch.randn(1, heads, length, 32).to(dtype) for heads in (4, 2, 2))
    found = []
    for cuts in ((), (1,), (160,), (16, 17, 150, 330), tuple(range(1, length))):
        attention = RowAttention.over(slots(1, 2, 32, dtype, 2, length))
        assert attention is not None
        bounds, outputs = (0, *cuts, length), []
        for start, end in pairwise(bounds):
            rows = [each[:, :, start:end] for each in (query, key, value)]
            step = RowStep(attention, [SequenceRows(1, start, 0, end - start, None)], torch.arange(start, end))
            outputs.append(step.attend(AttentionCall(0, *rows, window=window)))
        found.append(torch.cat(outputs, 1))
    assert all(torch.equal(output, found[0]) for output in found)


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (None, 32), (9, 20), (50, None)])
@pytest.mark.parametrize("sunk", [False, True])
def test_sinks_chunks_and_layers_with_less_than_a_slot_has_room_for(
    dtype: torch.dtype, window: int | None, chunk: int | None, sunk: bool
) -> None:
    """Slots have room for three KV heads of 24 and 40 numbers; the layer has two, of 20 and 12."""
    torch.manual_seed(4)
    length, heads, kv_heads, size, value_size = 83, 4, 2, 20, 12
    shape = KVShape(2, 3, 24, dtype, torch.device("cpu"), value_dim=40, ragged=True)
    query, key = (torch.randn(1, number, length, size).to(dtype) for number in (heads, kv_heads))
    value, sinks = torch.randn(1, kv_heads, length, value_size).to(dtype), torch.randn(heads).to(dtype) * 3 if sunk else None
    found = []
    for cuts in ((), (1, 40), tuple(range(1, length))):
        attention, outputs = RowAttention.over(SlotCache(laid_out(shape), 2, length)), []
        assert attention is not None
        for start, end in pairwise((0, *cuts, length)):
            rows = [each[:, :, start:end] for each in (query, key, value)]
            call = AttentionCall(1, *rows, scaling=0.3, window=window, chunk=chunk, sinks=sinks)
            assert attention.fits(call)
            outputs.append(
                RowStep(attention, [SequenceRows(1, start, 0, end - start, None)], torch.arange(start, end)).attend(call)
            )
        found.append(torch.cat(outputs, 1)[0])
        kept = attention.cache.entries(1, length)
        for entries, given in zip(kept, (key, value), strict=True):
            assert torch.equal(entries[1, :kv_heads, :, : given.shape[3]], given[0])
            assert not entries[0].any() and not entries[1, kv_heads:].any() and not entries[..., given.shape[3] :].any()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    at = torch.arange(length)
    visible = at[:, None] >= at
    if window is not None:
        visible &= at[:, None] - at < window
    if chunk is not None:
        visible &= at[:, None] // chunk == at // chunk
    scores = torch.matmul(query[0].double(), key[0].double().repeat_interleave(heads // kv_heads, 0).mT) * 0.3
    columns = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        columns = torch.cat([columns, sinks.double()[:, None, None].expand(-1, length, 1)], -1)
    weights = columns.softmax(-1)[..., :length]
    expected = torch.matmul(weights, value[0].double().repeat_interleave(heads // kv_heads, 0)).transpose(0, 1)
    error = UNIT[dtype] * (size if dtype == torch.float32 else 2)
    assert torch.allclose(found[0].double(), expected, atol=error, rtol=error)


@pytest.mark.parametrize("dtype", COMPILED)
def test_trees_of_many_requests_have_the_bits_of_their_paths(dtype: torch.dtype, threads: None) -> None:
    """Each row of each tree against its own path in a slot of its own, row behind row."""
    rng, requests, size, context = np.random.default_rng(3), 9, 16, (0, 1, 15, 16, 40, 63, 64, 90, 100)
    masks = [tree_mask(rng, int(rows)) for rows in rng.integers(2, 33, requests)]
    total = sum(map(len, masks))
    cache = filled(1, 2, size, dtype, requests + 1)
    attention = RowAttention.over(cache)
    assert attention is not None
    query, key, value = (torch.randn(1, heads, total, size).to(dtype) for heads in (6, 2, 2))
    offsets = np.cumsum([0, *map(len, masks)])
    positions = torch.from_numpy(np.concatenate([start + mask.sum(1) - 1 for start, mask in zip(context, masks, strict=True)]))
    segments = [SequenceRows(at, context[at], int(offsets[at]), len(mask), mask) for at, mask in enumerate(masks)]
    together = RowStep(attention, segments, positions).attend(AttentionCall(0, query, key, value, window=33))
    for segment, mask in zip(segments, masks, strict=True):
        for row in range(0, segment.rows, 5):
            cache.copy(segment.slot, requests, segment.start)
            path = segment.offset + mask[row].nonzero()[0]
            step = RowStep(attention, [SequenceRows(requests, segment.start, 0, len(path), None)], positions[path])
            alone = step.attend(AttentionCall(0, query[:, :, path], key[:, :, path], value[:, :, path], window=33))
            assert torch.equal(alone[0, -1], together[0, path[-1]]), (segment, row)


@needs_numba
def test_inputs_that_are_not_laid_out_by_head() -> None:
    case = Case(torch.float32, 4, 2, 32)
    expected = case.attend(case.segments, 0, None)
    turned = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (case.query, case.key, case.value)]
    assert turned[0].stride(-1) != 1
    case.query, case.key, case.value = turned
    assert torch.equal(case.attend(case.segments, 0, None), expected)


@needs_numba
def test_what_it_takes() -> None:
    assert RowAttention.over(slots(1, 2, 16, torch.float64, 1)) is None
    attention = RowAttention.over(slots(1, 2, 32, torch.float32, 1, 8))
    assert attention is not None
    rows = torch.zeros(1, 4, 3, 32)
    few = rows[:, :2]
    assert attention.fits(AttentionCall(0, rows, few, few))
    assert not any(attention.fits(AttentionCall(0, rows, *others)) for others in ((rows, rows), (few.double(), few)))
    for segment in (
        SequenceRows(1, 0, 0, 1, None),
        SequenceRows(0, 8, 0, 1, None),
        SequenceRows(0, 0, 0, 2, np.ones((1, 1), np.bool_)),
    ):
        with pytest.raises(AssertionError):  # compiled code would write beside the slots
            RowStep(attention, [segment], torch.zeros(2, dtype=torch.int64))
