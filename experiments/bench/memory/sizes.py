"""What much text costs the shared memory: time to fold, to write, to load and to find it, and bytes, here and in Redis."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from cache_service.access import CacheAccess
from cache_service.keeper.snapshot import decode_snapshot, encode_snapshot
from cache_service.mirror.mirror import Mirror
from cache_service.records import CacheDelta, TextBatch, decode_batch, encode_batch
from cache_service.store.redis_store import RedisStore
from cache_service.texts import TenantTexts
from decoding.request import Request, SamplingParams, text_key
from decoding.sources.embeddings import signs_of
from decoding.sources.history import Histories, History, compile_recall
from decoding.sources.log.chains import BLOCK
from decoding.tree import Int32Array
from experiments.bench.memory.replay_replica import Setting, spawned, warm_up

_BATCH_TEXTS = 64
_TRACED_TEXTS = 2000
_PROMPT, _OUTPUT, _STRIDE = 300, 48, 37  # tokens of requests that are recalled, and from one to the next
_LOOK_UPS = 2000
_EMBEDDING, _MEANINGS, _NOISE = 384, 2000, 0.3  # numbers of an embedding, directions, and how far requests are from theirs


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


def measure_recall(
    texts: Sequence[Int32Array], tenants: int, requests: int, history_tokens: int, embeddings: bool = False
) -> dict[str, Any]:
    """What it takes to remember many requests, and to find those that resemble one; in a process of its own.

    Args:
        texts: of which prompts and outputs are pieces.
        tenants: that have as many requests each.
        requests: of all of them.
        history_tokens: see ``AutoDrafter``.
        embeddings: whether each request has one.

    Returns:
        Bytes, those of a request's notes in Redis among them, microseconds of a look-up, on the clock and of the processor, and
        the share of prompts, each altered in five tokens, of which the output of the unaltered one came back first.
    """
    found: dict[str, Any] = _in_process(_recall, np.concatenate(texts), tenants, requests, history_tokens, embeddings)
    return found


def _recall(end: Connection, text: Int32Array, tenants: int, requests: int, history_tokens: int, embeddings: bool) -> None:
    warm_up()
    compile_recall()
    rng, each, before = np.random.default_rng(0), requests // tenants, _resident()
    meanings = rng.standard_normal((_MEANINGS if embeddings else 0, _EMBEDDING))

    def asked(number: int, altered: int = 0) -> Request:
        """The request of a number; its prompt is a piece of the text, or nearly one."""
        start = number * _STRIDE % (len(text) - _PROMPT - _OUTPUT)
        prompt = text[start : start + _PROMPT].copy()
        prompt[rng.integers(0, _PROMPT, altered)] += 1
        signs = None
        if embeddings:
            signs = signs_of((meanings[number % _MEANINGS] + _NOISE * rng.standard_normal(_EMBEDDING)).tolist())
        params = SamplingParams(max_tokens=2 * _OUTPUT)
        request = Request(f"r{number}-{altered}", prompt, params, tenant="t", embedding=signs)
        request.commit(np.append(text[start + _PROMPT :][: _OUTPUT - 1], number % 1000).tolist())
        return request

    histories, began = [History(history_tokens) for _ in range(tenants)], time.perf_counter()
    for number in range(requests):
        one, history = asked(number), histories[number % tenants]
        history.start(one.text)
        history.extend(one.text, 0, one.output_ids, final=True)
        history.remember(one)
    remembered_s, resident = time.perf_counter() - began, _resident() - before
    known = min(each, max(1, history_tokens // BLOCK))
    clock, processor, hits = list[float](), list[float](), 0
    for _ in range(_LOOK_UPS):
        number = int(requests - 1 - rng.integers(0, known) * tenants)
        one, history = asked(number, 5), histories[number % tenants]
        looked, computed = time.perf_counter(), time.thread_time()
        recalled = history.recall(one, 4)
        clock.append(1e6 * (time.perf_counter() - looked))
        processor.append(1e6 * (time.thread_time() - computed))
        hits += bool(recalled) and recalled[0].tokens.tolist() == asked(number).output_ids.tolist()
    notes = histories[(requests - 1) % tenants].notes(asked(requests - 1))
    batch = TextBatch(1, 0, 0, tuple(CacheDelta(key, 0, tokens, True) for key, tokens in notes))
    end.send(
        {
            "tenants": tenants, "requests": requests, "remembered": known * tenants, "history_tokens": history_tokens,
            "prompt_tokens": _PROMPT, "output_tokens": _OUTPUT,
            "resident_bytes": resident, "bytes": sum(history.nbytes for history in histories),
            "bytes_in_redis_per_request": len(encode_batch(batch, 1 << 16)) - len(encode_batch(TextBatch(1, 0, 0), 1 << 16)),
            "remember_us": round(1e6 * remembered_s / requests, 1),
            "embeddings": embeddings, "recall_us": _shares(clock), "recall_processor_us": _shares(processor),
            "found": round(hits / _LOOK_UPS, 4),
        }
    )  # fmt: skip


def _shares(microseconds: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": round(float(np.percentile(microseconds, share)), 1) for share in (50, 99)}


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
