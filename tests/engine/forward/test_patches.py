"""Replaced modules say what a model's own say."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.decoding.jit import NATIVE
from outrider.engine.forward.patches import CompiledNorm, RowActivation, WholeList, _compiled_norm, patch_modules
from tests.helpers.models import FAMILIES, llama_config

needs_numba = pytest.mark.skipif(not NATIVE, reason="numba is not installed")


def tiny(config: object, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


@needs_numba
@pytest.mark.parametrize("size", [16, 48, 768])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_a_norm_says_the_same(size: int, dtype: torch.dtype, kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(size)
    norm = kind(size, eps=1e-5).to(dtype).requires_grad_(False)
    norm.weight.normal_()
    compiled = _compiled_norm(norm)
    assert isinstance(compiled, CompiledNorm) and compiled.weight is norm.weight
    for shape, scale in (((1, 1, size), 1.0), ((1, 37, 3, size), 100.0), ((2, size), 1e-4)):
        inputs = (scale * torch.randn(shape)).to(dtype)
        given, expected = compiled(inputs), norm(inputs)
        assert given.shape == expected.shape
        assert torch.allclose(given, expected, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-9)
        assert dtype == torch.float32 or (given != expected).double().mean() < 0.01
    turned = torch.randn(5, size, 2).to(dtype).transpose(1, 2)
    assert torch.equal(compiled(turned), compiled(turned.contiguous()))
    with pytest.raises(AssertionError):
        compiled(torch.randn(3, size + 16).to(dtype))


@needs_numba
def test_other_norms_are_left_alone() -> None:
    for norm in (LlamaRMSNorm(12), LlamaRMSNorm(32).double(), torch.nn.LayerNorm(32)):
        assert _compiled_norm(norm) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_thin_model_says_the_same(dtype: torch.dtype) -> None:
    model, thin = (tiny(llama_config(), dtype) for _ in range(2))
    norms = 5 if NATIVE and dtype != torch.float64 else 0  # two in each of two layers, and the last
    assert patch_modules(thin) == norms + 3 and patch_modules(thin) == 0  # two activations, and the list of layers
    assert type(thin.model.layers) is WholeList and thin.state_dict().keys() == model.state_dict().keys()
    tokens = torch.arange(1, 40)[None]
    with torch.inference_mode():
        given, expected = thin(tokens).logits, model(tokens).logits
        assert torch.allclose(given, expected, rtol=1e-4, atol=0.05 if dtype == torch.bfloat16 else 1e-4)
        assert torch.equal(copy.deepcopy(thin)(tokens).logits, given)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_activation_gives_a_number_the_same_bits_anywhere(name: str, dtype: torch.dtype, threads: None) -> None:
    torch.manual_seed(0)
    stock = ACT2FN[name]
    activation, inputs = RowActivation(stock), (4 * torch.randn(1, 700, 101)).to(dtype)
    for size in (101, 64):
        rows = inputs[..., :size]
        torch.set_num_threads(1)
        alone = torch.cat([activation(rows[:, row : row + 1]) for row in range(700)], 1)
        assert alone.shape == rows.shape and alone.dtype == dtype
        assert torch.allclose(alone.float(), stock(rows).float(), rtol=2**-7, atol=1e-6)
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for count in (*range(2, 70, 7), 257, 650, 700):
                assert torch.equal(activation(rows[:, 700 - count :]), alone[:, 700 - count :]), (size, number, count)
    assert activation(inputs[:, :0]).shape == (1, 0, 101)


def test_a_list_of_layers_is_a_list() -> None:
    layers = WholeList([torch.nn.Linear(1, 1) for _ in range(3)])
    assert layers[:3] is layers and layers[:] is layers
    assert list(layers[1:]) == list(layers)[1:] and layers[-1] is list(layers)[2]


def test_a_model_with_norms_of_its_own_keeps_them() -> None:
    model = tiny(FAMILIES["gpt_neox"], torch.float32)
    assert patch_modules(model) == 3  # its activations, and its list of layers
    assert all(not isinstance(module, CompiledNorm) for module in model.modules())
