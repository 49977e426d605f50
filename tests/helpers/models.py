"""Tiny random models and adapters, a tokenizer, and engines over them."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    Zamba2Config,
)
from transformers.pytorch_utils import Conv1D

from outrider.configs.slices import EngineOptions
from outrider.decoding.arrays import Int32Array
from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.drafters.by_request import ByRequest
from outrider.decoding.request import Request, StepOutput
from outrider.decoding.tree import DraftTree
from outrider.engine.cpu.linear import has_kernels
from outrider.engine.engine import Engine
from outrider.engine.executor import Executor, LocalExecutor
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.loading.model_tables import bigram_table, unigram_ranking

END = "<|endoftext|>"
VOCAB = 320
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a layer of Llama
CONTEXT = 128  # tokens of prompt and output together, of all models of ``FAMILIES``
MAX_DRAFT = 16  # rows that an engine over a tiny model drafts for one request
SLOTS = 4
# A step of many rows costs little more than one of few.
LIKE_A_GPU = LatencyCurve((1, 64), (0.0101, 0.0164), context=0, sequence_s=0.0, entry_s=0.0)
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A request travels from the door to the engine and back again.",
    "Größe, naïve, 東京, café, emoji 🙂 and other characters that take several bytes.",
)

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_MIXED = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}


def llama_config(**changes: object) -> LlamaConfig:
    """A Llama of two layers with grouped-query attention."""
    settings = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "bos_token_id": None,
        "eos_token_id": 0, "head_dim": 32,
    }  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


# The families whose outputs are proven to be exact. Windows are shorter than the sequences of the tests.
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_GROUPED, initializer_range=0.1, head_dim=32),
    "mistral": MistralConfig(**_GROUPED, initializer_range=0.1, sliding_window=12),
    "qwen2": Qwen2Config(**_GROUPED, initializer_range=0.1, use_sliding_window=True, **_MIXED),
    "qwen3": Qwen3Config(**_GROUPED, initializer_range=0.1, head_dim=16),
    "phi3": Phi3Config(**_GROUPED, initializer_range=0.1, sliding_window=20),
    "opt": OPTConfig(**_COMMON, init_std=0.1, ffn_dim=64, word_embed_proj_dim=48),
    "gpt2": GPT2Config(**_COMMON, initializer_range=0.1),
    "gpt_neox": GPTNeoXConfig(**_COMMON, initializer_range=0.1),
    "glm": GlmConfig(**_GROUPED, initializer_range=0.1, head_dim=12),
    "glm4": Glm4Config(**_GROUPED, initializer_range=0.1, head_dim=12),
    "gemma": GemmaConfig(**_GROUPED, initializer_range=0.1, head_dim=16),
    "gemma2": Gemma2Config(
        **_GROUPED, **_MIXED, initializer_range=0.1, head_dim=16, query_pre_attn_scalar=1, attn_logit_softcapping=1.0
    ),
    "gemma3": Gemma3TextConfig(**_GROUPED, **_MIXED, initializer_range=0.1, head_dim=16, query_pre_attn_scalar=16),
    "mixtral": MixtralConfig(**_GROUPED, initializer_range=0.1, num_local_experts=4, num_experts_per_tok=2),
}


_STATES = {**_GROUPED, "hidden_size": 64, "num_hidden_layers": 4, "initializer_range": 0.15}
_DELTA = {
    **_STATES, "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
_SPACE = {
    **_STATES, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}

# Families some of whose layers keep a state: short convolutions, the gated delta rule, Mamba-2.
HYBRIDS: dict[str, PreTrainedConfig] = {
    "lfm2": Lfm2Config(
        **{**_STATES, "hidden_size": 128}, layer_types=["conv", "full_attention", "conv", "conv"], conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
    ),
    "lfm2_moe": Lfm2MoeConfig(
        **_STATES, layer_types=["conv", "full_attention", "conv", "conv"], conv_L_cache=3, num_dense_layers=1, num_experts=32,
        num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    "qwen3_next": Qwen3NextConfig(**_DELTA, **_EXPERTS, head_dim=16),
    "qwen3_5": Qwen3_5TextConfig(
        **_DELTA, head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**_DELTA, **_EXPERTS, head_dim=16),
    "olmo_hybrid": OlmoHybridConfig(**_DELTA),
    "granite4": GraniteMoeHybridConfig(
        **_SPACE, layer_types=["mamba", "attention", "mamba", "mamba"], num_local_experts=0,
        shared_intermediate_size=64, embedding_multiplier=2.0, residual_multiplier=0.7, logits_scaling=2.0,
        position_embedding_type=None,
    ),
    "granite4_moe": GraniteMoeHybridConfig(
        **_SPACE, layer_types=["mamba", "attention", "mamba", "mamba"], num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=64, embedding_multiplier=1.0, logits_scaling=1.0,
    ),
    "bamba": BambaConfig(**_SPACE, attn_layer_indices=[1]),
    "falcon_h1": FalconH1Config(**_SPACE, mamba_d_ssm=128),
    "nemotron_h": NemotronHConfig(
        **{name: value for name, value in _STATES.items() if name != "num_hidden_layers"},
        layers_block_type=["mamba", "attention", "mamba", "mlp"], mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=16,
        n_groups=2, chunk_size=16, head_dim=16,
    ),
    "zamba2": Zamba2Config(
        **{**_STATES, "num_hidden_layers": 5}, layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"],
        mamba_d_state=16, mamba_ngroups=2, n_mamba_heads=4, mamba_headdim=32, chunk_size=16, num_mem_blocks=1, adapter_rank=8,
        use_mem_rope=True,
    ),
}  # fmt: skip

BORDER = 40  # tokens of a text up to which models of ``ROPES`` have their first frequencies
_FACTORS = {"short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5], "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0]}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": BORDER, **_FACTORS}
_ROPED = {**_GROUPED, "initializer_range": 0.15}

# Families whose frequencies depend on the length of a text. The first two compute it anew when it crosses the border.
ROPES: dict[str, PreTrainedConfig] = {
    "phi3_long": Phi3Config(**_ROPED, original_max_position_embeddings=BORDER, rope_parameters=_LONG),
    "phimoe_long": PhimoeConfig(
        **_ROPED, original_max_position_embeddings=BORDER, num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
        rope_parameters={**_LONG, "short_mscale": 1.1, "long_mscale": 1.6},
    ),
    "llama_long": LlamaConfig(**_ROPED, rope_parameters=_LONG),
    "llama_dynamic": LlamaConfig(
        **{**_ROPED, "max_position_embeddings": BORDER},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
}  # fmt: skip


def redraw_decays(model: PreTrainedModel) -> None:
    """Draws how fast the states of a model forget, which its configuration makes alike for all heads, and too fast to matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            low, high = {"A_log": (-4.0, 0.0), "dt_bias": (-2.0, 1.0), "D": (0.2, 1.0)}.get(name.rpartition(".")[2], (0.0, 0.0))
            if low < high:
                parameter.uniform_(low, high)


