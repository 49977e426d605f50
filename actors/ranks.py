"""Ranks that share a replica's steps. Without Ray, so that a replica is tested without a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from transformers import PreTrainedModel

from actors.description import GroupState
from actors.lookahead.executor import StepTimes
from configs.slices import EngineOptions
from engine.errors import DeviceError
from engine.executor import Executor
from engine.forward.runner import ModelRunner
from engine.forward.runners import make_runner


class GroupError(RuntimeError):
    """The ranks of a group cannot be had. The message says which, why, and what to do."""


class Ranks(ABC):
    """The ranks that share the steps of one engine, the engine's own (rank 0, the leader) among them.

    What is not abstract is that of ranks which each have the whole model and wait for their leader.
    """

    world_size: int  # the most ranks to which a step's trees may be partitioned: trees are as many times as large

    # To be told, from any thread, that a device failed without which this process is of no use; it may not return.
    device_failed: Callable[[DeviceError], object] | None = None

    def runner(self, model: PreTrainedModel, capacity: int, options: EngineOptions, tree_rows: int) -> ModelRunner:
        """The engine's own runner, of the whole model or a part; see ``engine.forward.runners``. Called once, before
        ``executor``.

        Raises:
            GroupError: the model cannot be shared with the ranks, or these cannot be had.
        """
        return make_runner(model, capacity, options, tree_rows)

    @abstractmethod
    def executor(self, runner: ModelRunner) -> Executor:
        """What computes the engine's steps. Called once, by ``Engine.load`` when the model is there."""

    def start(self) -> None:  # noqa: B027  those of a part of a model are there since ``runner``
        """Returns when the ranks take part; called once, after the engine is loaded.

        Raises:
            GroupError: they cannot be had.
        """

    def occupied(self, busy: bool) -> None:  # noqa: B027  to many it is all the same
        """Says whether the engine has requests; called by its thread."""

    @abstractmethod
    def state(self) -> GroupState | None:
        """Who takes part; None before the engine is loaded."""

    def devices(self) -> tuple[str, ...] | None:
        """What all ranks but the leader compute on (``engine.measures.energy.meter_name``), once they take part.

        None where that cannot be metered from here, or computes for others, too.
        """
        return None

    def times(self) -> list[StepTimes]:
        """What the latest steps took; none where steps are not taken apart by rank."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Ends the ranks and what watches them. Harmless when repeated."""
