"""Forwards of fixed shapes against those of any shape: on a CPU without graphs and in float64, on a GPU as they are served."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import count

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from outrider.decoding.drafters.registry import STRATEGIES, build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import DraftTree
from outrider.engine.cuda.static_runner import StaticRunner, StaticStep
from outrider.engine.cuda.step_buffers import StepBuffers, longest_path
from outrider.engine.forward.attention import TREE_ATTENTION, tree_attention
from outrider.engine.forward.batch import ScheduledRequest, cut, pack
from outrider.engine.forward.runner import ModelRunner, kv_shape
from outrider.engine.forward.runners import compile_layers
from outrider.engine.kv.kv_cache import SlotCache
from tests.helpers.attention_reference import ReferenceAttention
from tests.helpers.models import (
    CONTEXT,
    FAMILIES,
    MAX_DRAFT,
    SLOTS,
    VOCAB,
    engine_over,
    prepared,
    random_tree,
    run,
    tiny_model,
    tree_of,
)

SIZES = (1, 3, 8, 40)
CAPACITY = CONTEXT + MAX_DRAFT
FAMILY_NAMES = sorted(FAMILIES)


@cache
def static_runner(family: str, fixed_rows: int | None = None) -> StaticRunner:
    model = deepcopy(tiny_model(family, "float64").runner.model)
    return StaticRunner(model, SLOTS, CAPACITY, fixed_rows, SIZES, ReferenceAttention)


def works(rng: np.random.Generator) -> list[list[ScheduledRequest]]:
    """Steps of three requests, one after another: prefills, trees below them, trees alone, roots alone, all sizes and more."""
    requests = []
    for slot, length in enumerate((9, 23, 1)):
        request = Request(str(slot), rng.integers(0, VOCAB, length), SamplingParams(max_tokens=60))
        request.slot = slot + 1
        requests.append(request)
    a, b, c = requests
    none: frozenset[int] = frozenset()
    return [
        [ScheduledRequest(a, 0, 8, None, none), ScheduledRequest(b, 0, 5, None, none)],  # 13 rows without logits
        [
            ScheduledRequest(b, 5, 23, random_tree(rng, b.root, 6, 4), none),
            ScheduledRequest(c, 0, 1, random_tree(rng, c.root, 2, 4), none),
        ],
        [ScheduledRequest(a, 8, 9, random_tree(rng, a.root, 30, 4), none)],
        [ScheduledRequest(a, 8, 9, DraftTree.chain(a.root, [4, 5]), none)],
        [ScheduledRequest(one, one.num_tokens - 1, one.num_tokens, DraftTree.chain(one.root, []), none) for one in requests],
        [ScheduledRequest(a, 0, 9, random_tree(rng, a.root, 40, 4), none)],  # more than the largest size
        [ScheduledRequest(b, 22, 23, DraftTree.chain(b.root, []), none)],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("fixed_rows", [None, 7])
def test_logits_are_those_of_a_forward_of_any_shape(family: str, fixed_rows: int | None) -> None:
    static, usual = static_runner(family, fixed_rows), tiny_model(family, "float64").runner
    for step in works(np.random.default_rng(3)):
        batch = pack(step)
        expected = usual.forward(batch)
        given = static.forward(batch)
        assert given.shape == expected.shape
        assert torch.allclose(given, expected, atol=1e-9, rtol=0), len(batch.token_ids)
    told = {window for step in static._steps.values() for window in step.windows.values()}
    assert (told != {None}) == (family in ("mistral", "qwen2", "phi3", "gemma2", "gemma3"))  # those with windows


@pytest.mark.parametrize("rows", [1, 5, 16, 64])
def test_parts_of_a_batch_compute_what_the_batch_does(rows: int) -> None:
    runner = tiny_model("llama", "float64").runner
    for step in works(np.random.default_rng(4)):
        batch = pack(step)
        whole = runner.forward(batch)
        logits, seen = torch.full_like(whole, float("nan")), 0
        for part, places in cut(batch, rows):
            assert 0 < len(part.token_ids) <= rows
            logits[torch.from_numpy(places)] = runner.forward(part)
            seen += len(part.token_ids)
        assert seen == len(batch.token_ids)
        assert torch.allclose(logits, whole, atol=1e-9, rtol=0)  # not equal where one is NaN: each is computed


def test_what_all_rows_of_a_part_see_counts_as_committed() -> None:
    request = Request("a", list(range(1, 101)), SamplingParams(max_tokens=9))
    request.slot = 0
    batch = pack([ScheduledRequest(request, 0, 100, random_tree(np.random.default_rng(1), request.root, 5, 4), frozenset())])
    first, second = (part for part, _ in cut(batch, 64))
    assert (first.segments[0].start, second.segments[0].start, second.segments[0].before) == (0, 64, ())
    assert longest_path(first) == 64 and longest_path(second) <= 40
    third = [part for part, _ in cut(batch, 102)][-1].segments[0]
    assert third.rows == 2 and third.start >= 100 and third.start + len(third.before) == 102


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["autoregressive", "llma", "trie", "jacobi", "auto", "recycling", "racer", "adapld"])
@pytest.mark.parametrize("fixed_rows", [None, 7])
def test_outputs_are_those_of_plain_decoding(strategy: str, fixed_rows: int | None) -> None:
    assert strategy in STRATEGIES
    model = tiny_model("llama", "float64")
    rng, ids = np.random.default_rng(7), count()
    motif = rng.integers(1, 40, 12).tolist()
    prompts = [motif * 3, [3], rng.integers(1, VOCAB, 40).tolist()]
    samplings = [{}, {"temperature": 0.9, "seed": 4}, {"temperature": 0.6, "top_p": 0.8, "seed": 5, "logprobs": 2}]

    def requests() -> list[Request]:
        pairs = zip(prompts, samplings, strict=True)
        return [Request(str(next(ids)), p, SamplingParams(max_tokens=30, **s), [motif * 2]) for p, s in pairs]  # type: ignore[arg-type]

    plain = engine_over(model.runner, prepared(build_drafter("autoregressive", {}), model))
    expected = [output for request in requests() for output in run(plain, request)]
    engine = engine_over(static_runner("llama", fixed_rows), prepared(build_drafter(strategy, {}), model))
    assert run(engine, *requests()) == expected


def test_a_path_that_is_longer_than_any_before() -> None:
    runner, usual = static_runner("llama", 7), tiny_model("llama", "float64").runner
    request = Request("a", [1, 2, 3], SamplingParams(max_tokens=40))
    request.slot = 0
    deep = tree_of(range(3, 33), [-1, *range(28), 0])  # one long branch, and a row beside it: no chain
    batch = pack([ScheduledRequest(request, 0, 3, deep, frozenset())])
    assert torch.allclose(runner.forward(batch), usual.forward(batch), atol=1e-9, rtol=0)


def test_buffers_refuse_what_does_not_fit() -> None:
    buffers = StepBuffers(4, 2, 2, 4, torch.device("cpu"))
    request = Request("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=4))
    request.slot = 0
    with pytest.raises(AssertionError):
        buffers.fill(pack([ScheduledRequest(request, 0, 5, None, frozenset())]))
    buffers.fill(pack([ScheduledRequest(request, 0, 4, None, frozenset())]))
    with pytest.raises(AssertionError):
        StepBuffers(4, 2, 2, 3, torch.device("cpu")).fill(pack([ScheduledRequest(request, 0, 4, None, frozenset())]))
    rows = buffers.step_rows
    assert rows.tiles.tolist() == [[0, 2], [2, 2], [0, 0], [0, 0]] and rows.position.tolist() == [0, 1, 2, 3]
    buffers.fill(pack([ScheduledRequest(request, 4, 5, DraftTree.chain(5, []), frozenset())]))
    assert rows.tiles.tolist() == [[0, 1], [0, 0], [0, 0], [0, 0]] and rows.position.tolist() == [4, -1, -1, -1]
    assert rows.entry[0] == 4 and rows.path[0, 0] == 4 and rows.start[0] == 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_graphs_compute_what_the_model_does(dtype: torch.dtype) -> None:
    model = deepcopy(tiny_model("llama", "float32").runner.model).to(device="cuda", dtype=dtype)
    usual = ModelRunner(deepcopy(model), SLOTS, CAPACITY)
    exact = ModelRunner(deepcopy(model).double(), SLOTS, CAPACITY)
    graphs = StaticRunner(model, SLOTS, CAPACITY, sizes=SIZES)
    graphs.prepare()
    assert all(step._graph is not None for step in graphs._steps.values())  # each was captured
    for step in works(np.random.default_rng(3)):
        batch = pack(step)
        right = exact.forward(batch).float()
        for _ in range(2):  # a replay finds what it needs again
            given = graphs.forward(batch).float()
            # As near to the right numbers as the usual forward is, which rounds as often.
            bound = 4 * (usual.forward(batch).float() - right).abs().max() + 1e-4
            assert (given - right).abs().max() <= bound if len(right) else given.shape == right.shape


@pytest.mark.slow
def test_compiled_layers_compute_the_same() -> None:
    usual = tiny_model("llama", "float64").runner
    model = deepcopy(usual.model)
    assert compile_layers(model, "aot_eager") == model.config.num_hidden_layers
    try:
        static = StaticRunner(model, SLOTS, CAPACITY, None, SIZES, ReferenceAttention)
        for step in works(np.random.default_rng(3)):
            batch = pack(step)
            assert torch.allclose(static.forward(batch), usual.forward(batch), atol=1e-9, rtol=0)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        request = works(np.random.default_rng(5))[0][0].request
        for rows in (5, 6, 7):  # nothing is compiled anew
            static.forward(pack([ScheduledRequest(request, 0, rows, None, frozenset())]))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    finally:
        AttentionInterface.register(TREE_ATTENTION, tree_attention)
        torch.compiler.reset()


class NoAttention(ReferenceAttention):
    """Computes nothing."""

    def attend(self, *args: object, **kwargs: object) -> None:
        """See ``SlotAttention``."""


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_nothing_in_a_forward_waits_for_the_device(family: str) -> None:
    """Tensors without numbers raise where anything asks for one; a capture would raise there, too."""
    model = deepcopy(tiny_model(family, "float64").runner.model).to("meta")
    cache = SlotCache(kv_shape(model), SLOTS, CAPACITY)
    step = StaticStep(
        model, cache, StepBuffers(8, 4, SLOTS, 8, torch.device("meta")), NoAttention(kv_shape(model), 4, 8, CAPACITY), True
    )
    with torch.inference_mode():
        if family != "mixtral":
            assert step._forward().shape == (8, VOCAB)
            return
        with pytest.raises(NotImplementedError, match="nonzero"):  # in float64: who goes to which expert
            step._forward()
