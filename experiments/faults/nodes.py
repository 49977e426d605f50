"""Machines of the CPU overlay's RayService that are lost, upgraded and given new keys while requests run.

outrider bench faults nodes [--only engine head ...]

Machines are network namespaces (root and iproute2 are needed), see ``experiments/faults/manifest_cluster.py``. During a fault
requests of several kinds run; their text, finish reason, tokens and usage have to equal those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from outrider.cache_service.store.embedded import EmbeddedRedisError
from outrider.configs.schema import find_model
from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.faults.machines import MachinesError
from outrider.experiments.faults.manifest_cluster import ManifestCluster
from outrider.experiments.service.asks import Answer, Ask, ask, make_asks
from outrider.experiments.service.served import spread

OVERLAY, SPARE = "cpu-demo", "engine-2"
_KINDS = ("greedy", "sampled", "whole", "json", "penalties")
_AWAY_S = 10.0  # until a lost machine is started again, as by a scheduler
_CUT_S = 60.0  # duration of a cut of the network
_CONNECT_S, _SILENCE_S = 1.0, 10.0  # time limits of clients for a connection and for the next byte
_MIDDLE_S = 4.0  # until streams are under way
_PATIENCE_S = 180.0
_ATTEMPTS = 8
_SPARE_SLOTS = 8
_CONTEXT = 1024  # tokens of prompt and answer, so that slots for all requests fit
_ANEW = ("model_replaced", "resumed_otherwise")  # codes of errors after which clients ask anew
_MODELS = ("demo_model", "smollm2-135m-instruct")  # the one that is not served replaces the other
_RESUMABLE = {"Accept": "text/event-stream"}  # makes the server number the events of streams
_HEALTHY = {"status": "ok", "replicas": 2, "shared_cache": "connected"}
Fault = Callable[[ManifestCluster], dict[str, Any]]  # runs in a thread beside the requests; returns its results


def lose_engine(cluster: ManifestCluster) -> dict[str, Any]:
    """Lose the machine of an engine, and start another one."""
    cluster.machine("engine-0").kill()
    noticed_s = cluster.until("/health", {"status": "degraded"})
    time.sleep(_AWAY_S)
    cluster.start("engine-0")
    return {"noticed_s": noticed_s, "whole_after_s": cluster.until("/health", _HEALTHY)}


def lose_head(cluster: ManifestCluster) -> dict[str, Any]:
    """Lose the head, and start it again with the cluster's state in Redis."""
    cluster.machine("head").kill()
    time.sleep(_AWAY_S)
    cluster.start("head")
    return {"running_after_s": cluster.until_running(), "whole_after_s": cluster.until("/health", _HEALTHY)}


def lose_redis(cluster: ManifestCluster) -> dict[str, Any]:
    """Lose the Redis of the replicas' memory, and start it again with its files."""
    cluster.memory.kill()
    time.sleep(_AWAY_S)
    state = httpx.get(f"{cluster.urls[0]}/health", timeout=5).json()["shared_cache"]
    cluster.memory.start()
    return {"meanwhile": state, "whole_after_s": cluster.until("/health", _HEALTHY)}


def upgrade(cluster: ManifestCluster) -> dict[str, Any]:
    """Deploy another Serve configuration for API and engines, as ``kubectl apply`` does, and roll it back."""
    before = copy.deepcopy(cluster.serve_config)
    cluster.set({"engine": {"max_waiting": 128}, "audit": {"keep": 32}})
    upgrade_s = deployed(cluster)
    cluster.serve_config = before
    return {"upgrade_s": upgrade_s, "rollback_s": deployed(cluster)}


def replace_model(cluster: ManifestCluster) -> dict[str, Any]:
    """Deploy the cluster's model under the name of the one that is served."""
    set_model(cluster, cluster.model)
    return {"model_s": deployed(cluster)}


def set_model(cluster: ManifestCluster, path: Path) -> None:
    """Change the model of the next deployment."""
    cluster.set({"model": {"path": str(path), "served_name": cluster.model_name}})


def scale(cluster: ManifestCluster) -> dict[str, Any]:
    """Add a third engine on another machine, and remove it."""
    cluster.start(SPARE)
    cluster.set({"server": {"replicas": 3}})
    out_s = deployed(cluster, 3)
    cluster.set({"server": {"replicas": 2}})
    in_s = deployed(cluster)
    cluster.machine(SPARE).kill()
    return {"out_s": out_s, "in_s": in_s}


