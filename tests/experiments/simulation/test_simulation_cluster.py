"""Arrivals, a router and replicas in simulated time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from outrider.configs.slices import EngineOptions
from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.drafters.registry import parse_strategy
from outrider.decoding.replay import KnownText
from outrider.experiments.bench.engines.traffic import poisson
from outrider.experiments.simulation.cluster import SimulatedCluster, keyed
from outrider.experiments.simulation.replica import KnownTarget, SimulatedReplica
from outrider.experiments.simulation.steps import Host, StepTimes

FLAT = LatencyCurve((1, 1000), (0.01, 0.01), 0, 0.0, 0.0)  # 10 ms, however many rows
VOCAB = 60


def text(number: int, tokens: int) -> KnownText:
    draws = np.random.default_rng(number).integers(1, VOCAB, tokens + 3).astype(np.int32)
    return KnownText(str(number), draws[:3], (), draws[3:])


def cluster(
    replicas: int, strategy: str = "autoregressive", max_running: int = 8, lag_s: float | None = None, router_s: float = 0.0
) -> SimulatedCluster:
    times = StepTimes("lookahead", 1, FLAT, Host(0.0, 0.0, 0.0))
    target, options = KnownTarget(VOCAB, 0, 256, FLAT), EngineOptions(max_running=max_running)
    ours = [SimulatedReplica(parse_strategy(strategy), times, target, options, 16, False) for _ in range(replicas)]
    return SimulatedCluster(ours, lag_s, router_s, seed=1)


def texts(count: int, tokens: int) -> list[tuple[str, KnownText]]:
    return [(str(number), text(number, tokens)) for number in range(count)]


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    simulated = cluster(1)
    found = simulated.open_loop(texts(2, 1), (0.0, 0.004))
    first, second = simulated.journeys.values()
    assert (first.first_s, second.first_s) == pytest.approx((0.010, 0.020))
    assert (first.ttft_s, second.ttft_s) == pytest.approx((0.010, 0.016))
    assert found["requests"] == found["output_tokens"] == 2 and found["busy"] == 1.0


def test_who_asks_again_at_once_is_in_the_next_step() -> None:
    """As the loop that drives a real engine: it adds what is due between two steps."""
    simulated = cluster(1)
    simulated.closed_loop([("long", text(0, 4)), ("short", text(1, 1)), ("again", text(2, 1))], clients=2)
    again = simulated.journeys["again"]
    assert (again.arrival_s, again.first_s) == pytest.approx((0.010, 0.020))
    assert simulated.journeys["long"].last_s == pytest.approx(0.040)


def test_requests_share_steps_and_the_router_takes_its_time() -> None:
    simulated = cluster(1, router_s=0.005)
    simulated.open_loop(texts(3, 4), (0.0, 0.0, 0.0))
    assert [journey.last_s for journey in simulated.journeys.values()] == pytest.approx([0.045] * 3)


def test_a_full_replica_lets_others_wait() -> None:
    simulated = cluster(1, max_running=1)
    simulated.open_loop(texts(3, 4), (0.0, 0.0, 0.0))
    assert [journey.last_s for journey in simulated.journeys.values()] == pytest.approx([0.04, 0.08, 0.12])


def test_the_router_picks_the_least_loaded() -> None:
    simulated = cluster(4, max_running=1)
    found = simulated.open_loop(texts(8, 4), (0.0,) * 8)
    assert sorted(journey.last_s for journey in simulated.journeys.values()) == pytest.approx([0.04] * 4 + [0.08] * 4)
    assert found["tokens_per_s"] == pytest.approx(400.0)


def test_clients_ask_one_after_the_other() -> None:
    simulated = cluster(1)
    found = simulated.closed_loop(texts(8, 5), 2)
    journeys = list(simulated.journeys.values())
    for journey in journeys:
        others = [other for other in journeys if other.arrival_s <= journey.arrival_s < other.last_s]
        assert len(others) <= 2
    assert [len(journey.output) for journey in journeys] == [5] * 8 and found["tokens_per_s"] == pytest.approx(200.0)
    assert [journey.output for journey in journeys] == [text(number, 5).output_ids.tolist() for number in range(8)]


def test_replicas_learn_from_each_other() -> None:
    answers = [(f"again-{number}", text(0, 40)) for number in range(8)]
    steps = {lag_s: cluster(2, "trie", lag_s=lag_s).closed_loop(answers, 1)["steps"] for lag_s in (None, 0.01, 5.0)}
    assert steps[0.01] < steps[None] == steps[5.0]  # one replica, or each of two, takes 40 steps for the first


def test_the_same_seed_gives_the_same_numbers() -> None:
    runs = [cluster(3, "trie", lag_s=0.02).open_loop(texts(12, 9), poisson(40.0, 12, 5).times_s) for _ in range(2)]
    assert runs[0] == runs[1] and runs[0]["requests"] == 12


def test_workloads_come_in_turns_and_never_twice() -> None:
    files: dict[str, Sequence[KnownText]] = {"a": [text(1, 2), text(2, 2)], "b": [text(3, 2)]}
    assert [key for key, _ in keyed(files, 3)] == ["a-0", "b-0", "a-1"]
    with pytest.raises(ValueError, match="3 records, but 4 requests"):
        keyed(files, 4)
