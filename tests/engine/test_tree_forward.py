"""The tree forward against one plain forward per path, and the KV after compaction against a fresh prefill, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from decoding.request import Request, SamplingParams
from decoding.tree import DraftTree
from engine.attention import TREE_ATTENTION
from engine.batch import Work, pack
from engine.runner import ModelRunner
from tests.models import VOCAB, llama_config

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": llama_config(),
    "mistral_window": MistralConfig(**SMALL, sliding_window=7),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "gemma3_mixed_windows": Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 6}, head_dim=8, sliding_window=6),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "opt": OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
        word_embed_proj_dim=32,
    ),
}  # fmt: skip
LENGTHS = (9, 23, 1)


@pytest.fixture(params=CONFIGS)
def models(request: pytest.FixtureRequest) -> Iterator[tuple[ModelRunner, torch.nn.Module]]:
    torch.manual_seed(1)
    plain_config, tree_config = deepcopy(CONFIGS[request.param]), deepcopy(CONFIGS[request.param])
    plain = AutoModelForCausalLM.from_config(plain_config, dtype=torch.float64, attn_implementation="sdpa").eval()
    tree = AutoModelForCausalLM.from_config(tree_config, dtype=torch.float64, attn_implementation=TREE_ATTENTION).eval()
    tree.load_state_dict(plain.state_dict())
    return ModelRunner(tree, slots=4, capacity=100), plain


def plain_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def random_tree(root: int, rng: np.random.Generator, rows: int) -> DraftTree:
    parents = [-1] + [int(rng.integers(0, i)) for i in range(1, rows)]
    tokens = rng.integers(0, VOCAB, rows)
    tokens[0] = root
    return DraftTree(
        tokens.astype(np.int32), np.array(parents, np.int32), np.zeros(rows, np.int8), rows - 1 if rows > 2 else rows
    )


def start(rng: np.random.Generator) -> list[Request]:
    requests = []
    for slot, length in enumerate(LENGTHS):
        request = Request(str(slot), rng.integers(0, VOCAB, length), SamplingParams(max_tokens=60))
        request.slot = slot + 1
        requests.append(request)
    return requests


def test_every_row_sees_its_own_path_and_nothing_else(models: tuple[ModelRunner, torch.nn.Module]) -> None:
    runner, plain = models
    rng = np.random.default_rng(3)
    requests = start(rng)
    # The first request decodes, the second recomputes a longer spine, the third is at its first token.
    first = requests[0]
    runner.forward(pack([Work(first, 0, first.num_tokens - 1, None, frozenset())]))
    first.num_computed = first.num_tokens - 1
    second = requests[1]
    runner.forward(pack([Work(second, 0, 5, None, frozenset())]))
    runner.forward(pack([Work(second, 5, 18, None, frozenset())]))
    second.num_computed = 18
    works = [Work(r, r.num_computed, r.num_tokens, random_tree(r.root, rng, 8), frozenset()) for r in requests]
    batch = pack(works)
    logits = runner.forward(batch)
    for work, at in zip(works, batch.logit_starts, strict=True):
        assert work.tree is not None and at is not None
        for row in range(work.tree.num_candidates):
            path = [*work.request.tokens.tolist(), *work.tree.tokens[work.tree.path(row)].tolist()]
            expected = plain_logits(plain, path)
            assert torch.allclose(logits[at + row], expected, atol=1e-7), (work.request.request_id, row)


def test_compaction_leaves_the_kv_of_a_fresh_prefill(models: tuple[ModelRunner, torch.nn.Module]) -> None:
    runner, _ = models
    rng = np.random.default_rng(4)
    request = start(rng)[0]
    runner.forward(pack([Work(request, 0, request.num_tokens - 1, None, frozenset())]))
    computed = request.num_tokens - 1
    assert request.slot is not None
    for _ in range(4):
        tree = random_tree(request.root, rng, 9)
        runner.forward(pack([Work(request, computed, request.num_tokens, tree, frozenset())]))
        deepest = int(np.argmax(tree.depths()[: tree.num_candidates]))
        path = tree.path(deepest)
        runner.cache.compact(request.slot, computed, (0, *path))
        computed += 1 + len(path)
        request.commit([*tree.tokens[path].tolist(), int(rng.integers(VOCAB))])
    fresh = Request("fresh", request.tokens[:computed], SamplingParams(max_tokens=1))
    fresh.slot = 0
    runner.forward(pack([Work(fresh, 0, computed, None, frozenset())]))
    for ours, expected in zip(runner.cache.entries(request.slot, computed), runner.cache.entries(0, computed), strict=True):
        assert torch.allclose(ours, expected, atol=1e-7)


def test_pack_lays_rows_side_by_side() -> None:
    request = Request("a", [5, 6, 7], SamplingParams(max_tokens=9))
    request.slot = 2
    tree = DraftTree(np.array([7, 1, 2, 3], np.int32), np.array([-1, 0, 0, 1], np.int32), np.zeros(4, np.int8), 3)
    batch = pack([Work(request, 1, 3, tree, frozenset()), Work(request, 0, 2, None, frozenset())])
    assert batch.token_ids.tolist() == [6, 7, 1, 2, 3, 5, 6]
    assert batch.positions.tolist() == [1, 2, 3, 3, 4, 0, 1]
    assert batch.logit_rows.tolist() == [1, 2, 3] and batch.logit_starts == (0, None)
    assert [(s.slot, s.start, s.offset, s.rows) for s in batch.segments] == [(2, 1, 0, 5), (2, 0, 5, 2)]
    assert batch.segments[1].mask is None and batch.segments[0].mask is not None
    assert batch.segments[0].mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1],
    ]