# Of the weights. Chosen so that greedy outputs vary, repeat themselves in places, and are nowhere within rounding of a tie.
_SEEDS = {
    "llama": 9, "mistral": 4, "qwen2": 6, "qwen3": 3, "phi3": 1, "opt": 9, "gpt2": 8, "gpt_neox": 10, "glm": 11, "glm4": 9,
    "gemma": 1, "gemma2": 4, "gemma3": 3, "mixtral": 6, **dict.fromkeys((*HYBRIDS, *ROPES), 1),
}  # fmt: skip


# Types for which there is compiled code on a CPU; those for which this one has none are skipped.
COMPILED = [
    pytest.param(dtype, marks=pytest.mark.skipif(not has_kernels(torch.device("cpu"), dtype), reason="no code for it here"))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
]


class TinyTarget:
    """What drafters may ask of a tiny model: its own tables, computed once, and a step time that no clock decides."""

    vocab_size: int = VOCAB
    end_token_ids: tuple[int, ...] = (0,)
    max_model_len: int = CONTEXT

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @cached_property
    def _bigrams(self) -> Int32Array:
        return bigram_table(self._runner, VOCAB, VOCAB, None)

    @cached_property
    def _unigrams(self) -> Int32Array:
        return unigram_ranking(self._runner.model, VOCAB)

    def bigram_table(self, width: int) -> Int32Array:
        """See ``decoding.drafters.base.Target``."""
        return self._bigrams[:, :width].copy()

    def unigram_ranking(self, width: int) -> Int32Array:
        """See ``decoding.drafters.base.Target``."""
        return self._unigrams[:width].copy()

    def latency(self) -> LatencyCurve:
        """See ``decoding.drafters.base.Target``."""
        return LIKE_A_GPU


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A random model twice, with the same weights."""

    stock: PreTrainedModel  # as transformers runs it
    runner: ModelRunner  # with tree attention and ``SLOTS`` slots
    target: TinyTarget


@cache
def tiny_model(family: str, dtype: str) -> TinyModel:
    """A random model of a family; tests share it, one after another.

    Args:
        family: a key of ``FAMILIES``, ``HYBRIDS`` or ``ROPES``.
        dtype: float32, or float64 with the same weights.
    """
    torch.manual_seed(_SEEDS[family])
    config = (FAMILIES | HYBRIDS | ROPES)[family]
    plain = "eager" if family == "gemma2" else "sdpa"  # transformers bounds scores in no other attention
    stock, tree = (
        AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32, attn_implementation=attention)
        for attention in (plain, TREE_ATTENTION)
    )
    if family in HYBRIDS:
        redraw_decays(stock)
    tree.load_state_dict(stock.state_dict())
    stock.generation_config.eos_token_id = 0
    if dtype == "float64":
        stock.set_experts_implementation("eager")  # as the runner does
    stock, tree = (model.to(getattr(torch, dtype)).eval() for model in (stock, tree))
    runner = ModelRunner(tree, SLOTS, CONTEXT + MAX_DRAFT)
    return TinyModel(stock, runner, TinyTarget(runner))


def prepared(drafter: Drafter, model: TinyModel) -> Drafter:
    """The drafter, with what it asks of the model."""
    drafter.prepare(model.target)
    return drafter


def nearly(output: Sequence[int]) -> list[int]:
    """A reference that is right in places: the output with every seventh token changed."""
    return [(token + 1) % VOCAB if at % 7 == 6 else token for at, token in enumerate(output)]


def run(engine: Engine, *requests: Request) -> list[list[int]]:
    """The tokens of requests that are added at once; the engine's integrity is checked after each step."""
    outputs_of(engine, *requests)
    return [request.output_ids.tolist() for request in requests]


