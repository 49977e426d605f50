"""Data that describes a replica. It is sent to processes that load no model, so importing it must not import one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.cache_service.namespace import Identity
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.measures.metrics import EngineCounts

if TYPE_CHECKING:
    from outrider.cache_service.client.cache_client import CacheClientCounts
    from outrider.engine.measures.energy_ledger import EnergyCounts
    from outrider.engine.measures.metrics import EmulatedCounts, MetricsCounts, StrategyCounts


class ReplicaError(RuntimeError):
    """Error of a replica that cannot serve: its engine failed for good, hangs, or was stopped. Replace the replica."""


class DeviceLostError(ReplicaError):
    """Error of a replica whose device failed. Its process exits; its requests continue on another replica."""

    def __init__(self, engine: str, kind: str, reason: str) -> None:
        """Store the fault: ``kind`` is one of ``DEVICE_FAULTS``; ``engine`` identifies a failure reported several times."""
        # All arguments: pickle, with which the error travels between processes, calls the class with the exception's `args`.
        super().__init__(engine, kind, reason)
        self.engine, self.kind, self.reason = engine, kind, reason

    def __str__(self) -> str:
        return f"the device failed: {self.reason}"


@dataclass(frozen=True, slots=True)
class GroupState:
    """Composition and counters of a rank group."""

    world_size: int
    ready: tuple[int, ...]  # ranks that compute steps, including the leader
    refilling: tuple[int, ...]  # ranks that are receiving the running requests
    losses: int
    last_loss: str | None
    divergences: int  # walks dropped because their first token differed from the leader's (a near-tie, rounded differently)
    disagreements: int  # ranks whose committed text differed from the leader's
    width: int | None = None  # elastic groups: ranks that currently share this replica's steps; None: always all ready ranks
    exchange_s: float = 0.0  # total over all steps that emitted tokens, see StepTimes
    exchange_bytes: int = 0  # size of these steps' messages in both directions

    @property
    def degraded(self) -> bool:
        """Return whether a rank is missing."""
        return len(self.ready) < self.world_size


@dataclass(frozen=True, slots=True)
class Description:
    """Model, load, and shared-cache state of a replica."""

    info: ModelInfo
    counts: EngineCounts
    cache: CacheClientCounts | None  # None if the replica shares no cache
    group: GroupState | None = None  # ranks that share its steps; None if it computes alone
    strategies: tuple[StrategyCounts, ...] = ()  # counts of its finished requests by drafting strategy
    energy: EnergyCounts | None = None  # None if no device is metered
    metrics: MetricsCounts | None = None
    emulated: EmulatedCounts | None = None  # None if its device is real
    version: str = ""  # version that it was deployed with, see ``cluster.app``


def identity_of(info: ModelInfo) -> Identity:
    """Return the part of the model info from which tenant namespaces in Redis are derived."""
    adapters = tuple((each.name, each.revision) for each in info.adapters)
    return Identity(info.model_revision, info.tokenizer_revision, info.vocab_size, adapters)
