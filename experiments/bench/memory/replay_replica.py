"""A replica in a process of its own that follows known outputs instead of a model: its drafter, its mirror, a real Redis."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from cache_service.access import CacheAccess
from cache_service.keeper.server import CacheServer
from cache_service.mirror.mirror import Mirror, MirrorCounts
from cache_service.namespace import Identity, namespace
from configs.slices import CacheOptions
from decoding.drafters import build_drafter
from decoding.drafters.base import Drafter
from decoding.replay import KnownText, replay_workload
from decoding.request import text_key
from decoding.sources.history import Histories, History

_START_S, _SETTLE_S = 60.0, 60.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What all replicas of an experiment have in common."""

    strategy: str
    options: dict[str, Any]  # of the strategy
    budget: int
    identity: Identity
    url: str  # of Redis
    secret: bytes
    cache: CacheOptions
    tenants: tuple[str, ...]

    def namespace(self, tenant: str) -> str:
        """Of a tenant's keys in Redis."""
        return namespace(self.secret, tenant, self.identity.model_revision, self.identity.tokenizer_revision)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One request: how many forwards it took, and how many tokens came out."""

    steps: int
    tokens: int
    propose_s: float


def spawned(work: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """A fresh process, whose memory holds nothing else, that is given the other end of a pipe and some arguments."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    return process, here


@contextmanager
def kept(setting: Setting, quota_bytes: int) -> Iterator[CacheServer]:
    """The service that keeps what replicas of a setting share, each tenant up to a quota."""
    access = CacheAccess(setting.cache, setting.url, setting.secret, setting.tenants)
    server = CacheServer(access, setting.identity, dict.fromkeys(setting.tenants, quota_bytes))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def warm_up() -> None:
    """Compiles what writes to histories, so that no measurement waits for it."""
    History(1024).extend(1, 0, list(range(600)))


class ReplayReplica:
    """The replica as the experiment sees it: each call waits for its process. ``with`` ends that."""

    def __init__(self, setting: Setting, shares: bool) -> None:
        """Starts the process, and returns when it has loaded what the others have said.

        Args:
            setting: of the experiment.
            shares: has a mirror; else it knows its own outputs only.
        """
        self._process, self._end = spawned(_run, setting, shares)
        self.load_s: float = self._end.recv()  # seconds that the mirror took to start

    def replay(self, tenant: str, name: str, texts: Sequence[KnownText], publishes: bool = True) -> list[Replayed]:
        """Requests one after another; ``name`` makes their ids unique. What the replica learned stays with it."""
        return self._call("replay", tenant, name, texts, publishes)

    def learn(self, tenant: str, name: str, outputs: Sequence[Any]) -> None:
        """Whole outputs, as if requests had ended in them: published like all others."""
        self._call("learn", tenant, name, outputs)

    def settle(self, tenant: str, tokens: int) -> None:
        """Returns when the mirror holds so many tokens of a tenant.

        Raises:
            TimeoutError: it does not within a minute.
        """
        if not self._call("settle", tenant, tokens):
            raise TimeoutError(f"the replica did not see {tokens} tokens of {tenant} within {_SETTLE_S:.0f} s")

    def counts(self) -> MirrorCounts:
        """Of the mirror."""
        return self._call("counts")

    def _call(self, verb: str, *arguments: Any) -> Any:
        self._end.send((verb, *arguments))
        return self._end.recv()

    def __enter__(self) -> ReplayReplica:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._end.send(None)
        self._process.join(_START_S)
        if self._process.is_alive():
            self._process.kill()


def _run(end: Connection, setting: Setting, shares: bool) -> None:
    """The process: does what comes through the pipe."""
    drafter = build_drafter(setting.strategy, setting.options)
    memory = drafter.memory
    assert memory is not None, f"{setting.strategy} keeps nothing of past outputs"
    mirror, began = None, time.perf_counter()
    if shares:
        access = CacheAccess(setting.cache, setting.url, setting.secret, setting.tenants)
        mirror = Mirror(access, setting.identity, memory, lambda: None)
        mirror.start(_START_S)
    end.send(time.perf_counter() - began)
    follower = _Follower(drafter, mirror, setting)
    verbs: dict[str, Callable[..., Any]] = {
        "replay": follower.replay,
        "learn": lambda *arguments: _learn(memory, mirror, *arguments),
        "settle": lambda *arguments: _settle(memory, mirror, *arguments),
        "counts": lambda: None if mirror is None else mirror.counts(),
    }
    while (command := end.recv()) is not None:
        end.send(verbs[command[0]](*command[1:]))
    if mirror is not None:
        mirror.close()


@dataclass(frozen=True, slots=True)
class _Follower:
    """Requests one after another, as the engine's thread runs them."""

    drafter: Drafter
    mirror: Mirror | None
    setting: Setting

    def replay(self, tenant: str, name: str, texts: Sequence[KnownText], publishes: bool) -> list[Replayed]:
        """See ``ReplayReplica.replay``."""
        return [self._one(tenant, f"{name}-{at}-", text, publishes) for at, text in enumerate(texts)]

    def _one(self, tenant: str, prefix: str, text: KnownText, publishes: bool) -> Replayed:
        while self.mirror is not None and self.mirror.apply():
            pass
        counts = replay_workload(
            [text], lambda: self.drafter, self.setting.budget, self.setting.identity.vocab_size, time.perf_counter,
            id_prefix=prefix, tenant=tenant,
        )  # fmt: skip
        if self.mirror is not None and publishes:
            self.mirror.publish(tenant, text_key(f"{prefix}0"), 0, text.output_ids, True)
        return Replayed(counts.steps, counts.tokens, sum(counts.propose_s))


def _learn(memory: Histories, mirror: Mirror | None, tenant: str, name: str, outputs: Sequence[Any]) -> None:
    history = memory.of(tenant)
    assert history is not None
    for at, output in enumerate(outputs):
        text = text_key(f"{name}-{at}")
        history.extend(text, 0, output, final=True)
        if mirror is not None:
            mirror.publish(tenant, text, 0, output, True)


def _settle(memory: Histories, mirror: Mirror | None, tenant: str, tokens: int) -> bool:
    """Applies what comes until the history is long enough; False when it does not get there in time."""
    history, deadline = memory.of(tenant), time.monotonic() + _SETTLE_S
    assert history is not None and mirror is not None
    while history.frequencies.sum() < tokens and time.monotonic() < deadline:
        if not mirror.apply():
            time.sleep(0.002)
    return bool(history.frequencies.sum() >= tokens)