def outputs_of(engine: Engine, *requests: Request) -> dict[str, list[StepOutput]]:
    """The outputs, by request id, of these requests and those that the engine held before; otherwise like ``run``."""
    found: defaultdict[str, list[StepOutput]] = defaultdict(list)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].append(output)
        engine.check_integrity()
    return found


def engine_over(
    runner: ModelRunner,
    drafter: Drafter,
    batch: int = SLOTS,
    step_tokens: int = 256,
    strategy: str = "test",
    executor: Executor | None = None,
    prefix_caching: bool = True,
    context: int = CONTEXT,
) -> Engine:
    """An engine over a model that others use as well, one after another; token ids in, token ids out.

    Args:
        runner: of ``tiny_model``.
        drafter: new.
        batch: requests in one step, at most ``SLOTS``.
        step_tokens: rows of one forward.
        strategy: the name to show.
        executor: of the runner, where it is not the plain one.
        prefix_caching: whether requests of a tenant reuse each other's KV.
        context: tokens of prompt and output together.
    """
    info = ModelInfo(
        served_name="tiny", max_model_len=context, vocab_size=VOCAB, dtype=str(runner.model.dtype).removeprefix("torch."),
        device=str(runner.model.device), num_parameters=runner.model.num_parameters(), eos_token_ids=(0,), strategy=strategy,
        lossless=True,
        model_revision="tiny", tokenizer_revision="none",
        strategies=drafter.strategies if isinstance(drafter, ByRequest) else (),
    )  # fmt: skip
    options = EngineOptions(
        max_running=batch, max_step_tokens=step_tokens, scheduling_policy="priority", prefix_caching=prefix_caching
    )
    return Engine(executor or LocalExecutor(runner), drafter, options, MAX_DRAFT, info)


