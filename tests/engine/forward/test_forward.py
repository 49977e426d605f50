"""Forwards: packed rows, trees against plain forwards per path, the KV after compaction, and copies of logits to the host."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.drafters.llma import LlmaDrafter
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams, TokenLogprob
from outrider.decoding.tree import DraftTree
from outrider.engine.executor import LocalExecutor
from outrider.engine.forward.batch import Batch, ScheduledRequest, pack
from outrider.engine.forward.runner import ModelRunner
from tests.helpers.models import FAMILIES, VOCAB, TinyModel, engine_over, prepared, random_tree, tiny_model, tree_of
from tests.helpers.targets import is_chain


@st.composite
def drawn_works(draw: st.DrawFn) -> list[ScheduledRequest]:
    """Requests that decode, with and without drafts, that prefill, and that lag behind."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(0, 99), min_size=2, max_size=9))
        request = Request(str(number), prompt, SamplingParams())
        request.slot = draw(st.integers(0, 20))
        start = draw(st.integers(0, len(prompt) - 1)) if draw(st.booleans()) else len(prompt) - 1
        if draw(st.booleans()):
            rows = draw(st.integers(1, 7))
            parents = [-1] + [draw(st.integers(max(0, i - 2), i - 1)) for i in range(1, rows)]
            tokens = [prompt[-1], *draw(st.lists(st.integers(0, 99), min_size=rows - 1, max_size=rows - 1))]
            found.append(ScheduledRequest(request, start, len(prompt), tree_of(tokens, parents), frozenset()))
        else:
            found.append(ScheduledRequest(request, start, draw(st.integers(start + 1, len(prompt))), None, frozenset()))
    return found


@given(drawn_works())
def test_rows_stand_where_a_walk_puts_them(step: list[ScheduledRequest]) -> None:
    batch = pack(step)
    tokens: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for work, segment, logit_start in zip(step, batch.segments, batch.logit_starts, strict=True):
        offset, spine = len(tokens), work.end - work.start
        tokens += work.request.tokens[work.start : work.end].tolist()
        positions += range(work.start, work.end)
        tree, sees = work.tree, [list(range(row + 1)) for row in range(spine)]
        assert (logit_start is None) == (tree is None)
        if tree is not None:
            assert logit_start == len(logit_rows)
            logit_rows += range(offset + spine - 1, offset + spine - 1 + len(tree))
            tokens += tree.tokens[1:].tolist()
            positions += (work.end - 1 + tree.depths()[1:]).tolist()
            for row in range(1, len(tree)):
                sees.append([*range(spine), *(spine - 1 + above for above in tree.path(row))])
        assert (segment.slot, segment.start, segment.offset, segment.rows) == (work.request.slot, work.start, offset, len(sees))
        if segment.mask is None:
            assert sees == [list(range(row + 1)) for row in range(len(sees))]
        else:
            assert tree is not None and not is_chain(tree) and segment.mask.dtype == np.bool_
            assert [np.flatnonzero(line).tolist() for line in segment.mask] == sees
    assert batch.token_ids.tolist() == tokens and batch.token_ids.dtype == np.int64
    assert batch.positions.tolist() == positions and batch.positions.dtype == np.int64
    assert batch.logit_rows.tolist() == logit_rows and batch.logit_rows.dtype == np.int64


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


SHORT = [5, 6, 7, 5, 6]


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device, and counts the rows that are copied from there."""

    is_cpu = False
    copied: ClassVar[list[int]] = []

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        """The numbers as they are."""
        self.copied.append(1 if self.dim() == 1 else len(self))
        return self.as_subclass(torch.Tensor)  # type: ignore[arg-type]


class FarExecutor(LocalExecutor):
    """Computes as any other; its logits are elsewhere."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.runner = Far(runner)  # type: ignore[assignment]


