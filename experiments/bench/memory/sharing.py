"""Measure the gain of sharing past outputs between replicas: tokens per step over real processes and a real Redis.

outrider bench replay sharing FILE.jsonl... --tokenizer DIR

Known outputs are followed instead of a model (see decoding/replay.py), so a request takes the steps that it would take with the
model that wrote its output. Four replicas, each in a process, see the same requests of a workload in the same order:

* A shares, and gets every request first;
* alone does not share, and knows its own requests only;
* B shares, and gets the requests after A has had them all;
* C starts after A and B have ended, and loads the service's snapshot.

Then the workload is cut in two: A has had the even requests, and B gets the odd ones, which are new to all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from outrider.cache_service.access import CacheAccess
from outrider.cache_service.client.cache_client import CacheClient
from outrider.cache_service.namespace import Identity
from outrider.cache_service.server.cache_server import CacheServer
from outrider.cache_service.store.embedded import EmbeddedRedis
from outrider.cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from outrider.configs.slices import CacheOptions
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.replay import KnownText, replay_workload
from outrider.decoding.sources.text_keys import text_key
from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.run import Bench, Results, Run

_STRATEGY, _BUDGET = "auto", 64  # maximum draft tokens per step
_QUOTA_BYTES = 1 << 30  # large enough that nothing is evicted
_START_S, _SETTLE_S, _SNAPSHOT_S = 60.0, 60.0, 90.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of all replicas of a run."""

    strategy: str
    budget: int
    identity: Identity
    access: CacheAccess


@dataclass(frozen=True, slots=True)
class Replayed:
    """Forwards and emitted tokens of one request."""

    steps: int
    tokens: int
    propose_s: float


class ReplayReplica:
    """Replica in another process; each call waits for it, and ``with`` ends it."""

    def __init__(self, setting: Setting, shares: bool) -> None:
        """Start the process and wait until it has loaded the other replicas' outputs, if it ``shares``."""
        context = multiprocessing.get_context("spawn")  # its memory holds nothing of this process
        self._end, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, setting, shares), daemon=True)
        self._process.start()
        there.close()
        self._end.recv()

    def replay(self, tenant: str, name: str, texts: Sequence[KnownText]) -> list[Replayed]:
        """Run requests one after another, with ids that begin with ``name``; the replica remembers their outputs."""
        self._end.send(("replay", tenant, name, texts))
        done: list[Replayed] = self._end.recv()
        return done

    def settle(self, tenant: str, tokens: int) -> None:
        """Wait until the cache client holds ``tokens`` tokens of a tenant. Raises ``TimeoutError`` after a minute."""
        self._end.send(("settle", tenant, tokens))
        if not self._end.recv():
            raise TimeoutError(f"the replica did not see {tokens} tokens of {tenant} within {_SETTLE_S:.0f} s")

    def __enter__(self) -> ReplayReplica:
        return self

    def __exit__(self, *error: object) -> None:
        self._end.send(None)
        self._process.join(_START_S)
        if self._process.is_alive():
            self._process.kill()


def _serve(end: Connection, setting: Setting, shares: bool) -> None:
    """Serve the calls of ``ReplayReplica`` in its process."""
    drafter, client = build_drafter(setting.strategy, {}), None
    assert drafter.histories is not None, f"{setting.strategy} remembers no outputs"
    if shares:
        client = CacheClient(setting.access, setting.identity, drafter.histories, lambda: None)
        client.start(_START_S)
    end.send("ready")
    follower = _Follower(drafter, client, setting)
    while (call := end.recv()) is not None:
        name, *arguments = call
        end.send(follower.settle(*arguments) if name == "settle" else follower.replay(*arguments))
    if client is not None:
        client.close()


