"""The service over a group of two ranks: its answers are those of one replica, also when a rank or the leader is killed."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.cli.launch.preflight import LaunchError, check_processors, check_reservation
from configs.schema import Config
from configs.slices import ParallelismOptions, ServerOptions, SpeculationOptions
from tests import waiting
from tests.services import Service, processes, serving_tiny

eventually = functools.partial(waiting.eventually, timeout_s=90.0)
TOKENS = 1000  # of an answer: seconds, so that what happens after its beginning happens in its middle
FOLLOWER = "ray::RankActor"


def is_whole(service: Service) -> bool:
    health = service.health()
    ranks = health.get("ranks", {})
    return health.get("status") == "ok" and (ranks["ready"], ranks["of"], ranks["refilling"]) == (2, 2, 0)


@pytest.fixture(scope="module")
def service(api_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One group."""
    speculation = SpeculationOptions("recycling", max_draft_tokens=8)
    server = ServerOptions(cpus_per_replica=0.25, stop_timeout_s=1.0)
    parallelism = ParallelismOptions(mode="lookahead", world_size=2, check_steps=8)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    with serving_tiny(api_server.url, "parallel", folder, TOKENS, speculation, server, parallelism) as made:
        yield made


def test_a_group_answers_what_one_replica_does(service: Service) -> None:
    eventually(lambda: is_whole(service))
    assert (len(service.engines()), len(processes(FOLLOWER))) == (1, 1)
    with service.client() as client, concurrent.futures.ThreadPoolExecutor(2) as threads:
        for answer in [threads.submit(service.ask, client) for _ in range(2)]:
            assert answer.result(180).choices[0].text == service.expected.text
    ranks = service.health()["ranks"]
    assert (ranks["losses"], ranks["divergences"], ranks["disagreements"]) == (0, 0, 0)


def test_a_follower_killed_in_the_middle_of_a_stream_is_replaced(service: Service) -> None:
    eventually(lambda: is_whole(service))
    before = processes(FOLLOWER)
    states = []

    def strike() -> None:
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: service.health()["status"] == "degraded")
        states.append(service.health()["ranks"])

    text, _, usage = service.stream_with(strike)
    assert text == service.expected.text and usage.completion_tokens == TOKENS
    assert states[0]["ready"] < states[0]["of"] == 2 and states[0]["losses"] == 1 and states[0]["last_loss"]
    eventually(lambda: is_whole(service))
    after = processes(FOLLOWER)
    assert len(after) == 1 and after.isdisjoint(before)


@pytest.mark.slow
def test_the_leader_killed_in_the_middle_of_answers_is_replaced_with_its_group(service: Service) -> None:
    eventually(lambda: is_whole(service))
    leaders, followers = service.engines(), processes(FOLLOWER)
    with service.client() as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
        whole = threads.submit(service.ask, client)
        eventually(lambda: service.health().get("running") == 1)

        def strike() -> None:
            assert not whole.done()
            for pid in leaders:
                os.kill(pid, signal.SIGKILL)

        text, _, usage = service.stream_with(strike)
        assert text == service.expected.text and usage.completion_tokens == TOKENS
        answer = whole.result(180)
        assert answer.choices[0].text == service.expected.text and answer.usage.completion_tokens == TOKENS
    eventually(lambda: is_whole(service))
    for now, before in ((service.engines(), leaders), (processes(FOLLOWER), followers)):
        assert len(now) == 1 and now.isdisjoint(before)


def configured(replicas: int, world_size: int | str, cpus: float = 1.0, address: str | None = None) -> Config:
    parallelism = {"mode": "lookahead", "world_size": world_size}
    server = {"replicas": replicas, "cpus_per_replica": cpus, "ray_address": address}
    return Config.model_validate({"parallelism": parallelism, "server": server})


def test_what_cannot_be_reserved_is_an_error_before_anything_starts() -> None:
    cores = os.cpu_count() or 1
    check_processors(configured(1, cores))
    check_processors(configured(1, 2 * cores, 0.5))
    check_processors(configured(100, "auto"))
    check_processors(configured(100, 8, address="10.0.0.1:6379"))
    with pytest.raises(LaunchError, match=f"1 x {cores + 1} ranks need {cores + 1} CPUs, 1 each, and there are {cores}: lower "):
        check_processors(configured(1, cores + 1))
    with pytest.raises(LaunchError, match="cpus_per_replica must be above 0"):
        check_processors(configured(1, 2, 0.0))
    check_reservation(configured(2, 4), "GPU", 1.0, 8.0)
    with pytest.raises(LaunchError, match=r"2 x 4 ranks need 8 GPUs.*server.gpus_per_replica"):
        check_reservation(configured(2, 4), "GPU", 1.0, 7.0)