def deployed(cluster: ManifestCluster, replicas: int = 2) -> float:
    """Deploy the Serve configuration and return the seconds until everything runs with it."""
    began = time.monotonic()
    cluster.deploy()
    time.sleep(1.0)  # until the old state is not reported any more
    cluster.until_running()
    cluster.until("/health", _HEALTHY | {"replicas": replicas})
    return round(time.monotonic() - began, 2)


def rotate(cluster: ManifestCluster) -> dict[str, Any]:
    """Change the secret with the keys."""
    old, cluster.key = cluster.key, f"{cluster.key}-new"
    cluster.give_key(cluster.key)
    began, found = time.monotonic(), {}
    for name, key, status in (("new_key_works_s", cluster.key, 200), ("old_key_refused_s", old, 401)):
        while any(httpx.get(f"{url}/v1/models", headers=bearer(key), timeout=5).status_code != status for url in cluster.urls):
            if time.monotonic() - began > _PATIENCE_S:
                raise MachinesError(f"{name}: not within {_PATIENCE_S:.0f} s")
            time.sleep(0.1)
        found[name] = round(time.monotonic() - began, 2)
    return found


def lose_api(cluster: ManifestCluster) -> dict[str, Any]:
    """Lose the machine of an API with all its connections, and start it again."""
    time.sleep(_MIDDLE_S)
    cluster.machine("api-0").kill()
    waits = new_requests(cluster, _AWAY_S)
    cluster.start("api-0")
    return {"new_request_s": spread(waits), "whole_after_s": cluster.until("/health", _HEALTHY)}


def cut_zone(cluster: ManifestCluster) -> dict[str, Any]:
    """Cut the network of a zone with an API and an engine in the middle of streams, and connect it again."""
    zone = [cluster.machine(name) for name in ("api-1", "engine-1")]
    time.sleep(_MIDDLE_S)
    for machine in zone:
        machine.cut()
    waits = new_requests(cluster, _CUT_S)
    for machine in zone:
        machine.mend()
    return {"new_request_s": spread(waits), "whole_after_s": cluster.until("/health", _HEALTHY)}


def new_requests(cluster: ManifestCluster, seconds: float) -> list[float]:
    """Send requests one after the other to the first API that takes the connection, and return the seconds of each."""
    waits, began = [], time.monotonic()
    body = {"model": cluster.model_name, "prompt": "The library opens", "max_tokens": 1, "temperature": 0}
    timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
    with httpx.Client(headers=bearer(cluster.key), timeout=timeout) as client:
        while time.monotonic() - began < seconds:
            asked, status = time.monotonic(), 0
            while status != 200 and time.monotonic() - asked < _PATIENCE_S:
                for url in cluster.urls:
                    with contextlib.suppress(httpx.TransportError):
                        status = client.post(f"{url}/v1/completions", json=body).status_code
                    if status == 200:
                        break
            waits.append(time.monotonic() - asked)
            time.sleep(0.2)
    return waits


WITH_REQUESTS: dict[str, Fault] = {
    "api": lose_api, "zone": cut_zone, "engine": lose_engine, "head": lose_head, "redis": lose_redis, "upgrade": upgrade,
    "model": replace_model, "scale": scale,
}  # fmt: skip
ALONE: dict[str, Fault] = {"keys": rotate}


def bearer(key: str) -> dict[str, str]:
    """Return the header with an API key."""
    return {"Authorization": f"Bearer {key}"}


async def under(
    cluster: ManifestCluster, fault: Fault, asks: Sequence[Ask], rights: Sequence[Sequence[Answer]], concurrency: int
) -> dict[str, Any]:
    """Run a fault beside rounds of requests until it is over.

    Args:
        cluster: that is disturbed.
        fault: to run.
        asks: requests of a round.
        rights: answers of an undisturbed run with each model that is served during the fault.
        concurrency: requests in flight.

    Returns:
        The results of the fault; the numbers of ``answers``, of ``identical`` and of ``resumed`` ones; ``wrong``; ``pause_s`` of
        streams; and the answers ``by_model`` if there are several.
    """
    rounds: list[Answer] = []
    wrong, by_model = [], [0] * len(rights)
    beside = asyncio.create_task(asyncio.to_thread(fault, cluster))
    while not beside.done():
        answers, _ = await ask_all(cluster, asks, concurrency)
        rounds += answers
        for asked, told, *good in zip(asks, answers, *rights, strict=True):
            found = [told.differs(one) for one in good]
            if [] in found:
                by_model[found.index([])] += 1
            else:
                wrong.append({"kind": asked.kind, "differs": min(found, key=len), "error": told.error})
    counts = {
        "answers": len(rounds), "identical": len(rounds) - len(wrong), "resumed": sum(bool(told.resumed) for told in rounds),
        "wrong": wrong, "pause_s": spread([told.pause_s(0.0) for told in rounds if len(told.times) > 2]),
    }  # fmt: skip
    return await beside | counts | ({"by_model": by_model} if len(rights) > 1 else {})