@dataclass(frozen=True, slots=True)
class _Follower:
    """Drafter with its cache client, used as the engine's thread uses them."""

    drafter: Drafter
    client: CacheClient | None
    setting: Setting

    def replay(self, tenant: str, name: str, texts: Sequence[KnownText]) -> list[Replayed]:
        """See ``ReplayReplica.replay``."""
        return [self._one(tenant, f"{name}-{at}-", text) for at, text in enumerate(texts)]

    def _one(self, tenant: str, prefix: str, text: KnownText) -> Replayed:
        while self.client is not None and self.client.apply():
            pass
        counts = replay_workload(
            [text], lambda: self.drafter, self.setting.budget, self.setting.identity.vocab_size, time.perf_counter,
            id_prefix=prefix, tenant=tenant,
        )  # fmt: skip
        if self.client is not None:
            self.client.publish(tenant, text_key(f"{prefix}0"), 0, text.output_ids, True)
        return Replayed(counts.steps, counts.tokens, sum(counts.propose_s))

    def settle(self, tenant: str, tokens: int) -> bool:
        """Apply what arrives until the history is long enough; return False at the deadline."""
        assert self.drafter.histories is not None and self.client is not None
        history, deadline = self.drafter.histories.of(tenant), time.monotonic() + _SETTLE_S
        assert history is not None
        while history.frequencies.sum() < tokens and time.monotonic() < deadline:
            if not self.client.apply():
                time.sleep(0.002)
        return bool(history.frequencies.sum() >= tokens)


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Measure all workloads, each as a tenant, so that none helps another.

    Returns:
        ``workloads``: tokens per step of every replica, over all requests and request by request.
    """
    cutter = TextTokenizer(args.tokenizer)
    texts = {path.stem: read_known_texts(path, cutter, None) for path in args.workloads}
    tenants = tuple(part for name in texts for part in (name, f"{name}.halves"))
    with EmbeddedRedis.start() as redis:
        access = CacheAccess(CacheOptions(), redis.url, secrets.token_bytes(32), tenants)
        identity = Identity("known", "known", cutter.vocab_size)
        server = CacheServer(access, identity, dict.fromkeys(tenants, _QUOTA_BYTES))
        server.start()
        try:
            rows = _measure(texts, Setting(_STRATEGY, _BUDGET, identity, access), server, run.progress)
        finally:
            server.stop()
    lines = {"alone": "shares nothing", "B": "after A had them", "C": "started later"}
    pictures = {}
    for name, row in rows.items():
        series = {words: dict(enumerate(row[replica]["by_request"], start=1)) for replica, words in lines.items()}
        pictures[name] = panel("curves", "", "request", "tokens per step", series)
    return {"workloads": rows, "figures": pictures}


def _measure(
    texts: Mapping[str, Sequence[KnownText]], setting: Setting, server: CacheServer, progress: Progress
) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    with ReplayReplica(setting, True) as a, ReplayReplica(setting, True) as b:
        for name, known in texts.items():
            with ReplayReplica(setting, False) as alone, ReplayReplica(setting, False) as alone_again:
                row = rows[name] = {"alone": _figures(alone.replay(name, "alone", known))}
                row["A"] = _figures(a.replay(name, "a", known))
                b.settle(name, _tokens(known))
                row["B"] = _figures(b.replay(name, "b", known))
                tenant, even, odd = f"{name}.halves", known[::2], known[1::2]
                a.replay(tenant, "a", even)
                b.settle(tenant, _tokens(even))
                row["B, new requests"] = _figures(b.replay(tenant, "b", odd))
                row["alone, new requests"] = _figures(alone_again.replay(tenant, "alone", odd))
            progress.say(f"{name}: {_line(row)}")
    deadline = time.monotonic() + _SNAPSHOT_S
    while server.status().snapshots < 2 * len(texts) and time.monotonic() < deadline:
        time.sleep(0.05)
    with ReplayReplica(setting, True) as c:
        for name, known in texts.items():
            rows[name]["C"] = _figures(c.replay(name, "c", known))
            progress.say(f"{name}: {_line(rows[name])}")
    return rows


def _tokens(known: Sequence[KnownText]) -> int:
    return sum(len(text.output_ids) for text in known)


def _figures(done: Sequence[Replayed]) -> dict[str, Any]:
    steps, tokens = sum(request.steps for request in done), sum(request.tokens for request in done)
    return {
        "tokens_per_step": round(tokens / steps, 4),
        "first_request": round(done[0].tokens / done[0].steps, 4),
        "propose_us_per_step": round(1e6 * sum(request.propose_s for request in done) / steps, 1),
        "by_request": [round(request.tokens / request.steps, 3) for request in done],
    }


def _line(row: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} {figures['tokens_per_step']:.2f}" for name, figures in row.items())


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("workloads", type=Path, nargs="+", help="JSON lines with prompt, output and optional references")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")


BENCH = Bench("shared-trie", __doc__ or "", measure, options)
