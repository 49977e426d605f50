"""How long it takes until what one process emits can be drafted from in another, and what it costs in the stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from cache_service.access import CacheAccess
from cache_service.mirror.mirror import Mirror
from cache_service.store.redis_store import RedisStore
from decoding.request import text_key
from decoding.sources.history import Histories
from experiments.bench.memory.replay_replica import Setting, spawned, warm_up

_CAPACITY = 1 << 20
_LISTEN_S = 10.0  # after the last token was sent


def measure_lag(setting: Setting, requests: int, tokens: int, step_tokens: int, step_s: float) -> dict[str, Any]:
    """One process decodes, another listens.

    Args:
        setting: its first tenant is used.
        requests: that run at the same time.
        tokens: of each.
        step_tokens: that each step gives each request.
        step_s: seconds of a step.

    Returns:
        Milliseconds from the commit of a step's tokens in one process to the moment from which the other drafts from them, and
        what the stream took for a token.
    """
    decoder, here = spawned(_decode, setting, requests, tokens, step_tokens, step_s)
    listener, listening = spawned(_listen, setting, requests * tokens)
    assert listening.recv() == "ready" and here.recv() == "ready"
    here.send("go")
    sent: list[tuple[int, float]] = here.recv()
    seen: list[tuple[int, float]] = listening.recv()
    for process in (decoder, listener):
        process.join()
    lags = _lags(sent, seen)
    name = setting.namespace(setting.tenants[0])
    store = RedisStore(setting.url, setting.cache.prefix, setting.cache.timeout_s)
    usage = store.usage(name)
    store.close()
    return {
        "requests": requests, "step_tokens": step_tokens, "step_ms": 1e3 * step_s, "steps": len(sent),
        "lag_ms_p50": round(float(np.percentile(lags, 50)), 3), "lag_ms_p99": round(float(np.percentile(lags, 99)), 3),
        "lag_ms_max": round(float(lags.max()), 3), "stream_entries": usage.stream_entries,
        "stream_bytes_per_token": round(usage.stream_bytes / (requests * tokens), 2),
    }  # fmt: skip


def _lags(sent: Sequence[tuple[int, float]], seen: Sequence[tuple[int, float]]) -> Any:
    """[steps] milliseconds until as many tokens were there as had been sent by the end of each step.

    Raises:
        RuntimeError: some never came.
    """
    numbers, times = [number for number, _ in seen], [moment for _, moment in seen]
    places = np.searchsorted(numbers, [number for number, _ in sent])
    if places.max() >= len(times):
        raise RuntimeError(f"{sent[-1][0]} tokens were sent, {numbers[-1] if numbers else 0} came")
    return np.array([1e3 * (times[place] - moment) for place, (_, moment) in zip(places, sent, strict=True)])


def _mirror(setting: Setting, wake: Any) -> tuple[Mirror, Histories]:
    warm_up()
    memory = Histories(_CAPACITY)
    mirror = Mirror(CacheAccess(setting.cache, setting.url, setting.secret, setting.tenants), setting.identity, memory, wake)
    mirror.start(30.0)
    return mirror, memory


def _decode(end: Connection, setting: Setting, requests: int, tokens: int, step_tokens: int, step_s: float) -> None:
    """The process that emits: after each step its clock and how many tokens there are."""
    mirror, _ = _mirror(setting, lambda: None)
    generator = np.random.default_rng(0)
    outputs = generator.integers(0, setting.identity.vocab_size, (requests, tokens))
    end.send("ready")
    end.recv()
    sent, next_step = [], time.monotonic()
    for at in range(0, tokens, step_tokens):
        time.sleep(max(0.0, next_step - time.monotonic()))
        next_step += step_s
        moment = time.monotonic()
        for request in range(requests):
            new = outputs[request, at : at + step_tokens].tolist()
            mirror.publish(setting.tenants[0], text_key(f"lag-{request}"), at, new, at + step_tokens >= tokens)
        mirror.apply()
        sent.append((requests * min(at + step_tokens, tokens), moment))
    mirror.close()
    end.send(sent)


def _listen(end: Connection, setting: Setting, expected: int) -> None:
    """The process that listens, as an idle engine does: it sleeps until something has come."""
    arrived = threading.Event()
    mirror, memory = _mirror(setting, arrived.set)
    history = memory.of(setting.tenants[0])
    assert history is not None
    seen: list[tuple[int, float]] = []
    end.send("ready")
    known, last = 0, time.monotonic()
    while known < expected and time.monotonic() < last + _LISTEN_S:
        arrived.wait(0.5)
        arrived.clear()
        while mirror.apply():
            pass
        now, number = time.monotonic(), int(history.frequencies.sum())
        if number > known:
            known, last = number, now
            seen.append((number, now))
    mirror.close()
    end.send(seen)
