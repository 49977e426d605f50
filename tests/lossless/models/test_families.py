"""The families of ``families.json``, of which ``docs/models.md`` is made: each says what transformers says, or is refused.

A family is a tiny random model of transformers' own class. What is served is compared with ``generate`` step by step, and drafts,
prompts in pieces, several requests at once and reused prefixes with plain decoding, token for token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.configs.slices import EngineOptions, ModelOptions
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.cpu.linear import has_kernels
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.runners import make_runner
from outrider.engine.loading import memory
from outrider.engine.loading.model import load_model
from tests.helpers.models import (
    CONTEXT,
    MAX_DRAFT,
    SLOTS,
    VOCAB,
    TinyTarget,
    engine_over,
    llama_config,
    nearly,
    run,
    save_model,
)

FAMILIES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8"))
MAX_TOKENS = 32
_NEAR = 0.3  # of the deviation of a row's logits: two that are so near in bfloat16 may change places
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # as may nearly even ones of these
_RNG = np.random.default_rng(5)
_MOTIF = _RNG.integers(1, 40, 15).tolist()
PROMPTS = ([7], [1, 2, 3, 4] * 6 + [1, 2], _MOTIF * 2 + _MOTIF[:7], _RNG.integers(1, VOCAB, 60).tolist())


def config_of(family: dict[str, Any]) -> PreTrainedConfig:
    kind = getattr(transformers, family["config"])
    config: PreTrainedConfig = kind(**deepcopy(family["settings"]))
    return config


def models_of(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The stock model, and one with tree attention and the same weights."""
    torch.manual_seed(1)
    stock, tree = (
        AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32, attn_implementation=attention)
        for attention in ("eager", TREE_ATTENTION)
    )
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0, 2)  # so that they weigh
    tree.load_state_dict(stock.state_dict())
    stock.set_experts_implementation("eager")  # as the runner does
    stock.generation_config.eos_token_id = None
    return stock.to(dtype).eval(), tree.to(dtype).eval()


def requests(answers: Sequence[Sequence[int]] = (), tenant: str | None = None) -> list[Request]:
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [
        Request(str(at), prompt, params, [nearly(answer) for answer in answers[at : at + 1]], tenant=tenant)
        for at, prompt in enumerate(PROMPTS)
    ]


def drafter(runner: ModelRunner, name: str) -> Drafter:
    made = build_drafter(name, {})
    made.prepare(TinyTarget(runner))
    return made


def check_generate(stock: PreTrainedModel, outputs: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
    """Outputs are those of transformers; in bfloat16 up to the first token, or expert, that was nearly another one."""
    routed = any(getattr(stock.config, name, None) for name in _EXPERTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        fresh = deepcopy(stock)  # dynamic rope goes on with the frequencies of the text before
        with torch.inference_mode():
            given = fresh.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=MAX_TOKENS, do_sample=False,
                pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        expected = given.sequences[0, len(prompt) :].tolist()
        if dtype == torch.float32:
            assert output == expected
        elif output != expected and not routed:
            at = next(at for at, pair in enumerate(zip(output, expected, strict=True)) if pair[0] != pair[1])
            logits = given.logits[at][0].float()
            assert logits[expected[at]] - logits[output[at]] <= _NEAR * logits.std(), (at, output, expected)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(
            each,
            dtype,
            id=f"{str(dtype).removeprefix('torch.')}-{each['family']}",
            marks=() if each.get("each_time") else pytest.mark.proof,
        )
        for each in FAMILIES
        for dtype in (torch.float32, torch.bfloat16)
        if "refused" not in each
    ],
)
def test_a_family_says_what_transformers_says(family: dict[str, Any], dtype: torch.dtype) -> None:
    stock, tree = models_of(config_of(family), dtype)
    runner = make_runner(tree, CONTEXT + MAX_DRAFT, EngineOptions(max_running=SLOTS))
    if has_kernels(runner.model.device, dtype):
        assert runner.fixed_rows == family.get("rows", {}).get(str(dtype).removeprefix("torch."))
        assert (runner._whole is not None) == family.get("one_call", False)
    plain = run(engine_over(runner, build_drafter("autoregressive", {}), 1), *requests())
    assert len({tuple(output) for output in plain}) == len(PROMPTS)
    check_generate(stock, plain, dtype)
    drafted = requests(plain)
    assert run(engine_over(runner, drafter(runner, "llma")), *drafted) == plain
    assert sum(request.stats.accepted for request in drafted) > 0
    engine = engine_over(runner, drafter(runner, "auto"), 3, step_tokens=24)  # prompts in pieces
    assert run(engine, *requests(plain, tenant="a")) == plain
    again = requests(plain, tenant="a")[::-1]
    assert run(engine, *again) == plain[::-1]
    assert again[0].stats.cached_tokens > 0


@pytest.mark.parametrize("family", [pytest.param(each, id=each["family"]) for each in FAMILIES if "refused" in each])
def test_what_cannot_be_served_is_refused_from_its_configuration(family: dict[str, Any], tmp_path: Path) -> None:
    config_of(family).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=family["refused"]) as raised:  # nothing else is in the folder
        load_model(ModelOptions(str(tmp_path)))
    assert "\n" not in str(raised.value)


def test_packed_experts_of_gpt_oss_are_unpacked_and_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint as OpenAI's: experts in MXFP4, which transformers makes bfloat16 where there is no GPU."""
    (family,) = [each for each in FAMILIES if each["family"] == "GPT-OSS"]
    config = config_of(family)
    config.hidden_size = config.intermediate_size = 64
    weights = models_of(config, torch.bfloat16)[0].state_dict()
    random = torch.Generator().manual_seed(0)
    packed: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):  # of each output 32 numbers to a block of 16 bytes and a scale
            experts, size, outputs = weight.shape
            blocks = (experts, outputs, size // 32)
            packed[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8, generator=random)
            packed[f"{name}_scales"] = torch.randint(118, 123, blocks, dtype=torch.uint8, generator=random)
        else:
            packed[name] = weight.contiguous()
    save_model(tmp_path, llama_config())  # its tokenizer stays
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    told = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16", "quantization_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(told))
    loaded = load_model(ModelOptions(str(tmp_path), device="cpu"))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    runner = make_runner(loaded.model, CONTEXT + MAX_DRAFT, EngineOptions(max_running=SLOTS))
    plain = run(engine_over(runner, build_drafter("autoregressive", {}), 1), *requests())
    assert len({tuple(output) for output in plain}) == len(PROMPTS)
    assert run(engine_over(runner, drafter(runner, "llma")), *requests(plain)) == plain
    monkeypatch.setattr(memory, "free_bytes", lambda: (tmp_path / "model.safetensors").stat().st_size + 10_000)
    with pytest.raises(ModelLoadError, match="GiB for its weights"):
        load_model(ModelOptions(str(tmp_path), device="cpu"))
    monkeypatch.undo()
    part = {name: tensor for name, tensor in packed.items() if name != "model.norm.weight"}
    ends = {"_blocks": ".weight_packed", "_scales": ".weight_scale"}
    other = {name[:-7] + ends[name[-7:]] if name[-7:] in ends else name: tensor for name, tensor in packed.items()}
    for tensors, said in ((part, "download all of its files"), (other, "config.json has a different quantization_config")):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=f"lacks .* of its weights, .*{said}"):
            load_model(ModelOptions(str(tmp_path), device="cpu"))
