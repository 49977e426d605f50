"""Packed weights give the same bits as plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from decoding.request import Request, SamplingParams
from engine.engine import Engine
from engine.loading import load_model
from engine.packed_linear import PackedLinear, can_pack, pack_linears, padded_rows
from tests.models import llama_config, save_model


def tiny(dtype: torch.dtype, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config(**changes), dtype=dtype, attn_implementation="sdpa").eval()


needs_packing = pytest.mark.skipif(not can_pack(tiny(torch.bfloat16)), reason="torch has no packed bfloat16 weights for this CPU")


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 64, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_the_same_bits_as_the_plain_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    plain = torch.nn.Linear(96, 160, bias=bias, dtype=torch.bfloat16)
    inputs = torch.randn(1, rows, 96).bfloat16()
    with torch.inference_mode():
        assert torch.equal(PackedLinear(plain)(inputs), plain(inputs))


@needs_packing
def test_a_packed_model_says_the_same_and_keeps_its_weights() -> None:
    model, packed = (tiny(torch.bfloat16, tie_word_embeddings=True) for _ in range(2))
    assert pack_linears(packed) == sum(type(module) is torch.nn.Linear for module in model.modules())
    assert all(type(module) is not torch.nn.Linear for module in packed.modules())
    tokens = torch.arange(1, 40)[None]
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, packed(tokens).logits)
    assert packed.lm_head.weight is packed.model.embed_tokens.weight
    assert packed.state_dict().keys() == model.state_dict().keys()
    assert pack_linears(packed) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_are_left_alone(dtype: torch.dtype) -> None:
    model = tiny(dtype)
    assert not can_pack(model) and pack_linears(model) == 0


@needs_packing
def test_loading_packs_unless_told_not_to(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "model", llama_config()))

    def packed(options: ModelOptions) -> bool:
        return any(isinstance(module, PackedLinear) for module in load_model(options).model.modules())

    assert packed(ModelOptions(folder, dtype="bfloat16")) and not packed(ModelOptions(folder, dtype="float32"))
    assert not packed(ModelOptions(folder, dtype="bfloat16", pack_weights=False))


def test_there_are_few_numbers_of_rows() -> None:
    assert [padded_rows(rows) for rows in (1, 2, 15, 16, 17, 33, 100, 128, 129, 512, 513)] == [
        1, 2, 15, 16, 20, 40, 112, 128, 160, 512, 640,
    ]  # fmt: skip
    for rows in range(1, 2049):
        padded = padded_rows(rows)
        assert rows <= padded < 1.25 * rows and padded_rows(padded) == padded
    assert len({padded_rows(rows) for rows in range(1, 2049)}) == 16 + 7 * 4


@needs_packing
@pytest.mark.parametrize("strategy", ["autoregressive", "llma", "jacobi"])
def test_whatever_the_requests_layers_see_few_numbers_of_rows(tmp_path: Path, strategy: str) -> None:
    folder = str(save_model(tmp_path / "model", llama_config()))
    engine = Engine.load(
        ModelOptions(folder, dtype="bfloat16"), EngineOptions(max_running=3), SpeculationOptions(strategy=strategy)
    )
    seen: set[int] = set()
    runner = engine._executor.runner  # type: ignore[attr-defined]
    for module in runner.model.modules():
        if isinstance(module, PackedLinear):
            module.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].shape[-2]))
    outputs: dict[str, list[int]] = {}
    for number, length in enumerate((17, 19, 37, 41, 70, 75, 101, 21, 5)):
        prompt = [1 + (token * 7 + number) % 30 for token in range(length)]
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=12, ignore_eos=True)))
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
    assert all(len(tokens) == 12 for tokens in outputs.values()) and len(outputs) == 9
    assert seen and max(seen) > 16
    assert seen == {padded_rows(rows) for rows in seen}
