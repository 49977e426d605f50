"""Counts of an engine for dashboards, and reports of its steps: they agree with the requests' outputs and counters."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.drafters.registry import STRATEGIES, build_drafter
from outrider.decoding.request import FinishReason, Request, SamplingParams, StepOutput
from outrider.decoding.tree import DraftTree
from outrider.engine.engine import Engine
from outrider.engine.measures.metrics import REQUEST_S, EngineMetrics, Histogram, MetricsCounts, one_two_five
from tests.helpers.models import SENTENCES, engine_over, prepared, tiny_model

PROMPT = [10, 20, 30, 10, 20, 40, 10, 20]


def new_engine(strategy: str = "llma", batch: int = 4, step_tokens: int = 256) -> Engine:
    model = tiny_model("llama", "float32")
    return engine_over(model.runner, prepared(build_drafter(strategy, {}), model), batch, step_tokens, strategy=strategy)


def request(name: str, tokens: int = 20, priority: int = 0, **more: object) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, [*PROMPT, len(name) + 3], params, priority=priority, tenant="acme", **more)  # type: ignore[arg-type]


def steps(running: Engine, most: int = 10_000) -> list[list[StepOutput]]:
    """The outputs of each step, until there is nothing to do."""
    done: list[list[StepOutput]] = []
    while running.has_work and len(done) < most:
        done.append(running.step())
    return done


def total(counts: MetricsCounts, name: str) -> tuple[int, float]:
    """Number and sum of a histogram's values."""
    histogram = counts.histograms[name]
    return sum(histogram.counts), histogram.total


@given(st.lists(st.integers(-3, 12).map(lambda value: value / 2), max_size=30))
def test_a_histogram_counts_as_prometheus_does(values: list[float]) -> None:
    histogram = Histogram((0, 1, 2.5, 4))
    for value in values:
        histogram.observe(value)
    counts = histogram.read()
    cumulative = list(itertools.accumulate(counts.counts))
    assert cumulative == [sum(value <= bound for value in values) for bound in counts.bounds] + [len(values)]
    assert counts.total == sum(values)


def test_bounds_of_lengths() -> None:
    assert one_two_five(30) == (1, 2, 5, 10, 20)
    assert one_two_five(1000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert list(REQUEST_S) == sorted(set(REQUEST_S))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=20))
def test_acceptance_by_depth(trees: list[tuple[int, int]]) -> None:
    trees = [(max(drafted, accepted), accepted) for drafted, accepted in trees]
    metrics, asked = EngineMetrics(128), request("a")
    for drafted, accepted in trees:
        metrics.record_output(asked, DraftTree.chain(1, [2] * drafted, 1), accepted + 1, accepted, 0.0)
    metrics.record_output(asked, DraftTree.chain(1, ()), 1, 0, 0.0)  # nothing drafted: no tree
    counts = metrics.read()
    deepest = max((accepted for _, accepted in trees), default=0)
    assert counts.accepted_per_position == tuple(sum(n > depth for _, n in trees) for depth in range(deepest))
    assert (counts.drafts, counts.draft_tokens) == (len(trees), sum(drafted for drafted, _ in trees))
    assert sum(counts.accepted_per_position) == sum(accepted for _, accepted in trees)
    assert counts.generation_tokens == len(trees) + sum(accepted for _, accepted in trees) + 1


