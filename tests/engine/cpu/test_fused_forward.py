"""A whole forward in one call against the same model's modules, and every bit of a row against the same row in other company."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from outrider.engine.cpu.fused_forward import FusedForward
from outrider.engine.forward import exactness
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.batch import Batch, DummySequence, ScheduledDummy, pack
from outrider.engine.forward.exactness import _tree
from outrider.engine.forward.runner import ModelRunner
from tests.helpers.models import COMPILED

COMMON = {
    "vocab_size": 330, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 400, "initializer_range": 0.1,
}  # fmt: skip
ANGLES = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
QWEN2 = {key: value for key, value in COMMON.items() if key != "head_dim"} | {"hidden_size": 256}
KNOWN: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama 3, biases": LlamaConfig(
        **COMMON, attention_bias=True, mlp_bias=True, rope_parameters=ANGLES, tie_word_embeddings=False
    ),
    "mistral": MistralConfig(**COMMON, sliding_window=12),
    "qwen2": Qwen2Config(**QWEN2, sliding_window=10, use_sliding_window=True, max_window_layers=1),
    "qwen3": Qwen3Config(**COMMON, tie_word_embeddings=True),
}
STATES = {**COMMON, "num_hidden_layers": 4, "tie_word_embeddings": True}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
SPACE = {
    "mamba_n_heads": 20, "mamba_d_head": 16, "mamba_expand": 5, "mamba_d_state": 16, "mamba_n_groups": 2, "num_local_experts": 0,
    "shared_intermediate_size": 96,
}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
HYBRIDS: dict[str, PreTrainedConfig] = {
    "lfm2": Lfm2Config(**STATES, layer_types=["conv", FULL, "conv", FULL], conv_L_cache=3, block_auto_adjust_ff_dim=False),
    "lfm2, biases": Lfm2Config(**STATES, layer_types=[FULL, "conv", "conv", "conv"], conv_bias=True),
    "qwen3.5": Qwen3_5TextConfig(
        **{**STATES, "head_dim": 64}, **DELTA, layer_types=[LINEAR, FULL, LINEAR, LINEAR],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "granite 4": GraniteMoeHybridConfig(
        **STATES, **SPACE, layer_types=["mamba", "attention", "mamba", "mamba"], embedding_multiplier=3.0, logits_scaling=6.0,
        residual_multiplier=0.4, attention_multiplier=0.1, position_embedding_type=None,
    ),
    "granite 4, turned": GraniteMoeHybridConfig(
        **STATES, **SPACE, layer_types=["mamba", "attention", "mamba", "mamba"], position_embedding_type="rope",
        mamba_proj_bias=True,
    ),
    "granite 4, attention alone": GraniteMoeHybridConfig(
        **{**STATES, "num_hidden_layers": 2}, **SPACE, layer_types=["attention", "attention"], residual_multiplier=0.4,
        attention_bias=True,
    ),
}  # fmt: skip
TOLERANCE = {torch.bfloat16: 0.06, torch.float16: 0.01, torch.float32: 1e-4}


def build(config: PreTrainedConfig, dtype: torch.dtype, **changes: object) -> PreTrainedModel:
    """Random weights, biases and norms included."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=TREE_ATTENTION).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + float("norm" in name))
    return model


