"""Endurance: thousands of short requests of all kinds through one engine. None is lost, each answer is right, and at the end the
engine holds what it held at the beginning."""

from __future__ import annotations

import ctypes
import functools
import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import pytest

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.registry import STRATEGIES
from outrider.decoding.request import FinishReason
from outrider.engine.engine import Engine
from outrider.engine.executor import Executor, LocalExecutor
from outrider.engine.forward.runner import ModelRunner
from tests.helpers.models import llama_config, save_model
from tests.helpers.traffic import FailingExecutor, Rush, Watch, make_cases

RUNNING = 6
HISTORY_TOKENS = 4096  # of a tenant: full soon, so that most of the time old texts make room
FAILS_EVERY = 97  # steps
TENANTS = ("a", "b", "c", None, "a")
STRATEGIES_OF_REQUESTS = (None, None, None, "suffix", "recycling", "autoregressive", "jacobi")
PARTS = 4
GROWTH_BYTES = 1 << 20  # of a part of the requests


def resident_bytes() -> int:
    """Memory of this process, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def load(
    folder: Path, strategy: str, running: int, executor: Callable[[ModelRunner], Executor] = LocalExecutor, **options: object
) -> Engine:
    speculation = SpeculationOptions(
        strategy,
        max_draft_tokens=12,
        options={"history_tokens": HISTORY_TOKENS} if strategy == "auto" else {},
        strategies=tuple(name for name in STRATEGIES_OF_REQUESTS if name) if strategy == "auto" else (),
    )
    assert set(speculation.strategies) <= set(STRATEGIES)
    engine = EngineOptions(max_running=running, max_step_tokens=64, **options)  # type: ignore[arg-type]
    return Engine.load(ModelOptions(str(folder), dtype="float32"), engine, speculation, executor=executor)


def options_of(number: int) -> dict[str, object]:
    """Of the request of a number: numbers without a common factor, so that all of them meet."""
    return {
        "tenant": TENANTS[number % len(TENANTS)],
        "priority": (0, 0, 1, 0, -1, 3, 0, 0, 2, 0, 0)[number % 11],
        "strategy": STRATEGIES_OF_REQUESTS[number % len(STRATEGIES_OF_REQUESTS)],
        "max_draft_tokens": (None, None, 2)[number % 3],
    }


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.proof)])
def test_no_request_no_slot_and_no_memory_is_lost(tmp_path: Path, count: int) -> None:
    # In a process of its own, where nothing else grows.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        alone.submit(endure, tmp_path, count).result()


def endure(tmp_path: Path, count: int) -> None:
    """Raises AssertionError where something is lost of so many requests."""
    config = llama_config(tie_word_embeddings=True, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    folder = save_model(tmp_path / "tiny", config, seed=4)
    cases = make_cases(load(folder, "autoregressive", 1, prefix_caching=False), 90, seed=31, longest_prompt=40, max_tokens=12)
    failing = functools.partial(FailingExecutor, every=FAILS_EVERY)
    watch = Watch(load(folder, "auto", RUNNING, failing, scheduling_policy="priority"))
    grown, before = [], resident_bytes()
    for part in range(PARTS):  # the first one fills what is bounded
        rush = Rush(count // PARTS, most_live=3 * RUNNING)
        rush.play(watch, cases, seed=count + part, options=lambda number, part=part: options_of(number + 2 * part))
        now = resident_bytes()
        grown.append(now - before)
        before = now
    # What leaks leaks in every part; what was compiled or loaded on the way comes once.
    assert min(grown[1:]) < GROWTH_BYTES, f"grown by {[f'{each / 2**20:.1f} MiB' for each in grown]}"
    assert watch.ended.total() == count and watch.engine.counts().free_slots == RUNNING
    assert all(watch.ended[reason] > count // 50 for reason in FinishReason)
    assert watch.preemptions > count // 100 and watch.accepted > count // 10 and watch.cached > count
    assert watch.engine.histories is not None
    for tenant in {*TENANTS} - {None}:
        history = watch.engine.histories.of(tenant)
        assert history is not None and 0 < history.num_tokens <= HISTORY_TOKENS
    assert watch.engine.histories.public.num_tokens == 0
