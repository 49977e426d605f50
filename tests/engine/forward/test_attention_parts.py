"""Attention in parts against plain mathematics in float64, and a model that attends in parts against itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outrider.decoding.tree import DraftTree
from outrider.engine.forward import attention, attention_parts
from outrider.engine.forward.attention import StepContext
from outrider.engine.forward.attention_parts import MOST_BLOCK_ROWS, attend_causal, attend_parts, fits
from outrider.engine.forward.batch import Batch, DummySequence, ScheduledDummy, pack
from outrider.engine.forward.runner import ModelRunner
from tests.helpers.attention_reference import reference_attention, tree_mask
from tests.helpers.models import VOCAB, tiny_model, tree_of

KV_HEADS, HEAD_DIM = 2, 32
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
CASES = [
    *(("cpu", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16)),
]


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    return reference_attention(query[0], keys[0], values[0], visible, scale).transpose(0, 1)[None]


def tensors(rng: np.random.Generator, group: int, rows: int, entries: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Query, keys and values, the latter as views of longer slots, whose other entries are no numbers."""
    query = torch.from_numpy(2 * rng.standard_normal((1, rows, KV_HEADS * group, HEAD_DIM))).transpose(1, 2)
    slots = torch.full((2, 1, KV_HEADS, entries + 9, HEAD_DIM), torch.nan)
    slots[:, :, :, :entries] = torch.from_numpy(rng.standard_normal((2, 1, KV_HEADS, entries, HEAD_DIM)))
    query, slots = query.to(device, dtype), slots.to(device, dtype)
    return [query, slots[0, :, :, :entries], slots[1, :, :, :entries]]


