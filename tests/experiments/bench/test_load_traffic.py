"""Loops of arrivals against real engines and transformers' batching, and the numbers that are made of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.cli.generate.strategy_option import parse_strategy
from configs.slices import EngineOptions, ModelOptions
from engine.loading.model import load_model
from experiments.bench.engines.contestants import Prompt, make_request
from experiments.bench.engines.measures import full_load_s, measured, rows_of_a_cell
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.engines.stock_batching import StockBatching
from experiments.bench.engines.stock_generate import StockGenerate
from experiments.bench.engines.traffic import ClosedLoop, EngineServer, Journey, OpenLoop, Server, ServerCounts, drive, poisson

MAX_TOKENS = 10
PROMPTS = [Prompt(f"p/{i}", [5 + i, 6, 7, 8, 5 + i, 6, 7][: 3 + i % 5], []) for i in range(7)]


@pytest.fixture(scope="module")
def stock(tiny_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def expected(stock: PreTrainedModel) -> dict[str, list[int]]:
    generate = StockGenerate(stock, MAX_TOKENS, (0,))
    return {prompt.id: generate.run([prompt]).outputs[0] for prompt in PROMPTS}


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> SharedModel:
    loaded = load_model(ModelOptions(str(tiny_model), dtype="float32"))
    return SharedModel(loaded, EngineOptions(max_running=3, max_waiting=20), budget=8)


def our_server(shared: SharedModel, strategy: str = "llma") -> EngineServer:
    return EngineServer(strategy, partial(shared.engine, parse_strategy(strategy)), partial(make_request, max_tokens=MAX_TOKENS))


def most_in_flight(journeys: list[Journey]) -> int:
    """The most requests that were under way at the moment one was sent, itself included."""
    return max(sum(j.sent_s <= own.sent_s < j.last_s for j in journeys) for own in journeys)


def test_every_server_answers_a_closed_loop_as_generate_does(
    shared: SharedModel, stock: PreTrainedModel, expected: dict[str, list[int]]
) -> None:
    servers: list[Server] = [our_server(shared), StockBatching(stock, MAX_TOKENS, (0,), 3, 64)]
    for server in servers:
        for _ in range(2):  # begun again, it begins anew
            journeys, counts = drive(server, PROMPTS, ClosedLoop(3))
            assert {journey.key: journey.output for journey in journeys} == expected, server.name
            assert all(journey.finished and journey.arrival_s <= journey.sent_s <= journey.first_s for journey in journeys)
            assert most_in_flight(journeys) == 3
            run = measured(journeys, counts, closed=True)
            assert run["output_tokens"] == sum(map(len, expected.values())) and run["tokens_per_step"] >= 1.0
            assert (run["drafted_per_step"] is not None) == (server.name == "llma")


def test_an_open_loop_sends_when_requests_are_due(shared: SharedModel, expected: dict[str, list[int]]) -> None:
    times = (0.0, 0.0, 0.0, 0.0, 0.05, 0.06, 0.3)
    journeys, counts = drive(our_server(shared), PROMPTS, OpenLoop(times))
    assert tuple(journey.arrival_s for journey in journeys) == times
    assert all(journey.sent_s >= journey.arrival_s for journey in journeys) and journeys[-1].first_s > 0.3
    assert {journey.key: journey.output for journey in journeys} == expected
    assert measured(journeys, counts, closed=False)["wall_s"] > 0.3


def test_a_new_engine_reuses_nothing_of_the_former_one(shared: SharedModel) -> None:
    long = [Prompt(name, [9, 8, 7, 6] * 12, []) for name in ("first", "again")]
    for _ in range(2):
        _, counts = drive(our_server(shared, "autoregressive"), long[:1], ClosedLoop(1))
        assert counts.cached_tokens == 0
    _, counts = drive(our_server(shared, "autoregressive"), long, ClosedLoop(1))
    assert counts.cached_tokens == 47  # all of the second prompt but its root


def test_batching_that_fails_says_so(stock: PreTrainedModel) -> None:
    batching = StockBatching(stock, 4, (), 1, 64)
    with pytest.raises(RuntimeError, match="continuous batching"):
        drive(batching, [Prompt("long", [5] * 4000, [])], ClosedLoop(1))
    journeys, _ = drive(batching, PROMPTS[:2], ClosedLoop(2))
    assert [len(journey.output) for journey in journeys] == [4, 4]


def test_arrivals_are_a_poisson_process_of_the_seed() -> None:
    times = poisson(4.0, 4000, 7).times_s
    assert times == poisson(4.0, 4000, 7).times_s != poisson(4.0, 4000, 8).times_s
    assert np.allclose(poisson(8.0, 4000, 7).times_s, np.array(times) / 2)
    gaps = np.diff(times)
    assert (gaps > 0).all() and 0.23 < gaps.mean() < 0.27 and 0.23 < gaps.std() < 0.27


def journey(key: str, sent_s: float, moments: list[tuple[float, int, int]]) -> Journey:
    return Journey(key, sent_s, sent_s, moments, [1] * sum(tokens for _, tokens, _ in moments), True)


def test_throughput_is_that_of_the_time_with_all_clients() -> None:
    journeys = [
        journey("a", 0.0, [(1.0, 1, 0), (2.0, 3, 6)]),
        journey("b", 0.0, [(1.0, 1, 0), (4.0, 1, 2)]),  # the first client without a new request: 4.0
        journey("c", 2.0, [(3.0, 1, 0), (6.0, 4, 4)]),
    ]
    assert full_load_s(journeys) == 4.0
    run = measured(journeys, ServerCounts(steps=6, tells_drafts=True), closed=True)
    assert (run["tokens_per_s"], run["span_s"], run["wall_s"], run["decode_s"]) == (7 / 4, 4.0, 6.0, 7.0)
    assert run["requests_per_s"] == round(7 / 4 / (11 / 3), 3)
    assert (run["tokens_per_step"], run["drafted_per_step"], run["drafted_per_request_step"]) == (round(11 / 6, 3), 2.0, 2.0)
    assert run["ttft_ms"] == {"p50": 1000.0, "p99": 1000.0, "mean": 1000.0}
    assert run["tpot_ms"]["p50"] == 750.0 and run["e2e_ms"]["mean"] == round(1e3 * 10 / 3, 2)
    assert measured(journeys, ServerCounts(), closed=False)["tokens_per_s"] == round(11 / 6, 2)


def test_ratios_are_those_of_the_same_repeat() -> None:
    def run(speed: float, e2e: float) -> dict[str, object]:
        half = {"p50": e2e, "p99": e2e, "mean": e2e}
        same = {"requests_per_s": 1.0, "tokens_per_step": 1.0, "drafted_per_step": None, "drafted_per_request_step": None}
        return same | {
            "tokens_per_s": speed,
            "ttft_ms": half,
            "tpot_ms": half,
            "e2e_ms": half,
            "cached_tokens": None,
            "decode_s": e2e / 2,
        }

    rows = rows_of_a_cell({"plain": [run(10, 4), run(20, 2)], "auto": [run(20, 2), run(30, 1)], "one": [run(5, 8)]}, "plain")
    assert (rows["auto"]["ratio"], rows["auto"]["e2e_ratio"], rows["auto"]["tokens_per_s"]) == ([2.0, 1.5], [2.0, 2.0], 25)
    assert (rows["one"]["ratio"], rows["one"]["drafted_per_step"], rows["plain"]["ratio_median"]) == ([0.5], None, 1.0)
    assert rows["one"]["decode_ratio"] == [0.5] and rows["auto"]["decode_ratio"] == [2.0, 2.0]
