"""The router as Serve uses it: what calls it looks at, and how it hears that they have ended."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.serve.request_router import PendingRequest, ReplicaID

from outrider.cluster.app import _routing
from outrider.cluster.serving.generation import GenerationJob
from outrider.cluster.serving.prefix_router import PrefixRouter
from outrider.configs.schema import Config
from outrider.configs.slices import ServerOptions
from outrider.decoding.request import SamplingParams

NAMES = ("a", "b")


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> PrefixRouter:
    """One whose replicas have not said how much they have to do."""
    monkeypatch.setattr(PrefixRouter, "replica_queue_len_cache", SimpleNamespace(get=lambda replica_id: None))
    made = PrefixRouter.__new__(PrefixRouter)  # without the metrics of Serve's own
    made.initialize_state(slots=8, tenants=1)
    return made


def pending(call: str, *arguments: Any) -> PendingRequest:
    return PendingRequest(list(arguments), {}, SimpleNamespace(internal_request_id=call))  # type: ignore[arg-type]


def job(name: str) -> GenerationJob:
    return GenerationJob(f"{name}/0", np.arange(64, dtype=np.int32), SamplingParams(8), tenant="acme")


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=ReplicaID(name, "engine"))  # type: ignore[arg-type]


def test_who_chooses_is_what_the_configuration_says() -> None:
    options = _routing(Config(), 2)["request_router_config"]
    assert options.get_request_router_class().__name__ == "PrefixRouter"
    assert options.request_router_kwargs == {"slots": 24, "tenants": 0}
    assert _routing(Config(), 1) == _routing(Config(server=ServerOptions(routing="load")), 2) == {}


@pytest.mark.parametrize("arguments", [(), ("describe",), ((),), ((1,),)])
def test_calls_without_jobs_go_to_any_replica(router: PrefixRouter, arguments: tuple[Any, ...]) -> None:
    replicas = [replica(name) for name in NAMES]

    async def run() -> None:
        assert await router.choose_replicas(replicas, pending("call", *arguments)) == [replicas]
        assert await router.choose_replicas(replicas) == [replicas]
        router.on_request_completed(replicas[0].replica_id, "call")

    asyncio.run(run())


def test_load_ends_with_its_call_or_with_what_was_never_sent(router: PrefixRouter) -> None:
    replicas, jobs = [replica(name) for name in NAMES], router._chooser._jobs

    async def run() -> None:
        ((best,), (other,)) = await router.choose_replicas(replicas, call := pending("sent", (job("sent"),)))
        assert jobs[best.replica_id.unique_id] == 1
        router.on_request_routed(call, other.replica_id, None)
        del call
        given_up = pending("given up", (job("given up"),))
        await router.choose_replicas(replicas, given_up)
        del given_up
        gc.collect()
        assert sum(jobs.values()) == 2
        await router.choose_replicas(replicas, last := pending("last", (job("last"),)))
        assert sum(jobs.values()) == 2  # what was given up is gone, what was sent is not
        router.on_request_completed(best.replica_id, "sent")  # of a replica that had refused it
        assert sum(jobs.values()) == 2
        router.on_request_completed(other.replica_id, "sent")
        assert sum(jobs.values()) == 1
        del last

    asyncio.run(run())
