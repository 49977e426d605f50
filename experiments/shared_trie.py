"""What a replica gains from what others have said: tokens per step, request by request, over real processes and a real Redis.

python -m experiments.shared_trie FILE.jsonl... --tokenizer DIR

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
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cache_service.keeper.server import CacheServer
from cache_service.namespace import Identity
from cache_service.store.embedded import EmbeddedRedis
from cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from configs.slices import CacheOptions
from decoding.replay import KnownText
from experiments.plots import shared_trie_curves
from experiments.record import RESULTS, write_record
from experiments.replay_replica import Replayed, ReplayReplica, Setting
from experiments.run_options import refused

_QUOTA_BYTES = 1 << 30  # nothing has to go
_SNAPSHOT_WAIT_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment, writes the record and the figure; 2 for a file that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", type=Path, nargs="+", help="JSON lines with prompt, output and, if wanted, references")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--strategy", default="auto", choices=("auto", "trie"))
    parser.add_argument("--budget", type=int, default=64, help="most drafted tokens of a step")
    parser.add_argument("--records", type=int, help="at most so many of each workload")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args(argv)
    started = datetime.now(UTC)
    try:
        cutter = TextTokenizer(args.tokenizer)
        texts = {path.stem: read_known_texts(path, cutter, None, args.records) for path in args.workloads}
    except ValueError as error:
        return refused(error)
    results = run(texts, args.strategy, args.budget, cutter.vocab_size)
    record = write_record("shared-trie", vars(args), results, None, started, "cpu", args.out)
    shared_trie_curves(results, record.with_suffix(".svg"))
    print(record.name)
    return 0


def run(texts: Mapping[str, Sequence[KnownText]], strategy: str, budget: int, vocab_size: int) -> dict[str, Any]:
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
        server = CacheServer(
            setting.cache, setting.url, setting.secret, setting.identity, tenants, dict.fromkeys(tenants, _QUOTA_BYTES)
        )
        server.start()
        try:
            return {"workloads": _measure(texts, setting, server)}
        finally:
            server.stop()


def _measure(texts: Mapping[str, Sequence[KnownText]], setting: Setting, server: CacheServer) -> dict[str, Any]:
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
            print(f"{name}: {_line(rows[name])}", file=sys.stderr)
    _wait_for_snapshots(server, len(setting.tenants))
    with ReplayReplica(setting, True) as c:
        for name, known in texts.items():
            rows[name]["C"] = c.replay(name, "c", known)
            print(f"{name}: {_line(rows[name])}", file=sys.stderr)
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


if __name__ == "__main__":
    sys.exit(main())
