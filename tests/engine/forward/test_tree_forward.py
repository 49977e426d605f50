"""The tree forward against one plain forward per path, and the KV after compaction against a fresh prefill, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import DraftTree
from outrider.engine.forward.batch import ScheduledRequest, pack
from tests.helpers.models import FAMILIES, VOCAB, TinyModel, random_tree, tiny_model

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
    ours = model.runner.forward(pack([ScheduledRequest(alone, 0, len(tokens), DraftTree.chain(alone.root, ()), frozenset())]))[0]
    assert torch.allclose(ours, stock, atol=1e-5)  # transformers' eager attention has its softmax in float32
    return ours


def tree_with_a_window(rng: np.random.Generator, root: int, rows: int) -> DraftTree:
    """The last row may not be accepted."""
    return replace(random_tree(rng, root, rows), num_candidates=rows - 1)


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
    runner.forward(pack([ScheduledRequest(first, 0, first.num_tokens - 1, None, frozenset())]))
    first.num_computed = first.num_tokens - 1
    second = requests[1]
    runner.forward(pack([ScheduledRequest(second, 0, 5, None, frozenset())]))
    runner.forward(pack([ScheduledRequest(second, 5, 18, None, frozenset())]))
    second.num_computed = 18
    works = [ScheduledRequest(r, r.num_computed, r.num_tokens, tree_with_a_window(rng, r.root, 8), frozenset()) for r in requests]
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
    runner.forward(pack([ScheduledRequest(request, 0, request.num_tokens - 1, None, frozenset())]))
    computed = request.num_tokens - 1
    assert request.slot is not None
    for _ in range(4):
        tree = tree_with_a_window(rng, request.root, 9)
        runner.forward(pack([ScheduledRequest(request, computed, request.num_tokens, tree, frozenset())]))
        deepest = int(np.argmax(tree.depths()[: tree.num_candidates]))
        path = tree.path(deepest)
        runner.cache.compact(request.slot, computed, (0, *path))
        computed += 1 + len(path)
        request.commit([*tree.tokens[path].tolist(), int(rng.integers(VOCAB))])
    fresh = Request("fresh", request.tokens[:computed], SamplingParams(max_tokens=1))
    fresh.slot = 0
    runner.forward(pack([ScheduledRequest(fresh, 0, computed, None, frozenset())]))
    for ours, expected in zip(runner.cache.entries(request.slot, computed), runner.cache.entries(0, computed), strict=True):
        assert torch.allclose(ours, expected, atol=TOLERANCE, rtol=0)