@pytest.mark.parametrize("strategy", ["autoregressive", "recycling", "jacobi", "auto"])
def test_totals_are_those_of_the_requests(strategy: str) -> None:
    running = new_engine(strategy, batch=2)
    asked = [request("a" * length, 5 * length) for length in range(1, 6)]
    for one in asked:
        running.add(one)
    done = steps(running)
    counts, emitted = running.metrics(), [len(output.token_ids) for outputs in done for output in outputs]
    assert counts.generation_tokens == sum(emitted) == sum(one.num_output for one in asked)
    assert counts.prompt_tokens == sum(one.num_prompt for one in asked)
    assert counts.steps == len(done)
    shared_s = sum(one.stats.forward_s for one in asked)  # a step counts for each of its requests, two at most
    assert 0 < counts.forward_s <= shared_s * 1.001 and shared_s <= counts.forward_s * 2.001
    assert counts.draft_tokens == sum(one.stats.drafted for one in asked)
    assert sum(counts.accepted_per_position) == sum(one.stats.accepted for one in asked)
    assert counts.accepted_by_source == _sources(asked)
    assert sum(counts.drafted_by_source.values()) == counts.draft_tokens
    assert counts.drafted_by_source.keys() == counts.drafts_by_source.keys() >= counts.accepted_by_source.keys()
    assert all(counts.drafts_by_source[source] <= min(rows, counts.drafts) for source, rows in counts.drafted_by_source.items())
    assert (counts.budget is not None) == (strategy == "auto")
    if counts.budget is not None:
        assert counts.draft_tokens <= counts.budget.granted <= counts.budget.offered and counts.budget.least_chance > 0
        assert counts.budget.asked >= counts.drafts
    assert counts.resident_bytes is None or counts.resident_bytes > 2**20
    assert (counts.draft_tokens == 0) == (strategy == "autoregressive")
    assert counts.rows >= counts.generation_tokens - sum(counts.accepted_per_position) + counts.draft_tokens
    assert counts.finished == {"stop": 0, "length": 5, "abort": 0, "error": 0}
    assert total(counts, "request_prompt_tokens") == (5, counts.prompt_tokens)
    assert (
        total(counts, "request_generation_tokens") == total(counts, "request_params_max_tokens") == (5, counts.generation_tokens)
    )
    assert total(counts, "time_to_first_token_seconds")[0] == 5
    assert total(counts, "inter_token_latency_seconds")[0] == len(emitted) - 5
    assert total(counts, "iteration_tokens_total")[0] == len(done)


