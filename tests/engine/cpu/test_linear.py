"""Compiled products against float64, and every bit of a row against the same row in other company."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.decoding.jit import compile_for, kinds_of_processor
from outrider.engine.cpu.linear import PanelWeight, TurnedWeight, has_kernels, linear, row_linears
from outrider.engine.forward import exactness
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.runner import ModelRunner
from tests.helpers.models import COMPILED, CONTEXT, FAMILIES

REPOSITORY = Path(__file__).resolve().parents[3]
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2e-6}
# Numbers of a row, outputs: none, as in a slice of a small layer; rests of pairs and panels; fewer outputs than a panel has.
SIZES = [(0, 3), (0, 40), (47, 0), (1, 5), (1, 192), (47, 17), (48, 192), (576, 5), (576, 1536), (1536, 17), (1536, 192)]

bfloat16_only = pytest.mark.skipif(not has_kernels(torch.device("cpu"), torch.bfloat16), reason="numba is not installed")


def tiny(family: str, dtype: torch.dtype = torch.bfloat16, **changes: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family])
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=TREE_ATTENTION).eval()


def check_close(given: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Sums in float32 differ by what rounding each product may do, and are rounded once more to the type."""
    expected = torch.nn.functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    size = torch.nn.functional.linear(inputs.double().abs(), weight.double().abs())
    assert given.dtype == inputs.dtype and given.shape == expected.shape
    assert ((given - expected).abs() <= TOLERANCE[given.dtype] * expected.abs() + 2e-6 * (size + 1)).all()


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize(("size", "outputs"), SIZES)
def test_it_is_a_product(dtype: torch.dtype, size: int, outputs: int) -> None:
    torch.manual_seed(size)
    weight, bias = torch.randn(outputs, size).to(dtype), torch.randn(outputs).to(dtype)
    wide = torch.randn(2, 7, size + 9).to(dtype)
    turned = torch.randn(2, size, 6).to(dtype).transpose(1, 2)  # the numbers of a row do not lie side by side
    kinds = (wide[0, :1, :size].contiguous(), wide[:, ::2, :size], wide[..., 9:], turned, wide[0, 3, :size], wide[:, :0, :size])
    panels = PanelWeight.of(weight)
    for inputs in kinds:
        for own in (None, bias):
            check_close(linear(inputs, panels, own), inputs, weight, own)
    with pytest.raises(AssertionError):
        linear(wide[..., : size + 1], panels)
    if size:
        with pytest.raises(AssertionError):
            linear(inputs.double(), panels)


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize(("size", "outputs"), SIZES)
def test_panels_hold_what_a_weight_holds(dtype: torch.dtype, size: int, outputs: int) -> None:
    torch.manual_seed(size)
    several = torch.randn(3, outputs, size).to(dtype)
    made, inputs = PanelWeight.of(several), torch.randn(2, size).to(dtype)
    assert made.shape == several.shape and made.dtype == dtype and torch.equal(made.plain(), several)
    for number in range(3):
        weight, own = several[number], made[number if number else torch.tensor(0)]
        assert type(own) is PanelWeight and torch.equal(own.plain(), weight)
        assert torch.equal(torch.nn.functional.linear(inputs, own), linear(inputs, PanelWeight.of(weight)))
        if size and outputs:
            tokens = torch.randint(outputs, (4, 2))
            assert torch.equal(torch.nn.functional.embedding(tokens, own), weight[tokens])
    for given, expected in ((made * 2, several * 2), (made[:, 1:], several[:, 1:]), (made.float(), several.float())):
        assert type(given) is torch.Tensor and torch.equal(given, expected)
    made.mul_(-2)
    made[1] = 0
    several.mul_(-2)[1] = 0
    assert type(made) is PanelWeight and torch.equal(made.plain(), several)
    with torch.inference_mode():
        made[0].copy_(several[2])
    assert torch.equal(made.plain()[0], several[2])


