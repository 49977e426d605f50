"""The tree forward against one plain forward per path, and the KV after compaction against a fresh prefill, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decoding.request import Request, SamplingParams
from decoding.tree import DraftTree
from engine.forward.batch import Work, pack
from tests.models import FAMILIES, VOCAB, TinyModel, tiny_model

LENGTHS = (9, 23, 1)
TOLERANCE = 1e-9


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(request.param, "float64")


def path_logits(model: TinyModel, tokens: list[int]) -> torch.Tensor:
    """What follows ``tokens``, from one forward of their own: by transformers' attention, and by ours where its is less exact."""
    with torch.inference_mode():
        stock = model.stock(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    if model.stock.config._attn_implementation != "eager":
        return stock
    alone = Request("alone", tokens, SamplingParams(max_tokens=1))
    alone.slot = 0
    ours = model.runner.forward(pack([Work(alone, 0, len(tokens), DraftTree.chain(alone.root, ()), frozenset())]))[0]
    assert torch.allclose(ours, stock, atol=1e-5)  # transformers' eager attention has its softmax in float32
    return ours


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


def test_every_row_sees_its_own_path_and_nothing_else(model: TinyModel) -> None:
    runner = model.runner
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
        for row in range(len(work.tree)):  # window rows as well
            path = [*work.request.tokens.tolist(), *work.tree.tokens[work.tree.path(row)].tolist()]
            expected = path_logits(model, path)
            assert torch.allclose(logits[at + row], expected, atol=TOLERANCE, rtol=0), (work.request.request_id, row)


def test_compaction_leaves_the_kv_of_a_fresh_prefill(model: TinyModel) -> None:
    runner = model.runner
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
        assert torch.allclose(ours, expected, atol=TOLERANCE, rtol=0)


def test_pack_lays_rows_side_by_side() -> None:
    request = Request("a", [5, 6, 7], SamplingParams(max_tokens=9))
    request.slot = 2
    tree = DraftTree(np.array([7, 1, 2, 3], np.int32), np.array([-1, 0, 0, 1], np.int32), np.zeros(4, np.int8), 3)
    batch = pack([Work(request, 1, 3, tree, frozenset()), Work(request, 0, 2, None, frozenset())])
    assert batch.token_ids.tolist() == [6, 7, 1, 2, 3, 5, 6]
    assert batch.positions.tolist() == [1, 2, 3, 3, 4, 0, 1]
    assert batch.logit_rows.tolist() == [1, 2, 3, 4] and batch.logit_starts == (0, None)
    assert [(s.slot, s.start, s.offset, s.rows) for s in batch.segments] == [(2, 1, 0, 5), (2, 0, 5, 2)]
    assert batch.segments[1].mask is None and batch.segments[0].mask is not None
    assert batch.segments[0].mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1],
    ]