async def ask_all(cluster: ManifestCluster, asks: Sequence[Ask], concurrency: int) -> tuple[list[Answer], float]:
    """Send all requests with the tenant's key to the APIs in turns; return the answers and the seconds."""
    limits, free, began = httpx.Limits(max_connections=None), asyncio.Semaphore(concurrency), time.monotonic()
    headers, silence = bearer(cluster.key) | _RESUMABLE, httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
    async with contextlib.AsyncExitStack() as open_:
        made = [httpx.AsyncClient(base_url=url, headers=headers, timeout=silence, limits=limits) for url in cluster.urls]
        clients = [await open_.enter_async_context(client) for client in made]

        async def one(number: int, request: Ask) -> Answer:
            async with free:
                return await ask_again(clients[number % len(clients) :] + clients[: number % len(clients)], cluster, request)

        answers = await asyncio.gather(*(one(*numbered) for numbered in enumerate(asks)))
    return list(answers), time.monotonic() - began


async def ask_again(clients: Sequence[httpx.AsyncClient], cluster: ManifestCluster, request: Ask) -> Answer:
    """Ask like a client behind the Service: after the loss of its API it continues at the next, a stream after its last event."""
    told: Answer | None = None
    for attempt in range(_ATTEMPTS):
        told = await ask(clients[attempt % len(clients)], cluster.model_name, request, told=told)
        if not told.broke_off and told.code not in _ANEW:
            break
        if attempt + 1 < _ATTEMPTS and (told.code in _ANEW or (told.choices and told.event_id is None)):
            told = None  # a stream that cannot be resumed is asked for anew
        await asyncio.sleep(0.1 * attempt)
    assert told is not None
    return told


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Run all faults one after the other, each on a healthy cluster; ``MachinesError`` if machines cannot be made."""
    began = time.monotonic()
    run.progress.say("starting the machines")
    slots = args.concurrency + _SPARE_SLOTS  # so that no request waits
    settings = {"model": {"dtype": args.dtype, "max_model_len": _CONTEXT}, "engine": {"max_running": slots}}
    with ManifestCluster(OVERLAY, Path(find_model(args.model)), settings, (SPARE,)) as cluster:
        ready_s = time.monotonic() - began
        asks = make_asks(args.requests, args.max_tokens, 0, _KINDS)
        right, seconds = asyncio.run(ask_all(cluster, asks, args.concurrency))
        failed = [told.error for told in right if told.error]
        if failed:
            raise MachinesError(f"the undisturbed run failed: {failed[0]}")
        found: Results = {"ready_s": round(ready_s, 2), "undisturbed_s": round(seconds, 2), "faults": {}}
        for name in args.only:
            run.progress.say(name)
            cluster.until("/health", _HEALTHY)
            if name in ALONE:
                found["faults"][name] = ALONE[name](cluster)
                continue
            rights = [right]
            if name == "model":
                other = next(other for other in _MODELS if other != args.model)
                set_model(cluster, Path(find_model(other)))
                deployed(cluster)
                rights.append(asyncio.run(ask_all(cluster, asks, args.concurrency))[0])
                found["other_model"] = other
            found["faults"][name] = asyncio.run(under(cluster, WITH_REQUESTS[name], asks, rights, args.concurrency))
        return found


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "float32", ("float32",))
    names = [*WITH_REQUESTS, *ALONE]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="faults; default: all")
    parser.add_argument("--requests", type=int, default=10, help="requests per round; rounds are repeated during a fault")
    parser.add_argument("--concurrency", type=int, default=4, help="requests in flight")
    parser.add_argument("--max-tokens", type=int, default=120, help="tokens per answer")


def other(results: Results, args: argparse.Namespace) -> list[str]:
    """Return the answers that differ from the undisturbed ones."""
    return [f"{name}: {entry}" for name, told in results["faults"].items() for entry in told.get("wrong", ())]


BENCH = Bench(
    "node-faults", __doc__ or "", measure, options, dict.fromkeys(("requests", "concurrency", "max_tokens"), 1), wrong=other,
    refuses=(MachinesError, EmbeddedRedisError),
)  # fmt: skip