@pytest.mark.parametrize("dtype", COMPILED)
def test_weights_that_stand_behind_the_rows_are_compiled_products(dtype: torch.dtype) -> None:
    """As GPT-OSS's experts have them."""
    torch.manual_seed(1)
    several, inputs = torch.randn(3, 47, 40).to(dtype), torch.randn(6, 47).to(dtype)
    made = TurnedWeight.of(several)
    assert torch.equal(made.plain(), several) and torch.equal(made * 2, several * 2)
    for number in range(3):
        expected = linear(inputs, PanelWeight.of(several[number].mT.contiguous()))
        assert torch.equal(inputs @ made[torch.tensor(number)], expected)
        assert torch.equal(inputs[:1] @ made[number], expected[:1])
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(copied) is TurnedWeight and torch.equal(copied.plain(), several)
    made.mul_(-2)
    assert torch.equal(made.plain(), several * -2)


@pytest.mark.parametrize("dtype", COMPILED)
def test_a_router_computes_in_float32_with_a_copy_that_is_kept(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, inputs = torch.randn(40, 47).to(dtype), torch.randn(6, 47)
    made = PanelWeight.of(weight)
    turned = made.type(torch.float32)
    assert turned is made.to(torch.float32) and turned.dtype == torch.float32 and torch.equal(turned.plain(), weight.float())
    assert torch.equal(torch.nn.functional.linear(inputs, turned), linear(inputs, PanelWeight.of(weight.float())))


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize(("size", "outputs"), [(47, 5), (160, 200)])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, size: int, outputs: int, threads: None) -> None:
    torch.manual_seed(1)
    plain, bias, inputs = (torch.randn(*shape).to(dtype) for shape in ((outputs, size), (outputs,), (257, size)))
    weight = PanelWeight.of(plain)
    torch.set_num_threads(1)
    alone = torch.cat([linear(inputs[row : row + 1], weight, bias) for row in range(len(inputs))])
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        for rows in (*range(1, 71), 257):
            for first in sorted({0, 3, 257 - rows} if rows < 254 else {0}):
                given = linear(inputs[first : first + rows], weight, bias)
                assert torch.equal(given, alone[first : first + rows]), (number, rows, first)


@pytest.mark.parametrize("dtype", COMPILED)
def test_numbers_that_are_none_stay_in_their_row(dtype: torch.dtype) -> None:
    weight, inputs = PanelWeight.of(torch.randn(20, 47).to(dtype)), torch.randn(6, 47).to(dtype)
    expected = linear(inputs, weight)
    inputs[2, 46], inputs[3, 0] = float("nan"), float("inf")
    given = linear(inputs, weight)
    assert given[2].isnan().all() and not given[3].isfinite().any()
    assert torch.equal(given[[0, 1, 4, 5]], expected[[0, 1, 4, 5]])


@bfloat16_only
@pytest.mark.parametrize("layer", [torch.nn.Linear(48, 80), torch.nn.Linear(48, 3, bias=False), Conv1D(80, 48)])
def test_a_layer_keeps_its_parameters_and_sees_what_becomes_of_them(layer: torch.nn.Module) -> None:
    layer = layer.to(torch.bfloat16).requires_grad_(False)
    layer.weight.normal_()
    inputs = torch.randn(2, 5, 48).bfloat16()
    expected = layer(inputs)
    names = layer.state_dict().keys()
    model = torch.nn.Module()
    model.layer, model.dtype, model.device = layer, torch.bfloat16, torch.device("cpu")
    assert row_linears(model) == 1  # type: ignore[arg-type]
    made = model.layer
    assert type(made) is torch.nn.Linear and type(made.weight) is PanelWeight and made.bias is layer.bias
    assert made.state_dict().keys() == names
    for one in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.allclose(one(inputs).float(), expected.float(), rtol=2**-7, atol=0.05)
        assert torch.equal(one(inputs), made(inputs))
    made.weight.mul_(-2)
    if made.bias is not None:
        made.bias.mul_(-2)
    assert torch.allclose(made(inputs).float(), -2 * expected.float(), rtol=2**-7, atol=0.1)


