"""What a replica says of itself. Plain data: it travels to processes that have no model and import none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache_service.namespace import Identity
from engine.loading.model_info import ModelInfo
from engine.measures.metrics import EngineCounts

if TYPE_CHECKING:
    from cache_service.mirror.mirror import MirrorCounts
    from engine.measures.energy_ledger import EnergyCounts
    from engine.measures.metrics import MetricsCounts
    from engine.measures.strategy_counts import StrategyCounts


class ReplicaError(RuntimeError):
    """The replica cannot serve: its engine failed for good, hangs, or was stopped. It has to be replaced."""


class DeviceLostError(ReplicaError):
    """The device of a replica failed, and its process ends. That is no fault of its requests, which go on elsewhere."""

    def __init__(self, engine: str, kind: str, reason: str) -> None:
        """
        Args:
            engine: name of the replica's engine, by which one failure is known as such.
            kind: one of ``engine.errors.DEVICE_FAULTS``.
            reason: of the device, in one line.
        """
        super().__init__(engine, kind, reason)
        self.engine, self.kind, self.reason = engine, kind, reason

    def __str__(self) -> str:
        return f"the device failed: {self.reason}"


@dataclass(frozen=True, slots=True)
class GroupState:
    """How a group is made up."""

    world_size: int
    ready: tuple[int, ...]  # ranks that share the steps, the leader among them
    refilling: tuple[int, ...]  # ranks that are sent the live requests
    losses: int
    last_loss: str | None
    divergences: int  # walks that were left out because their first token was not the leader's: a near-tie, rounded otherwise
    disagreements: int  # ranks whose committed text was not the leader's
    width: int | None = None  # of an elastic group: ranks that share this replica's steps now; None: all that are ready, always
    exchange_s: float = 0.0  # of all steps that emitted tokens, see StepTimes
    exchange_bytes: int = 0  # of the messages of these steps, both ways

    @property
    def degraded(self) -> bool:
        """Whether a rank is missing."""
        return len(self.ready) < self.world_size


@dataclass(frozen=True, slots=True)
class Description:
    """What a replica serves, how busy it is, and how it gets on with the cluster's memory."""

    info: ModelInfo
    counts: EngineCounts
    cache: MirrorCounts | None  # None where nothing is shared
    group: GroupState | None = None  # the ranks that share its steps; None where it computes alone
    strategies: tuple[StrategyCounts, ...] = ()  # its requests that have ended, by who drafted for them
    energy: EnergyCounts | None = None  # None where nothing is metered
    metrics: MetricsCounts | None = None
    version: str = ""  # that it was deployed with, see ``cluster.app``


def identity_of(info: ModelInfo) -> Identity:
    """What the names of its tenants in Redis depend on."""
    adapters = tuple((each.name, each.revision) for each in info.adapters)
    return Identity(info.model_revision, info.tokenizer_revision, info.vocab_size, adapters)
