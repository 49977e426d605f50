"""What a replica gains from what others have said: tokens per step, request by request, over real processes and a real Redis.

python -m experiments.bench.memory sharing FILE.jsonl... --tokenizer DIR

Known outputs are followed instead of a model (see decoding/replay.py), so a request takes the steps that it would take with the
model that wrote its output. Four replicas, a process each, see the same requests of a workload in the same order:

* A shares, and is the first to get any of them;
* alone shares nothing: it knows the requests that it has had itself;
* B shares, and gets the requests after A has had them all;
* C starts when A and B are done, and loads what the service has kept.

Then once more with the workload cut in two: A has had the even requests, and B gets the odd ones, which nobody has had before.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cache_service.keeper.server import CacheServer
from cache_service.namespace import Identity
from cache_service.store.embedded import EmbeddedRedis
from cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from configs.slices import CacheOptions
from decoding.replay import KnownText
from experiments.bench.figure import panel
from experiments.bench.memory.replay_replica import Replayed, ReplayReplica, Setting, kept
from experiments.bench.progress import Progress
from experiments.bench.run import Bench, Results, Run

_QUOTA_BYTES = 1 << 30  # nothing has to go
_SNAPSHOT_WAIT_S = 30.0


def measure(args: argparse.Namespace, given: Run) -> Results:
    """All workloads; see ``run``."""
    cutter = TextTokenizer(args.tokenizer)
    texts = {path.stem: read_known_texts(path, cutter, None, args.records) for path in args.workloads}
    results = run(texts, args.strategy, args.budget, cutter.vocab_size, given.progress)
    lines = {"alone": "shares nothing", "B": "after A had them", "C": "started later"}
    results["figures"] = {}
    for name, row in results["workloads"].items():
        series = {words: dict(enumerate(row[replica]["by_request"], start=1)) for replica, words in lines.items()}
        results["figures"][name] = panel("curves", "", "request", "tokens per step", series)
    return results


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("workloads", type=Path, nargs="+", help="JSON lines with prompt, output and, if wanted, references")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--strategy", default="auto", choices=("auto", "trie"))
    parser.add_argument("--budget", type=int, default=64, help="most drafted tokens of a step")
    parser.add_argument("--records", type=int, help="at most so many of each workload")


def run(
    texts: Mapping[str, Sequence[KnownText]], strategy: str, budget: int, vocab_size: int, progress: Progress
) -> dict[str, Any]:
    """All workloads; each is a tenant of its own, so that none helps another.

    Returns:
        ``workloads``: for each the tokens per step of every replica, over all requests and request by request.
    """
    tenants = tuple(part for name in texts for part in (name, f"{name}.halves"))
    with EmbeddedRedis.start() as redis:
        setting = Setting(
            strategy, {}, budget, Identity("known", "known", vocab_size), redis.url, secrets.token_bytes(32),
            CacheOptions(snapshot_s=1.0), tenants,
        )  # fmt: skip
        with kept(setting, _QUOTA_BYTES) as server:
            return {"workloads": _measure(texts, setting, server, progress)}


def _measure(
    texts: Mapping[str, Sequence[KnownText]], setting: Setting, server: CacheServer, progress: Progress
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    with ReplayReplica(setting, True) as a, ReplayReplica(setting, True) as b:
        for name, known in texts.items():
            with ReplayReplica(setting, False) as alone, ReplayReplica(setting, False) as alone_again:
                rows[name] = {"alone": alone.replay(name, "alone", known), "A": a.replay(name, "a", known)}
                b.settle(name, _tokens(known))
                rows[name]["B"] = b.replay(name, "b", known)
                tenant, even, odd = f"{name}.halves", known[::2], known[1::2]
                a.replay(tenant, "a", even)
                b.settle(tenant, _tokens(even))
                rows[name]["B, new requests"] = b.replay(tenant, "b", odd)
                rows[name]["alone, new requests"] = alone_again.replay(tenant, "alone", odd)
            progress.say(f"{name}: {_line(rows[name])}")
    _wait_for_snapshots(server, len(setting.tenants))
    with ReplayReplica(setting, True) as c:
        for name, known in texts.items():
            rows[name]["C"] = c.replay(name, "c", known)
            progress.say(f"{name}: {_line(rows[name])}")
    return {name: {replica: _figures(done) for replica, done in row.items()} for name, row in rows.items()}


def _wait_for_snapshots(server: CacheServer, number: int) -> None:
    deadline = time.monotonic() + _SNAPSHOT_WAIT_S
    while server.status().snapshots < number and time.monotonic() < deadline:
        time.sleep(0.05)


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


def _line(row: Mapping[str, Sequence[Replayed]]) -> str:
    return ", ".join(f"{name} {_figures(done)['tokens_per_step']:.2f}" for name, done in row.items())


BENCH = Bench("shared-trie", __doc__ or "", measure, options, {"budget": 1, "records": 1})
