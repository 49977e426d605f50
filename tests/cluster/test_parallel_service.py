"""The service over a group of two ranks: its answers are those of one replica, also when a rank or the leader is killed."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI
from ray import serve

from cluster.app import application
from cluster.preflight import LaunchError, check_processors, check_reservation
from configs.schema import Config
from configs.slices import EngineOptions, ModelOptions, ParallelismOptions, ServerOptions, SpeculationOptions
from decoding.request import Request, SamplingParams
from engine.engine import Engine
from tests import waiting
from tests.models import SENTENCES, llama_config, save_model

eventually = functools.partial(waiting.eventually, timeout_s=90.0)
PROMPT = SENTENCES[0]
TOKENS = 1000  # of an answer: seconds, so that what happens after its beginning happens in its middle
BEGUN = 30  # events of a stream that show that it has begun
SAMPLING = {"temperature": 1.0, "seed": 78}
NAME = "parallel"
LEADER, FOLLOWER = f"ray::ServeReplica:{NAME}:engine", "ray::RankActor"


@dataclass(frozen=True)
class Service:
    """One group, and what each answer has to be."""

    url: str
    expected: str

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=180)

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/health", timeout=60).json())

    def is_whole(self) -> bool:
        health = self.health()
        ranks = health.get("ranks", {})
        return health.get("status") == "ok" and (ranks["ready"], ranks["of"], ranks["refilling"]) == (2, 2, 0)


def processes(title: str) -> set[int]:
    """Ray workers by the beginning of their title."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if "".join(process.cmdline()[:1]).startswith(title):
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def ask(client: OpenAI, **changes: Any) -> Any:
    body = {"ignore_eos": True}
    return client.completions.create(model="tiny", prompt=PROMPT, max_tokens=TOKENS, extra_body=body, **{**SAMPLING, **changes})


@pytest.fixture(scope="module")
def service(api_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A second application beside that of the other tests."""
    folder: Path = save_model(tmp_path_factory.mktemp("models") / "tiny", llama_config(max_position_embeddings=2048))
    model = ModelOptions(path=str(folder), dtype="float32", threads=1)
    plain = Engine.load(model, EngineOptions(max_running=1), SpeculationOptions("autoregressive"))
    assert plain.tokenizer is not None
    ids = plain.tokenizer.encode(PROMPT)
    plain.add(Request("plain", ids, SamplingParams(max_tokens=TOKENS, ignore_eos=True, **SAMPLING)))  # type: ignore[arg-type]
    expected = ""
    while plain.has_work:
        expected += "".join(output.text for output in plain.step())
    config = Config(
        model=model,
        engine=EngineOptions(max_running=4),
        speculation=SpeculationOptions("recycling", max_draft_tokens=8),
        parallelism=ParallelismOptions(mode="lookahead", world_size=2, check_steps=8),
        server=ServerOptions(cpus_per_replica=0.25, stop_timeout_s=1.0),
    )
    serve.run(application(config, b""), name=NAME, route_prefix=f"/{NAME}")
    yield Service(f"{api_server.url}/{NAME}", expected)
    serve.delete(NAME)


def stream_with(service: Service, strike: Callable[[], None]) -> tuple[str, Any]:
    """A stream's text, and its usage, when something happens in its middle."""
    text, usage = "", None
    with service.client() as client:
        for number, event in enumerate(ask(client, stream=True, stream_options={"include_usage": True})):
            usage = event.usage
            text += "".join(choice.text for choice in event.choices)
            if number == BEGUN:
                assert len(text) < len(service.expected) // 2
                strike()
    return text, usage


def test_a_group_answers_what_one_replica_does(service: Service) -> None:
    eventually(service.is_whole)
    assert (len(processes(LEADER)), len(processes(FOLLOWER))) == (1, 1)
    with service.client() as client, concurrent.futures.ThreadPoolExecutor(2) as threads:
        for answer in [threads.submit(ask, client) for _ in range(2)]:
            assert answer.result(180).choices[0].text == service.expected
    ranks = service.health()["ranks"]
    assert (ranks["losses"], ranks["divergences"], ranks["disagreements"]) == (0, 0, 0)


def test_a_follower_killed_in_the_middle_of_a_stream_is_replaced(service: Service) -> None:
    eventually(service.is_whole)
    before = processes(FOLLOWER)
    states = []

    def strike() -> None:
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: service.health()["status"] == "degraded")
        states.append(service.health()["ranks"])

    text, usage = stream_with(service, strike)
    assert text == service.expected and usage.completion_tokens == TOKENS
    assert states[0]["ready"] < states[0]["of"] == 2 and states[0]["losses"] == 1 and states[0]["last_loss"]
    eventually(service.is_whole)
    after = processes(FOLLOWER)
    assert len(after) == 1 and after.isdisjoint(before)


def test_the_leader_killed_in_the_middle_of_answers_is_replaced_with_its_group(service: Service) -> None:
    eventually(service.is_whole)
    before = {title: processes(title) for title in (LEADER, FOLLOWER)}
    with service.client() as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
        whole = threads.submit(ask, client)
        eventually(lambda: service.health().get("running") == 1)

        def strike() -> None:
            assert not whole.done()
            for pid in before[LEADER]:
                os.kill(pid, signal.SIGKILL)

        text, usage = stream_with(service, strike)
        assert text == service.expected and usage.completion_tokens == TOKENS
        answer = whole.result(180)
        assert answer.choices[0].text == service.expected and answer.usage.completion_tokens == TOKENS
    eventually(service.is_whole)
    for title, pids in before.items():
        assert len(processes(title)) == 1 and processes(title).isdisjoint(pids)


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