class Far:
    """A runner's forward whose logits are elsewhere."""

    hidden = None

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.rope = runner, runner.rope

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelRunner``."""
        return self._runner.forward(batch).as_subclass(Elsewhere)  # type: ignore[arg-type]


def far_requests() -> list[Request]:
    """Two greedy ones, a sampled one, and one with log-probabilities."""
    kinds = [{}, {}, {"temperature": 0.8, "top_p": 0.9, "seed": 4}, {"logprobs": 2}]
    return [
        Request(str(at), SHORT, SamplingParams(max_tokens=24, ignore_eos=True, **kind))  # type: ignore[arg-type]
        for at, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("strategy", ["autoregressive", "jacobi"])
def test_only_rows_that_a_choice_looks_at_are_copied(strategy: str) -> None:
    runner = tiny_model("llama", "float32").runner
    outputs = []
    for executor in (LocalExecutor(runner), FarExecutor(runner)):
        asked = far_requests()
        engine = engine_over(runner, build_drafter(strategy, {}), executor=executor)
        for request in asked:
            engine.add(request)
        with torch.inference_mode():
            while engine.has_work:
                Elsewhere.copied.clear()
                emitted = {output.request_id: len(output.token_ids) for output in engine.step()}
                if executor.runner is not runner:
                    looked_at = emitted.get("2", 0) + emitted.get("3", 0)
                    assert sum(Elsewhere.copied) == looked_at  # a row for each token
                    assert len(Elsewhere.copied) <= 1 + max(0, looked_at - 2)  # the roots of both at once
        outputs.append([request.output_ids.tolist() for request in asked])
        drafted = sum(request.stats.drafted for request in asked[2:])
        assert drafted > 0 or strategy == "autoregressive"
    assert outputs[0] == outputs[1]


RNG = np.random.default_rng(4)
PROMPT = RNG.integers(1, VOCAB, 110).tolist()  # more than one part of _TOGETHER, and several chunks


def reference(prompt: list[int]) -> torch.Tensor:
    """[n - 1, vocab] log-probabilities of the tokens behind each of the first n - 1."""
    with torch.inference_mode():
        logits = tiny_model("llama", "float32").stock(torch.tensor([prompt])).logits[0, :-1]
    return torch.log_softmax(logits, -1)


def check(scores: tuple[TokenLogprob, ...] | None, prompt: list[int], count: int) -> None:
    """The scores are those of the stock model."""
    expected = reference(prompt)
    assert scores is not None and [entry.token_id for entry in scores] == prompt[1:]
    for entry, row in zip(scores, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert len(entry.top) == count
        assert [value for _, value in entry.top] == pytest.approx(torch.topk(row, count).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("step_tokens", [16, 512])
def test_scores_are_the_stock_models(step_tokens: int) -> None:
    model = tiny_model("llama", "float32")
    engine = engine_over(model.runner, prepared(LlmaDrafter(), model), step_tokens=step_tokens)
    requests = [
        Request("before", PROMPT, SamplingParams(4), tenant="t"),  # whose KV is there, and is not used
        Request("scored", PROMPT, SamplingParams(9), [PROMPT], tenant="t", prompt_logprobs=3),
        Request("beside", PROMPT[::-1], SamplingParams(9), tenant="t"),
        Request("short", PROMPT[:1], SamplingParams(9), prompt_logprobs=0),
        Request("resumed", PROMPT[:20], SamplingParams(9), emitted=[5, 6], prompt_logprobs=0),
    ]
    told: dict[str, list[tuple[TokenLogprob, ...] | None]] = {request.request_id: [] for request in requests}
    for request in requests[:1]:
        engine.add(request)
    while engine.has_work:
        engine.step()
    for request in requests[1:]:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            told[output.request_id].append(output.prompt_logprobs)
        engine.check_integrity()
    check(told["scored"][0], PROMPT, 3)
    assert told["short"][0] == ()
    later = [scores for name, found in told.items() for scores in found[name in ("scored", "short") :]]
    assert later and not any(scores is not None for scores in later)
    assert requests[1].stats.cached_tokens == 0
    assert requests[1].output_ids.tolist()[:4] == requests[0].output_ids.tolist()


def test_a_preempted_request_is_scored_once() -> None:
    model = tiny_model("llama", "float32")
    engine = engine_over(model.runner, prepared(LlmaDrafter(), model), batch=1, step_tokens=16)
    scored = Request("scored", PROMPT, SamplingParams(3), priority=1, prompt_logprobs=1)
    engine.add(scored)
    for _ in range(3):
        assert engine.step() == []
    urgent = Request("urgent", PROMPT[:5], SamplingParams(2), priority=0)
    engine.add(urgent)
    told = []
    while engine.has_work:
        told += [output.prompt_logprobs for output in engine.step() if output.request_id == "scored"]
    assert scored.stats.preemptions == 1
    check(told[0], PROMPT, 1)
