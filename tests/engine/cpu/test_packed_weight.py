"""Weights in blocks against the package ``gguf``'s own dequantization, and to the last bit against the same weights unpacked."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from outrider.engine.cpu.block_formats import FORMATS, Codes, quantized, taken_apart
from outrider.engine.cpu.linear import PanelWeight, has_kernels, linear
from outrider.engine.cpu.packed_weight import PART_ROWS, PackedWeight
from outrider.engine.forward import exactness
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.weights.packing import round_model
from tests.engine.cpu.test_fused_forward import KNOWN, build
from tests.helpers.models import COMPILED, CONTEXT

gguf = pytest.importorskip("gguf")

bfloat16_only = pytest.mark.skipif(not has_kernels(torch.device("cpu"), torch.bfloat16), reason="numba is not installed")
FAST = "Q4_1", "Q8_0", "Q6_K"  # the code of each takes seconds to compile
OLD = "Q5_0", "Q5_1"  # rare in files of today
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block's are; else at 0


def random_rows(name: str, outputs: int, size: int) -> Codes:
    """[outputs, bytes of a row] as a file has them: any codes, and scales of both signs."""
    rng = np.random.default_rng(size)
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = rng.integers(0, 256, (outputs, size // block, block_bytes), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        raw[:, :, at : at + 2] = rng.normal(0, 0.1, (*raw.shape[:2], 1)).astype(np.float16).view(np.uint8)
    raw[0, 0, : raw.shape[2] // 2] = 255 if name == "Q8_0" else 0
    for at in HALVES.get(name, (0,)):
        raw[0, 0, at : at + 2] = np.array([2.0**-24], np.float16).view(np.uint8)  # the least there is
    return raw.reshape(outputs, -1)


def of_file(name: str, raw: Codes, dtype: torch.dtype) -> tuple[PackedWeight, torch.Tensor]:
    """A weight, and what the package says that it is, rounded to the type."""
    numbers = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    expected = torch.from_numpy(np.array(numbers, np.float32)).to(dtype)
    parts = (taken_apart(raw[first : first + PART_ROWS], name) for first in range(0, len(raw), PART_ROWS))
    return PackedWeight.of(parts, name, *expected.shape, dtype), expected


def check_same(name: str, dtype: torch.dtype, outputs: int, size: int) -> None:
    made, expected = of_file(name, random_rows(name, outputs, size), dtype)
    assert made.shape == expected.shape and made.dtype == dtype and torch.equal(made.plain(), expected)
    assert torch.equal(torch.cat([rows for _, rows in made.parts()]), expected)
    torch.manual_seed(0)
    panels, inputs = PanelWeight.of(expected), torch.randn(19, size).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    for rows in (1, 2, 3, 4, 5, 8, 9, 19):
        assert torch.equal(linear(inputs[:rows], made, bias), linear(inputs[:rows], panels, bias)), rows
    tokens = torch.randint(outputs, (4, 3))
    assert torch.equal(torch.nn.functional.embedding(tokens, made), expected[tokens])


@pytest.mark.slow
@bfloat16_only
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.proof if name in OLD else pytest.mark.slow)
        for name in FORMATS
    ],
)
def test_it_says_what_the_unpacked_weight_says(name: str) -> None:
    for outputs, size in ((70, 512), (5, 256)):
        check_same(name, torch.bfloat16, outputs, size)
    form = FORMATS[name]
    file_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1] / form.block
    assert form.block_bytes / form.block / 32 <= 1.03 * file_bytes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_every_type(name: str, dtype: torch.dtype) -> None:
    check_same(name, dtype, 40, 256)


@bfloat16_only
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_a_row_has_the_same_bits_in_any_company(name: str, threads: None) -> None:
    weight, _ = of_file(name, random_rows(name, 200, 160), torch.bfloat16)
    inputs = torch.randn(257, 160).bfloat16()
    torch.set_num_threads(1)
    alone = torch.cat([linear(inputs[row : row + 1], weight) for row in range(len(inputs))])
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        for rows in (*range(1, 71), 257):
            for first in sorted({0, 3, 257 - rows} if rows < 254 else {0}):
                given = linear(inputs[first : first + rows], weight)
                assert torch.equal(given, alone[first : first + rows]), (number, rows, first)


@bfloat16_only
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_rounding_is_to_the_nearest(name: str) -> None:
    numbers = np.random.default_rng(0).normal(0, 0.05, (40, 96)).astype(np.float32)
    numbers[3, :32], numbers[4, :32] = 0, 0.25
    blocks = quantized(numbers, name)
    weight = PackedWeight.of(iter([blocks]), name, 40, 96, torch.float32)
    wrong = np.abs(weight.plain().double().numpy() - numbers)
    scales = np.abs(np.repeat(blocks.scales.astype(np.float64), 32, axis=1))
    ends = 1 if name == "Q4_0" else 0.52  # a side of its codes has one less than the other
    assert (wrong <= ends * scales + 2e-4).all() and not weight.plain()[3, :32].any()
    theirs = gguf.quantize(numbers, gguf.GGMLQuantizationType[name])
    assert np.square(wrong).sum() <= 1.02 * np.square(gguf.dequantize(theirs, gguf.GGMLQuantizationType[name]) - numbers).sum()


@bfloat16_only
def test_it_is_a_parameter_that_nobody_changes() -> None:
    weight, expected = of_file("Q4_1", random_rows("Q4_1", 40, 64), torch.bfloat16)
    layer = torch.nn.Linear(64, 40, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    inputs = torch.randn(3, 64).bfloat16()
    for made in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(made.weight) is PackedWeight and made.weight.numel() == 40 * 64
        assert torch.equal(made(inputs), linear(inputs, weight))
    assert torch.equal(layer.weight * 2, expected * 2) and torch.equal(layer.weight[3:5], expected[3:5])
    assert layer.weight.nbytes == weight.panels.nbytes == 64 // 32 * 640 * 2
    with pytest.raises(TypeError, match="cannot be changed in place"):
        layer.weight.mul_(2)


def unpacked(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with its weights as they are in the type."""
    made = copy.deepcopy(model)
    plain: dict[int, torch.nn.Parameter] = {}
    for module in made.modules():
        weight = getattr(module, "weight", None)
        if type(weight) is PackedWeight:
            own = plain.setdefault(id(weight), torch.nn.Parameter(weight.plain(), requires_grad=False))
            module.weight = own
    return made


