"""Interface of the ranks that share a replica's steps. Without Ray, so that a replica is tested without a cluster."""

from __future__ import annotations

from typing import Protocol

from transformers import PreTrainedModel

from actors.lookahead.executor import GroupState
from configs.slices import EngineOptions
from engine.executor import Executor
from engine.forward.runner import ModelRunner


class GroupError(RuntimeError):
    """The ranks of a group cannot be had. The message says which, why, and what to do."""


class Ranks(Protocol):
    """The ranks that share the steps of one engine, the engine's own (rank 0, the leader) among them."""

    @property
    def world_size(self) -> int:
        """The most ranks to which a step's trees may be partitioned: trees are as many times as large."""

    def runner(self, model: PreTrainedModel, capacity: int, options: EngineOptions) -> ModelRunner:
        """The engine's own runner, of the whole model or a part; see ``engine.forward.runners``. Called once, before
        ``executor``.

        Raises:
            GroupError: the model cannot be shared with the ranks, or these cannot be had.
        """

    def executor(self, runner: ModelRunner) -> Executor:
        """What computes the engine's steps. Called once, by ``Engine.load`` when the model is there."""

    def start(self) -> None:
        """Returns when the ranks take part; called once, after the engine is loaded.

        Raises:
            GroupError: they cannot be had.
        """

    def occupied(self, busy: bool) -> None:
        """Says whether the engine has requests; called by its thread. Groups whose ranks do nothing else ignore it."""

    def state(self) -> GroupState | None:
        """Who takes part; None before the engine is loaded."""

    def devices(self) -> tuple[str, ...] | None:
        """What all ranks but the leader compute on (``engine.measures.energy.meter_name``), once they take part.

        None where that cannot be metered from here, or computes for others, too.
        """

    def close(self) -> None:
        """Ends the ranks and what watches them. Harmless when repeated."""