@bfloat16_only
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mixtral", "opt"])
def test_a_model_says_the_same_and_can_be_copied(family: str) -> None:
    model, made = (tiny(family) for _ in range(2))
    for one in (model, made):
        one.set_attn_implementation("eager")
        one.set_experts_implementation("eager")
    linears = [module.weight for module in model.modules() if type(module) in (torch.nn.Linear, Conv1D)]
    weights = len({id(weight) for weight in linears})
    assert row_linears(made) == weights + (6 if family == "mixtral" else 0)  # of two layers: routers, and two for all experts
    assert row_linears(made) == 0 and made.state_dict().keys() == model.state_dict().keys()
    assert all(type(module.weight) is PanelWeight for module in made.modules() if type(module) is torch.nn.Linear)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (made.get_input_embeddings().weight is made.get_output_embeddings().weight)
    tokens = torch.arange(1, 40)[None]
    with torch.inference_mode():
        given, expected = made(tokens).logits, model(tokens).logits
        assert type(given) is torch.Tensor
        assert torch.allclose(given.float(), expected.float(), atol=0.2, rtol=0.05)
        for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            kinds = [[type(parameter) for parameter in one.parameters()] for one in (made, copied)]
            assert kinds[0] == kinds[1] and PanelWeight in kinds[0]
            assert torch.equal(copied(tokens).logits, given)
    assert row_linears(tiny(family, torch.float64)) == 0


@pytest.mark.slow
@bfloat16_only
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 576), (torch.float32, 48)])  # smaller ones torch rounds alike
def test_torch_in_its_place_is_noticed(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests of exactness would show nothing."""
    rows, weight = (torch.randn(each, size, generator=torch.Generator().manual_seed(each)).to(dtype) for each in (64, 2 * size))
    if torch.equal(torch.nn.functional.linear(rows[:1], weight), torch.nn.functional.linear(rows, weight)[:1]):
        pytest.skip("torch rounds a row alike beside other rows on this CPU")
    model = tiny("qwen2", dtype, hidden_size=size, intermediate_size=2 * size)
    assert exactness.check(ModelRunner(model, 2, CONTEXT)) is None

    def of_torch(input: torch.Tensor, weight: PanelWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(input, weight.plain(), bias)

    monkeypatch.setattr("outrider.engine.cpu.linear.linear", of_torch)
    assert "rows changed with the other rows" in str(exactness.check(ModelRunner(model, 2, CONTEXT)))


@pytest.mark.slow
@bfloat16_only
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.proof) for kind in ("avx512bf16", "avx512", "avx2")), "sse2"]
)
def test_processors_with_less(tmp_path: Path, kind: str) -> None:
    """With as much as this one has, the other tests are."""
    if kind not in kinds_of_processor() and (kind != "sse2" or "x86" not in os.uname().machine):
        pytest.skip("this processor has less itself, or other features")
    dtypes = ("bfloat16", "float32") if kind == "sse2" else ("bfloat16", "float16", "float32")
    wide = kind.startswith("avx512")
    code = f"""
import torch
from outrider.engine.cpu import linear_kernel as native
from outrider.engine.cpu.linear import has_kernels
from tests.engine.cpu import test_linear as tests
assert native.TILE_ROWS == {12 if wide else 2} and native.PAIRS == {kind == "avx512bf16"} and not native.TILES
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    assert has_kernels(torch.device("cpu"), dtype) == (str(dtype).split(".")[1] in {dtypes})
    if str(dtype).split(".")[1] in {dtypes}:
        for sizes in tests.SIZES:
            tests.test_it_is_a_product(dtype, *sizes)
        for sizes in ((47, 5), (160, 200)):
            tests.test_a_row_has_the_same_bits_in_any_company(dtype, *sizes, None)
print("all the same")
"""
    chosen = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+sse2"} if kind == "sse2" else compile_for(kind)
    environment = os.environ | chosen | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    assert found.stdout.endswith("all the same\n"), found.stderr[-3000:]
