"""Figures of the shared memory: lag between processes, bytes in the stream, snapshots at ten million tokens, memory, similar
requests among a million, and a flood.

python -m experiments.bench.memory figures CORPUS... --tokenizer DIR --workload FILE.jsonl

CORPUS: files or folders of ``.jsonl``, ``.jsonl.gz`` and ``.txt``; the workload is asked by a tenant
beside whom another floods.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cache_service.namespace import Identity
from cache_service.store.embedded import EmbeddedRedis
from cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from configs.slices import CacheOptions
from decoding.replay import KnownText
from decoding.tree import Int32Array
from experiments.bench.memory.lag import measure_lag
from experiments.bench.memory.replay_replica import Replayed, ReplayReplica, Setting, kept
from experiments.bench.memory.sizes import measure_memory, measure_recall, measure_snapshot
from experiments.bench.memory.trie_texts import corpus_texts
from experiments.bench.run import Bench, Results, Run

_LAG_RUNS = ((1, 300, 3, 0.02), (8, 300, 3, 0.02), (16, 300, 3, 0.02))  # requests, tokens of each, tokens and seconds of a step
_MEMORY_SIZES = (0, 1_000, 10_000, 100_000, 1_000_000)
_QUOTA_BYTES = 4 << 20  # of the tenant that floods


def measure(args: argparse.Namespace, run: Run) -> Results:
    """All figures, one after the other."""
    texts = corpus_texts(args.corpus, args.tokenizer, args.tokens, args.seed)
    known = read_known_texts(args.workload, TextTokenizer(args.tokenizer), None)
    results: Results = {"corpus": texts.about, "lag": [], "lag_without_wait": []}
    for waits, flush_s in (("lag", CacheOptions().flush_s), ("lag_without_wait", 0.0)):
        for sizes in _LAG_RUNS:
            for _ in range(args.repeats):
                run.progress.say(f"{waits}, {sizes[0]} requests")
                results[waits].append(_with_redis(texts.vocab_size, flush_s, measure_lag, *sizes))
    run.progress.say("snapshot")
    results["snapshot"] = _with_redis(texts.vocab_size, 0.02, measure_snapshot, texts.fill)
    run.progress.say("memory")
    results["memory"] = measure_memory(texts.fill, (*_MEMORY_SIZES, args.tokens))
    results["recall"] = []
    few = args.requests // 10
    for tenants, requests, history_tokens, embeddings in (
        (1, few, 1 << 23, False), (1, few, 1 << 23, True), (50, args.requests, 1 << 20, False),
    ):  # fmt: skip
        run.progress.say(f"recall, {requests} requests of {tenants} tenants{', with embeddings' if embeddings else ''}")
        results["recall"].append(measure_recall(texts.fill, tenants, requests, history_tokens, embeddings))
    run.progress.say("flood")
    results["flood"] = flood(known, texts.fill, args.flood, texts.vocab_size)
    return results


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("corpus", type=Path, nargs="+", help="texts to fill memories with")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--workload", type=Path, required=True, help="JSON lines with prompt and output")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of the snapshot")
    parser.add_argument("--flood", type=int, default=5_000_000, help="tokens of the tenant that floods")
    parser.add_argument("--requests", type=int, default=1_000_000, help="to remember, of 50 tenants")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each lag measurement")
    parser.add_argument("--seed", type=int, default=0)


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
        with kept(shared, _QUOTA_BYTES), ReplayReplica(shared, True) as writer, ReplayReplica(shared, True) as listener:
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


BENCH = Bench("cache-figures", __doc__ or "", measure, options, {"tokens": 1, "repeats": 1})