@pytest.mark.slow
@bfloat16_only
@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_model_says_what_it_says_unpacked(family: str, weights: Any) -> None:
    model = build(KNOWN[family], torch.bfloat16, intermediate_size=96, vocab_size=320)
    round_model(model, weights)
    linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
    assert linears and all(type(module.weight) is PackedWeight for module in linears)
    tied = model.config.tie_word_embeddings
    assert tied == (model.get_input_embeddings().weight is model.get_output_embeddings().weight)
    one, other = (ModelRunner(each, 2, CONTEXT) for each in (model, unpacked(model)))
    assert one._whole is not None and other._whole is not None
    assert (
        one.calibration_key()["packed"] == ["Q8_0" if weights == "int8" else "Q4_1"] and "packed" not in other.calibration_key()
    )
    tokens = np.random.default_rng(1).integers(0, 320, 90).astype(np.int32)
    from outrider.engine.forward.exactness import _logits, _prefill

    for runner in (one, other):
        _prefill(runner, 0, tokens[:60], 37)
    for rows in ((), (4,), (5, 6, 7), tuple(range(30))):
        given, expected = (_logits(runner, tokens[:60], 59, rows, range(-1, len(rows))) for runner in (one, other))
        assert torch.equal(given, expected)
    assert exactness.check(one) is None


@bfloat16_only
def test_families_that_are_computed_by_modules() -> None:
    from tests.engine.cpu.test_linear import tiny

    model = tiny("gemma2", hidden_size=64)
    round_model(model, "int4")
    one, other = (ModelRunner(each, 2, CONTEXT) for each in (model, unpacked(model)))
    assert one._whole is None and exactness.check(one) is None
    from outrider.engine.forward.exactness import _logits

    tokens = np.arange(1, 30, dtype=np.int32)
    assert torch.equal(_logits(one, tokens, 0), _logits(other, tokens, 0))