def save_model(folder: Path, config: PreTrainedConfig, seed: int = 0) -> Path:
    """A random model of a configuration, with a byte-level tokenizer of ``VOCAB`` entries."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return folder


def tree_of(tokens: Sequence[int] | Int32Array, parents: Sequence[int]) -> DraftTree:
    """A tree of rows that nobody in particular drafted."""
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(len(parents), np.int8), len(parents))


def random_tree(rng: np.random.Generator, root: int, rows: int, reach: int = CONTEXT) -> DraftTree:
    """Any tokens, each below one of the ``reach`` rows before it."""
    parents = [-1, *(int(rng.integers(max(0, row - reach), row)) for row in range(1, rows))]
    return tree_of([root, *rng.integers(0, VOCAB, rows - 1)], parents)


def draft_with(engine: Engine, drafter: Drafter) -> None:
    """Has an engine without requests draft with another drafter than its strategy's."""
    engine._drafter = engine._planner._drafter = drafter


def save_adapter(
    folder: Path,
    model: PreTrainedModel,
    targets: Sequence[str] = LINEARS,
    rank: int = 4,
    seed: int = 1,
    size: float = 0.25,
    ranks: Mapping[str, int] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """An adapter of a model's layers whose names end so.

    Args:
        folder: is made.
        model: whose layers.
        targets: endings of their names.
        rank: of all but those of which ``ranks`` tells.
        seed: of its numbers.
        size: of the numbers of B.
        ranks: by ending of a name.
        tensors: further ones of the file, or others in the place of those.
        config: further fields of its configuration.
    """
    generator, made = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and name.rpartition(".")[2] in targets:
            outputs, inputs = module.weight.shape if isinstance(module, torch.nn.Linear) else module.weight.t().shape
            own = (ranks or {}).get(name.rpartition(".")[2], rank)
            made[f"base_model.model.{name}.lora_A.weight"] = torch.randn(own, inputs, generator=generator) / math.sqrt(inputs)
            made[f"base_model.model.{name}.lora_B.weight"] = size * torch.randn(outputs, own, generator=generator)
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": list(targets), "bias": "none", "use_dora": False, "modules_to_save": None, "use_rslora": False,
        "lora_dropout": 0.1, "rank_pattern": dict(ranks or {}), "alpha_pattern": {}, "inference_mode": True,
        "init_lora_weights": True,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields | config), encoding="utf-8")
    save_file(made | dict(tensors or {}), folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def merge(model: PreTrainedModel, factors: Mapping[str, Any]) -> PreTrainedModel:
    """Adds what an adapter says (``engine.loading.weights.adapters.Adapter.factors``) to the weights of a model, in place."""
    for name, each in factors.items():
        module = model.get_submodule(name)
        added = (each.down @ each.up).to(module.weight.dtype)
        outputs, inputs = module.weight.shape if isinstance(module, torch.nn.Linear) else module.weight.t().shape
        added = added[:inputs, :outputs]
        module.weight += added.t() if isinstance(module, torch.nn.Linear) else added
    return model
