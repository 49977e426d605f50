"""Compiled attention of few rows against attention written out in float64, and through whole models."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from decoding.jit import NATIVE
from decoding.request import Request, SamplingParams
from decoding.tree import DraftTree
from engine.batch import Segment, Work, pack
from engine.kv_cache import KVShape, SlotCache
from engine.row_attention import MOST_ROWS, RowAttention, RowStep
from engine.runner import ModelRunner
from tests.models import VOCAB, tiny_model

CAPACITY, SLOTS, LAYERS = 150, 4, 2
# Entries before the rows, and rows: full blocks of sixteen keys and rests, blocks of sixteen rows and rests, an empty slot.
REQUESTS = ((16, 1), (93, 1), (0, 5), (40, 37))
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}

needs_numba = pytest.mark.skipif(not NATIVE, reason="numba is not installed")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tree_mask(rng: np.random.Generator, rows: int) -> np.ndarray:
    """[rows, rows] of a random tree: each row sees itself and its ancestors."""
    mask = np.eye(rows, dtype=np.bool_)
    for row in range(1, rows):
        mask[row] |= mask[int(rng.integers(0, row))]
    return mask


class Case:
    """A cache with random entries, and a step of ``REQUESTS``; every other one has a tree."""

    def __init__(self, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> None:
        torch.manual_seed(1)
        rng = np.random.default_rng(1)
        self.cache = SlotCache(KVShape(LAYERS, kv_heads, size, dtype, torch.device("cpu")), SLOTS, CAPACITY)
        for entries in (self.cache._keys, self.cache._values):
            entries.normal_()
        self.segments, positions, offset = [], [], 0
        for number, (start, rows) in enumerate(REQUESTS):
            mask = tree_mask(rng, rows) if number % 2 and rows > 1 else None
            self.segments.append(Segment((number * 3 + 1) % SLOTS, start, offset, rows, mask))
            depths = np.arange(rows) if mask is None else mask.sum(1) - 1
            positions += (start + depths).tolist()
            offset += rows
        self.positions = torch.tensor(positions)
        # As models hand them over: heads between rows.
        self.query = torch.randn(1, offset, heads, size).to(dtype).transpose(1, 2)
        self.key, self.value = (torch.randn(1, offset, kv_heads, size).to(dtype).transpose(1, 2) for _ in range(2))

    def attend(self, segments: list[Segment], layer: int, window: int | None) -> torch.Tensor:
        """[rows, heads, head_dim] by compiled code; rows of other segments are NaN."""
        attention = RowAttention.over(self.cache)
        assert attention is not None
        output = torch.full_like(self.query.transpose(1, 2), float("nan"), memory_format=torch.contiguous_format)
        step = RowStep(attention, segments, self.positions)
        step.attend(layer, self.query, self.key, self.value, output, 0.3, window)
        return output[0]

    def expected(
        self, segment: Segment, layer: int, window: int | None, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """[rows, heads, head_dim] of one request in float64, from the entries before the step."""
        rows = slice(segment.offset, segment.offset + segment.rows)
        group = self.query.shape[1] // self.key.shape[1]
        old_keys, old_values = (old[layer, segment.slot, :, : segment.start] for old in (keys, values))
        all_keys = torch.cat([old_keys, self.key[0, :, rows]], 1).double().repeat_interleave(group, 0)
        all_values = torch.cat([old_values, self.value[0, :, rows]], 1).double().repeat_interleave(group, 0)
        mask = torch.ones(segment.rows, segment.rows).tril().bool() if segment.mask is None else torch.from_numpy(segment.mask)
        visible = torch.cat([torch.ones(segment.rows, segment.start, dtype=torch.bool), mask], 1)
        if window is not None:
            at = torch.cat([torch.arange(segment.start), self.positions[rows]])
            visible &= self.positions[rows][:, None] - at[None] < window
        scores = torch.matmul(self.query[0, :, rows].double(), all_keys.transpose(1, 2)) * 0.3
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.matmul(weights, all_values).transpose(0, 1)


@needs_numba
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (3, 3, 16), (4, 1, 80), (2, 2, 128)])
@pytest.mark.parametrize("window", [None, 7, 45])
def test_it_is_attention(dtype: torch.dtype, heads: int, kv_heads: int, size: int, window: int | None) -> None:
    case = Case(dtype, heads, kv_heads, size)
    keys, values = case.cache._keys.clone(), case.cache._values.clone()
    output = case.attend(case.segments, 1, window)
    for segment in case.segments:
        rows = slice(segment.offset, segment.offset + segment.rows)
        expected = case.expected(segment, 1, window, keys, values)
        assert torch.allclose(output[rows].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]), segment
        end = segment.start + segment.rows
        keys[1, segment.slot, :, segment.start : end] = case.key[0, :, rows]
        values[1, segment.slot, :, segment.start : end] = case.value[0, :, rows]
    assert torch.equal(case.cache._keys, keys) and torch.equal(case.cache._values, values)  # these entries and no others


@needs_numba
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, two_threads: None) -> None:
    together = Case(dtype, 4, 2, 64).attend(Case(dtype, 4, 2, 64).segments, 0, None)
    assert not together.isnan().any()
    torch.set_num_threads(1)
    for number in range(len(REQUESTS)):
        case = Case(dtype, 4, 2, 64)
        segment = case.segments[number]
        alone = case.attend([segment], 0, None)
        rows = slice(segment.offset, segment.offset + segment.rows)
        assert torch.equal(alone[rows], together[rows]), segment
        assert alone[: segment.offset].isnan().all() and alone[segment.offset + segment.rows :].isnan().all()


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
    def cache(dtype: torch.dtype, size: int) -> SlotCache:
        return SlotCache(KVShape(1, 2, size, dtype, torch.device("cpu")), 1, 8)

    for dtype, size in ((torch.float64, 16), (torch.float16, 16), (torch.float32, 12)):
        assert RowAttention.over(cache(dtype, size)) is None
    attention = RowAttention.over(cache(torch.float32, 32))
    assert attention is not None
    rows = torch.zeros(1, 4, 3, 32)
    assert attention.fits(rows, rows[:, :2], rows[:, :2])
    assert not attention.fits(rows, rows, rows) and not attention.fits(rows, rows[:, :2].double(), rows[:, :2])
    for segment in (Segment(1, 0, 0, 1, None), Segment(0, 8, 0, 1, None), Segment(0, 0, 0, 2, np.ones((1, 1), np.bool_))):
        with pytest.raises(AssertionError):  # compiled code would write beside the slots
            RowStep(attention, [segment], torch.zeros(2, dtype=torch.int64))


@needs_numba
@pytest.mark.parametrize("family", ["qwen3", "gemma", "gemma3"])
def test_a_step_with_few_and_many_rows_says_what_torch_says(family: str) -> None:
    model = tiny_model(family, "float32").runner.model
    compiled, plain = (ModelRunner(model, SLOTS, 2 * MOST_ROWS) for _ in range(2))
    assert compiled._compiled is not None
    plain._compiled = None
    rng = np.random.default_rng(5)
    lengths = (30, MOST_ROWS + 20, 12)
    requests = [
        Request(str(slot), rng.integers(0, VOCAB, length), SamplingParams(max_tokens=9)) for slot, length in enumerate(lengths)
    ]
    for slot, request in enumerate(requests):
        request.slot = slot
    parents = np.array([-1, 0, 0, 1, 1, 2], np.int32)
    tree = DraftTree(rng.integers(0, VOCAB, 6).astype(np.int32), parents, np.zeros(6, np.int8), 6)
    first = pack([Work(requests[0], 0, lengths[0] - 1, None, frozenset())])
    mixed = pack(
        [
            Work(requests[0], lengths[0] - 1, lengths[0], tree, frozenset()),
            *(Work(request, 0, request.num_tokens, DraftTree.chain(request.root, ()), frozenset()) for request in requests[1:]),
        ]
    )
    answers = []
    for runner in (compiled, plain):
        runner.forward(first)
        answers.append(runner.forward(mixed))
    assert torch.allclose(*answers, atol=2e-4)
    assert torch.equal(answers[0].argmax(-1), answers[1].argmax(-1))
    assert answers[0].shape == (8, VOCAB)