def additive(seen: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf")).to(device)


def check(output: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert output.dtype == dtype and output.shape == expected.shape
    assert (output.double().cpu() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("start", [1, 63, 64, 500])
def test_trees_chains_and_single_rows_equal_plain_mathematics(device: str, dtype: torch.dtype, group: int, start: int) -> None:
    rng = np.random.default_rng([start, group])
    for rows, before, scaling in ((2, 0, None), (17, 0, 0.3), (40, 5, None), (1, 3, None)):
        query, keys, values = tensors(rng, group, rows, start + before + rows, dtype, device)
        seen = torch.from_numpy(tree_mask(rng, rows, before))
        output = attend_parts(query, keys, values, start, additive(seen, dtype, device), scaling)
        visible = torch.cat([torch.ones(rows, start, dtype=torch.bool), seen], 1)
        check(output, reference(query, keys, values, visible, scaling or HEAD_DIM**-0.5), dtype)
    for rows, scaling in ((1, None), (1, 0.3), (2, None), (33, 0.3)):
        query, keys, values = tensors(rng, group, rows, start + rows, dtype, device)
        visible = torch.ones(rows, start + rows, dtype=torch.bool).tril(start)
        expected = reference(query, keys, values, visible, scaling or HEAD_DIM**-0.5)
        check(attend_parts(query, keys, values, start, None, scaling), expected, dtype)
        check(attend_causal(query, keys, values, scaling), expected, dtype)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_scores_that_overflow_a_sum_of_exponentials_are_merged(device: str) -> None:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    query, keys, values = tensors(np.random.default_rng(1), 2, 4, 24, dtype, device)
    keys[:, :, 7] *= 200  # a score of some thousands: the context decides all
    visible = torch.ones(4, 24, dtype=torch.bool).tril(20)
    check(attend_parts(query, keys, values, 20), reference(query, keys, values, visible, HEAD_DIM**-0.5), dtype)


def test_a_context_that_is_left_out_is_noticed() -> None:
    query, keys, values = tensors(np.random.default_rng(2), 2, 4, 24, torch.float32, "cpu")
    visible = torch.ones(4, 24, dtype=torch.bool).tril(20)
    visible[:, 19] = False
    with pytest.raises(AssertionError):
        check(attend_parts(query, keys, values, 20), reference(query, keys, values, visible, HEAD_DIM**-0.5), torch.float32)


def test_refuses_entries_that_are_not_those_of_the_rows() -> None:
    query, keys, values = tensors(np.random.default_rng(3), 1, 4, 24, torch.float32, "cpu")
    with pytest.raises(AssertionError):
        attend_parts(query, keys, values, 19)
    with pytest.raises(AssertionError):
        attend_parts(query, keys, values, 0)


def test_nothing_fits_on_a_processor() -> None:
    for dtype in TOLERANCE:
        query, keys, _ = tensors(np.random.default_rng(4), 1, 1, 2, dtype, "cpu")
        assert not fits(query, keys, keys)


@pytest.mark.gpu
def test_what_fits_on_a_gpu() -> None:
    for dtype in TOLERANCE:
        query, keys, _ = tensors(np.random.default_rng(4), 1, 1, 2, dtype, "cuda")
        half = dtype in (torch.bfloat16, torch.float16)
        assert fits(query, keys, keys) == (half and torch.cuda.get_device_capability() >= (8, 0))
        assert not fits(query[..., :12], keys[..., :12], keys[..., :12])


def by_segment(runner: ModelRunner, batch: Batch) -> StepContext:
    """As on a GPU without fixed rows."""
    return StepContext(batch, runner.cache, torch.from_numpy(batch.positions), runner.model.dtype, by_row=False)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_a_model_in_parts_gives_the_logits_of_the_masked_path(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a prefill, trees and single rows. Mistral's window of 12 bites behind the first chunk, and masks remain."""
    model = tiny_model(family, "float64")
    monkeypatch.setattr(ModelRunner, "_context", by_segment)
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, VOCAB, 41).astype(np.int32)
    tree = tree_of(rng.integers(0, VOCAB, 9), [-1, 0, 0, 1, 1, 2, 3, 0, 7])
    root, line = DraftTree.chain(0, ()), DummySequence(1, tokens)
    works = [
        ScheduledDummy(line, 0, 5, None),
        ScheduledDummy(line, 5, 11, tree),
        ScheduledDummy(line, 5, 30, root),
        ScheduledDummy(line, 30, 31, root),
    ]
    works += [ScheduledDummy(line, 31, 40, None), ScheduledDummy(line, 40, 41, tree)]
    taken: dict[str, int] = {}

    def counted(name: str) -> None:
        function = getattr(attention, name)

        def count(*args: object) -> torch.Tensor:
            taken[name] = taken.get(name, 0) + 1
            result: torch.Tensor = function(*args)
            return result

        monkeypatch.setattr(attention, name, count)

    def logits() -> list[torch.Tensor]:
        return [model.runner.forward(pack([work])) for work in works]

    expected = logits()
    counted("attend_parts")
    counted("attend_causal")
    monkeypatch.setattr(attention, "fits", lambda query, keys, values: True)
    for ours, plain in zip(logits(), expected, strict=True):
        assert torch.allclose(ours, plain, atol=1e-10, rtol=0)
    layers = model.runner.model.config.num_hidden_layers
    assert taken == ({} if family == "mistral" else {"attend_parts": 3 * layers, "attend_causal": 2 * layers})


def test_large_trees_keep_the_masked_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "_context", by_segment)
    monkeypatch.setattr(attention, "fits", lambda query, keys, values: True)
    monkeypatch.setattr(attention, "attend_parts", lambda *args: pytest.fail("a block of too many rows"))
    monkeypatch.setattr(attention, "MOST_BLOCK_ROWS", 8)
    assert MOST_BLOCK_ROWS > 64
    tokens = np.arange(5, dtype=np.int32)
    tree = tree_of(range(9), [-1, *[0] * 8])
    tiny_model("llama", "float64").runner.forward(pack([ScheduledDummy(DummySequence(0, tokens), 4, 5, tree)]))


def test_flash_attn_is_taken_where_it_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """And called as version 2.8 wants it, with rows before heads; the kernel itself is this stand-in."""

    def flash_attn_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, *, return_attn_probs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:  # fmt: skip
        assert return_attn_probs and softmax_scale is not None and not causal and not dropout_p
        scores = torch.einsum("brhd,bkhd->bhrk", q, k) * softmax_scale
        return torch.einsum("bhrk,bkhd->brhd", scores.softmax(3), v), scores.logsumexp(3), None

    monkeypatch.setattr(attention_parts, "usable", lambda function, device: function)  # see test_gpu_double.py
    attention_parts._library.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # an import raises ImportError, as where it is for another torch
    assert attention_parts._library(torch.device("cpu")) is None
    attention_parts._library.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    library = attention_parts._library(torch.device("cpu"))
    attention_parts._library.cache_clear()
    assert library is not None
    query, keys, values = tensors(np.random.default_rng(6), 1, 5, 24, torch.float64, "cpu")
    ours = attention_parts._by_library(library, query, keys, values, 0.3)
    torchs = attention_parts._attend_context(query, keys, values, 0.3)
    for one, other in zip(ours, torchs, strict=True):
        assert torch.allclose(one, other, atol=1e-12, rtol=0)
