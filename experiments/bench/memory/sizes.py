"""What much text costs the shared memory: time to fold, to write and to load it, and bytes, here and in Redis."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil

from cache_service.access import CacheAccess
from cache_service.keeper.snapshot import decode_snapshot, encode_snapshot
from cache_service.mirror.mirror import Mirror
from cache_service.records import CacheDelta, TextBatch, decode_batch, encode_batch
from cache_service.store.redis_store import RedisStore
from cache_service.texts import TenantTexts
from decoding.request import text_key
from decoding.sources.history import Histories, History
from decoding.tree import Int32Array
from experiments.bench.memory.replay_replica import Setting, spawned, warm_up

_BATCH_TEXTS = 64
_TRACED_TEXTS = 2000


def measure_snapshot(setting: Setting, texts: Sequence[Int32Array]) -> dict[str, Any]:
    """Texts folded by the service, written to Redis, and loaded by a process that starts.

    Args:
        setting: its first tenant is used.
        texts: outputs.

    Returns:
        Seconds of each part, and bytes.
    """
    tokens, vocab, began = sum(map(len, texts)), setting.identity.vocab_size, time.perf_counter()
    kept = _fold(texts, vocab)
    folded = time.perf_counter()
    snapshot = kept.snapshot("1-0", vocab, setting.identity.tokenizer_revision, time.time())
    data = encode_snapshot(snapshot)
    encoded = time.perf_counter()
    name = setting.namespace(setting.tenants[0])
    store = RedisStore(setting.url, setting.cache.prefix, 30.0)
    store.save_snapshot(name, "1-0", data)
    saved = time.perf_counter()
    decode_snapshot(data)
    decoded = time.perf_counter()
    in_redis = store.usage(name).snapshot_bytes
    store.close()
    loading = _in_process(_load, setting, tokens)
    return {
        "tokens": tokens, "texts": len(texts), "fold_s": round(folded - began, 2), "encode_s": round(encoded - folded, 2),
        "save_s": round(saved - encoded, 2), "decode_s": round(decoded - saved, 2), "snapshot_bytes": in_redis,
        "snapshot_bytes_per_token": round(in_redis / tokens, 2), "service_bytes_per_token": _service_bytes(texts, vocab),
        **loading,
    }  # fmt: skip


def _fold(texts: Sequence[Int32Array], vocab_size: int) -> TenantTexts:
    """What the service keeps of texts that came through a stream."""
    kept = TenantTexts()
    for start in range(0, len(texts), _BATCH_TEXTS):
        some = texts[start : start + _BATCH_TEXTS]
        deltas = tuple(CacheDelta(text_key(f"size-{start + at}"), 0, text, True) for at, text in enumerate(some))
        data = encode_batch(TextBatch(1, start // _BATCH_TEXTS, 0, deltas), vocab_size)
        kept.apply(decode_batch(data, vocab_size), time.time())
    return kept


def _service_bytes(texts: Sequence[Int32Array], vocab_size: int) -> float:
    """Bytes a token that the service allocates for the first of the texts."""
    some = texts[:_TRACED_TEXTS]
    tracemalloc.start()
    kept = _fold(some, vocab_size)
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept.texts) == len(some)
    return round(allocated / sum(map(len, some)), 1)


def measure_memory(texts: Sequence[Int32Array], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """What a tenant takes in a replica, by the tokens that it holds; each size in a process of its own."""
    rows = []
    for size in sizes:
        some, number = [], 0
        for text in texts:
            if number >= size:
                break
            some.append(text)
            number += len(text)
        rows.append(_in_process(_hold, some, max(1, size)))
    return rows


def _load(end: Connection, setting: Setting, tokens: int) -> None:
    """A replica that starts: what the snapshot costs it."""
    memory = Histories(2 * tokens)
    warm_up()
    before, began = _resident(), time.perf_counter()
    access = CacheAccess(setting.cache, setting.url, setting.secret, setting.tenants[:1])
    mirror = Mirror(access, setting.identity, memory, lambda: None)
    mirror.start(120.0)
    seconds = time.perf_counter() - began
    history = memory.of(setting.tenants[0])
    assert history is not None
    loaded = int(history.frequencies.sum())
    resident = _resident() - before
    mirror.close()
    end.send(
        {
            "load_s": round(seconds, 2),
            "loaded_tokens": loaded,
            "replica_bytes_per_token": round(resident / max(1, loaded), 1),
            "log_bytes_per_token": round(history.nbytes / max(1, loaded), 1),
        }
    )


def _hold(end: Connection, texts: Sequence[Int32Array], capacity: int) -> None:
    """A history of some texts."""
    warm_up()
    before = _resident()
    history = History(2 * capacity)
    for at, text in enumerate(texts):
        history.extend(text_key(f"hold-{at}"), 0, text, final=True)
    resident = _resident() - before
    end.send({"tokens": sum(map(len, texts)), "texts": len(texts), "log_bytes": history.nbytes, "resident_bytes": resident})


def _in_process(work: Any, *arguments: Any) -> Any:
    """What ``work`` sends from a process of its own."""
    process, here = spawned(work, *arguments)
    result = here.recv()
    process.join()
    return result


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(psutil.Process(os.getpid()).memory_info().rss)