def _sources(asked: Sequence[Request]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in asked:
        for source, tokens in one.stats.accepted_by_source.items():
            found[source] = found.get(source, 0) + tokens
    return found


def test_times_add_up() -> None:
    running = new_engine(batch=1)
    for name in ("a", "bb", "ccc"):
        running.add(request(name))
    steps(running)
    counts = running.metrics()
    sums = {name: total(counts, name)[1] for name in counts.histograms}
    queue, prefill, decode = (sums[f"request_{name}_time_seconds"] for name in ("queue", "prefill", "decode"))
    assert sums["e2e_request_latency_seconds"] == pytest.approx(queue + prefill + decode)
    assert sums["request_inference_time_seconds"] == pytest.approx(prefill + decode)
    assert sums["time_to_first_token_seconds"] == pytest.approx(queue + prefill)
    assert sums["inter_token_latency_seconds"] == pytest.approx(decode)
    assert sums["request_time_per_output_token_seconds"] == pytest.approx(decode / 19)
    assert min(queue, prefill, decode) > 0


def test_tokens_of_a_step_with_chunks_of_a_prompt() -> None:
    running = new_engine("autoregressive", step_tokens=16)
    running.add(Request("a", np.arange(1, 41), SamplingParams(max_tokens=3, ignore_eos=True)))
    done = steps(running)
    assert [sum(len(output.token_ids) for output in outputs) for outputs in done] == [0, 0, 1, 1, 1]
    assert total(running.metrics(), "iteration_tokens_total") == (5, 40 + 3)
    assert running.metrics().rows == 40 + 2


def test_preemption_abort_and_resumption() -> None:
    running = new_engine(batch=1)
    running.add(request("slow", 30, priority=1))
    steps(running, 3)
    running.add(request("urgent", 10))
    running.add(request("gone", 10))
    steps(running, 1)
    assert running.counts().preemptions == 1
    assert running.abort("gone") and not running.abort("gone")
    running.add(request("resumed", 10, emitted=[5, 6, 7]))
    running.add(request("broken", 10, priority=2))
    assert running.abort("broken", FinishReason.ERROR)
    steps(running)
    counts = running.metrics()
    assert counts.finished == {"stop": 0, "length": 3, "abort": 1, "error": 1}
    assert counts.generation_tokens == 30 + 10 + 7  # without the tokens that were emitted elsewhere
    assert counts.prompt_tokens == 2 * len([*PROMPT, 0])
    assert total(counts, "request_generation_tokens") == (3, 50)
    assert total(counts, "time_to_first_token_seconds")[0] == total(counts, "e2e_request_latency_seconds")[0] == 2
    assert counts.history_bytes and new_engine("suffix").metrics().history_bytes is None  # which remembers nothing


def test_any_thread_may_read_and_nothing_falls() -> None:
    running, other = new_engine("auto"), new_engine("auto")
    assert running.metrics().engine != other.metrics().engine
    for name in ("a", "bb", "ccc", "dddd", "eeeee"):
        running.add(request(name, 60))
    seen: list[MetricsCounts] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.append(running.metrics())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        steps(running)
    finally:
        over.set()
        thread.join()
    seen.append(running.metrics())
    assert len(seen) > 2 and seen[-1].generation_tokens == 300
    for before, after in itertools.pairwise(seen):
        assert before.engine == after.engine
        for field in ("prompt_tokens", "generation_tokens", "steps", "rows", "forward_s", "draft_tokens", "drafts"):
            assert getattr(before, field) <= getattr(after, field), field
        for name, histogram in before.histograms.items():
            assert all(a <= b for a, b in zip(histogram.counts, after.histograms[name].counts, strict=True)), name
    assert seen[-1] == running.metrics()


NAMES = {"model", "prompt", "document", "output", "trie", "public", "jacobi", "recycling", "bigram", "unigram"}


def outputs(engine: Engine, name: str, params: SamplingParams, **fields: object) -> list[StepOutput]:
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(SENTENCES[2])
    engine.add(Request(name, prompt, params, [engine.tokenizer.encode(SENTENCES[0])], **fields))  # type: ignore[arg-type]
    found = []
    while engine.has_work:
        found += engine.step()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_reports_agree_with_all_else_that_is_told(engine: Engine, strategy: str, temperature: float) -> None:
    params = SamplingParams(60, temperature=temperature, seed=3, ignore_eos=True)
    plain = outputs(engine, "plain", params, strategy="autoregressive")
    assert all(output.report is None for output in plain)
    told = outputs(engine, f"{strategy}/{temperature}", params, strategy=strategy, tenant="t", report=True)
    reports = [output.report for output in told if output.report is not None]
    assert len(reports) == len(told) == (stats := told[-1].stats).steps  # type: ignore[union-attr]
    assert [token for output in told for token in output.token_ids] == [token for one in plain for token in one.token_ids]
    for output, report in zip(told, reports, strict=True):
        assert len(report.pieces) == len(report.sources) == len(output.token_ids)
        assert "".join(report.pieces) == output.text
        assert "model" not in report.sources[:-1] and set(report.sources) <= NAMES
    assert "".join(output.text for output in told) == "".join(output.text for output in plain)
    assert sum(report.accepted for report in reports) == stats.accepted
    assert sum(report.drafted for report in reports) == stats.drafted
    if strategy == "autoregressive":
        assert {source for report in reports for source in report.sources} == {"model"}


def test_what_another_engine_emitted_is_not_told_again(engine: Engine) -> None:
    params = SamplingParams(40, ignore_eos=True)
    whole = outputs(engine, "whole", params, report=True)
    ids = [token for output in whole for token in output.token_ids]
    rest = outputs(engine, "rest", params, report=True, emitted=ids[:25])
    assert [token for output in rest for token in output.token_ids] == ids[25:]
    told = [source for output in rest if output.report is not None for source in output.report.sources]
    assert len(told) == 15
    pieces = "".join(piece for output in rest if output.report is not None for piece in output.report.pieces)
    assert "".join(output.text for output in whole).endswith(pieces) and pieces