def batches() -> list[Batch]:
    """A prompt in two cuts, trees of two requests, and rows whose logits nobody wants."""
    tokens = np.random.default_rng(0).integers(1, 330, 60).astype(np.int32)
    one, other = DummySequence(0, tokens[:41]), DummySequence(1, tokens[10:52])
    branching = _tree(int(tokens[40]), tokens[50:57], (-1, 0, 0, 1, 1, 2, 4, 0))
    return [
        pack([ScheduledDummy(one, 0, 25, None)]),
        pack([ScheduledDummy(one, 25, 40, None), ScheduledDummy(other, 0, 42, _tree(int(tokens[51])))]),
        pack(
            [
                ScheduledDummy(one, 40, 41, branching),
                ScheduledDummy(other, 41, 42, _tree(int(tokens[51]), tokens[:3], (-1, 0, 1, 2))),
            ]
        ),
        pack([ScheduledDummy(other, 41, 42, _tree(int(tokens[51])))]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize("family", KNOWN | HYBRIDS)
def test_it_says_what_the_modules_say(family: str, dtype: torch.dtype) -> None:
    runner, modules = (ModelRunner(build((KNOWN | HYBRIDS)[family], dtype), 2, 96) for _ in range(2))
    assert runner._whole is not None
    modules._whole = None
    scale = 0.0
    for batch in batches():
        given, expected = runner.forward(batch), modules.forward(batch)
        assert given.shape == expected.shape == (len(batch.logit_rows), 330) and given.dtype == dtype
        scale = max(scale, float(expected.abs().max())) if len(expected) else scale
        assert torch.allclose(given, expected, rtol=0, atol=TOLERANCE[dtype] * max(scale, 1.0))
    for slot, length in ((0, 41), (1, 42)):
        entries = zip(runner.cache.entries(slot, length), modules.cache.entries(slot, length), strict=True)
        assert all(torch.allclose(one, other, rtol=0, atol=TOLERANCE[dtype] * float(other.abs().max())) for one, other in entries)


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize("family", ["llama", "llama 3, biases", "lfm2"])
def test_what_the_output_layer_read_is_at_hand(family: str, dtype: torch.dtype) -> None:
    model = build((KNOWN | HYBRIDS)[family], dtype)
    weight = model.lm_head.weight.detach().clone()
    runner = ModelRunner(model, 2, 96)
    for batch in batches():
        logits = runner.forward(batch)
        assert runner.hidden is not None and len(runner.hidden) >= len(logits)
        hidden = torch.from_numpy(runner.hidden[: len(logits)].copy()).view(dtype)
        assert torch.allclose(hidden @ weight.T, logits, atol=TOLERANCE[dtype] * float(weight.abs().max()) * 8)
    runner.model.register_forward_pre_hook(lambda *_: None)
    runner.forward(batches()[0])
    assert runner.hidden is None  # computed by the modules


@pytest.mark.slow
@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "qwen3", "granite 4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("lfm2", "qwen3.5"))],
)
def test_every_row_has_the_same_bits(family: str, number: int, dtype: torch.dtype, threads: None) -> None:
    torch.set_num_threads(number)
    runner = ModelRunner(build((KNOWN | HYBRIDS)[family], dtype), 2, 400)
    assert runner._whole is not None and exactness.check(runner) is None


def test_one_slot_is_enough_to_look_for_that() -> None:
    assert exactness.check(ModelRunner(build(HYBRIDS["lfm2"], torch.float32), 1, 400)) is None


@pytest.mark.parametrize("rows", [600, 2])
def test_there_is_room_for_more_rows_than_at_first(rows: int) -> None:
    model = build(KNOWN["llama"], torch.float32, max_position_embeddings=1024)
    runner, modules = (ModelRunner(model, 1, 800) for _ in range(2))
    modules._whole = None
    tokens = np.arange(rows, dtype=np.int32) % 300
    for batch in (pack([ScheduledDummy(DummySequence(0, tokens), 0, rows, _tree(int(tokens[-1])))]), batches()[0]):
        assert torch.allclose(runner.forward(batch), modules.forward(batch), atol=1e-3)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"hidden_act": "gelu"}), ("llama", {"head_dim": 24}), ("llama", {"hidden_size": 72, "num_attention_heads": 8}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)  # fmt: skip
def test_what_it_does_not_compute_is_left_to_the_modules(family: str, changes: dict[str, object]) -> None:
    runner = ModelRunner(build(KNOWN[family], torch.float32, **changes), 1, 64)
    assert runner._whole is None and FusedForward.over(runner.model, runner.cache, {}) is None
    assert len(runner.forward(batches()[0])) == 0
