"""Figures of the shared memory: lag between processes, bytes in the stream, snapshots at ten million tokens, memory, and a flood.

python -m experiments.cache_figures CORPUS... --tokenizer DIR --workload FILE.jsonl

CORPUS: files or folders of ``.jsonl``, ``.jsonl.gz`` and ``.txt``; the workload is asked by a tenant
beside whom another floods.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from cache_service.keeper.server import CacheServer
from cache_service.namespace import Identity
from cache_service.store.embedded import EmbeddedRedis
from cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from configs.slices import CacheOptions
from decoding.replay import KnownText
from decoding.tree import Int32Array
from experiments.cache_lag import measure_lag
from experiments.cache_sizes import measure_memory, measure_snapshot
from experiments.record import RESULTS, write_record
from experiments.replay_replica import Replayed, ReplayReplica, Setting
from experiments.run_options import refused
from experiments.trie_texts import corpus_texts

_LAG_RUNS = ((1, 300, 3, 0.02), (8, 300, 3, 0.02), (16, 300, 3, 0.02))  # requests, tokens of each, tokens and seconds of a step
_MEMORY_SIZES = (0, 1_000, 10_000, 100_000, 1_000_000)
_QUOTA_BYTES = 4 << 20  # of the tenant that floods


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the record; 2 for a file that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="+", help="texts to fill memories with")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--workload", type=Path, required=True, help="JSON lines with prompt and output")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of the snapshot")
    parser.add_argument("--flood", type=int, default=5_000_000, help="tokens of the tenant that floods")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each lag measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args(argv)
    started = datetime.now(UTC)
    try:
        texts = corpus_texts(args.corpus, args.tokenizer, args.tokens, args.seed)
        known = read_known_texts(args.workload, TextTokenizer(args.tokenizer), None)
    except ValueError as error:
        return refused(error)
    results: dict[str, Any] = {"corpus": texts.about, "lag": [], "lag_without_wait": []}
    for waits, flush_s in (("lag", CacheOptions().flush_s), ("lag_without_wait", 0.0)):
        for run in _LAG_RUNS:
            for _ in range(args.repeats):
                results[waits].append(_tell(waits, _with_redis(texts.vocab_size, flush_s, measure_lag, *run)))
    results["snapshot"] = _tell("snapshot", _with_redis(texts.vocab_size, 0.02, measure_snapshot, texts.fill))
    results["memory"] = _tell("memory", measure_memory(texts.fill, (*_MEMORY_SIZES, args.tokens)))
    results["flood"] = _tell("flood", flood(known, texts.fill, args.flood, texts.vocab_size))
    print(write_record("cache-figures", vars(args), results, args.seed, started, "cpu", args.out).name)
    return 0


def flood(known: Sequence[KnownText], texts: Sequence[Int32Array], tokens: int, vocab_size: int) -> dict[str, Any]:
    """Tokens per step of one tenant before and after another has sent far more than its quota.

    Args:
        known: requests of the quiet tenant; a replica has had them all before anything is measured.
        texts: what the other one floods with.
        tokens: how much of it.

    Returns:
        Tokens per step of replicas that have what they were told and nothing of their own: ``before`` the flood and ``after`` it
        one that starts then, and ``live`` one that was there all the time.
    """
    with EmbeddedRedis.start() as redis:
        shared = setting(redis.url, vocab_size, ("quiet", "flood"), CacheOptions(snapshot_s=1.0))
        server = CacheServer(
            shared.cache,
            shared.url,
            shared.secret,
            shared.identity,
            shared.tenants,
            dict.fromkeys(shared.tenants, _QUOTA_BYTES),
        )
        server.start()
        try:
            with ReplayReplica(shared, True) as writer, ReplayReplica(shared, True) as listener:
                writer.replay("quiet", "first", known)
                before = _fresh(shared, known, "before")
                sent = 0
                for start in range(0, len(texts), 256):
                    writer.learn("flood", f"flood-{start}", texts[start : start + 256])
                    sent += sum(map(len, texts[start : start + 256]))
                    if sent >= tokens:
                        break
                listener.settle("flood", min(sent, _QUOTA_BYTES // 4))  # half of the quota: more is not kept for long
                live = _speed(listener.replay("quiet", "live", known, publishes=False))
                after = _fresh(shared, known, "after")
        finally:
            server.stop()
    return {"flooded_tokens": sent, "quota_bytes": _QUOTA_BYTES, "before": before, "live": live, "after": after}


def _fresh(shared: Setting, known: Sequence[KnownText], name: str) -> float:
    with ReplayReplica(shared, True) as replica:
        return _speed(replica.replay("quiet", name, known, publishes=False))


def _speed(done: Sequence[Replayed]) -> float:
    return round(sum(request.tokens for request in done) / sum(request.steps for request in done), 4)


def _with_redis(vocab_size: int, flush_s: float, measure: Any, *arguments: Any) -> Any:
    """A measurement on a Redis of its own."""
    with EmbeddedRedis.start() as redis:
        return measure(setting(redis.url, vocab_size, ("measured",), CacheOptions(flush_s=flush_s)), *arguments)


def setting(url: str, vocab_size: int, tenants: tuple[str, ...], cache: CacheOptions) -> Setting:
    """Replicas that follow known outputs with ``auto``, far from the limits of their histories."""
    identity = Identity("figures", "figures", vocab_size)
    return Setting("auto", {"history_tokens": 1 << 22}, 64, identity, url, secrets.token_bytes(32), cache, tenants)


def _tell(name: str, result: Any) -> Any:
    print(f"{name}: {result}", file=sys.stderr)
    return result


if __name__ == "__main__":
    np.seterr(all="raise")
    sys.exit(main())
