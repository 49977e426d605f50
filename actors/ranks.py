"""Interface of ranks that share a replica's steps. Does not import Ray, so replicas can be tested without a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from transformers import PreTrainedModel

from outrider.actors.description import GroupState
from outrider.actors.lookahead.executor import StepTimes
from outrider.configs.slices import EngineOptions
from outrider.engine.errors import DeviceError
from outrider.engine.executor import Executor
from outrider.engine.forward.cached_checks import make_runner_with_cached_check
from outrider.engine.forward.runner import ModelRunner


class GroupError(RuntimeError):
    """Error of a rank group that cannot be started. The message says which rank, why, and what to do."""


class Ranks(ABC):
    """Ranks that share the steps of one engine, including its own (0, the leader); by default each holds the whole model."""

    world_size: int  # most ranks among which a step's draft trees are partitioned; trees are scaled by it

    # Called from any thread if a device fails that this process depends on. It may not return.
    device_failed: Callable[[DeviceError], object] | None = None

    def runner(self, model: PreTrainedModel, capacity: int, options: EngineOptions, tree_rows: int) -> ModelRunner:
        """Return the engine's own runner, of the model or a part. Called once, before ``executor``. Raises GroupError."""
        return make_runner_with_cached_check(model, capacity, options, tree_rows)

    @abstractmethod
    def executor(self, runner: ModelRunner) -> Executor:
        """Return the executor of the engine's steps. Called once, by ``Engine.load`` after the model is loaded."""

    def start(self) -> None:  # noqa: B027  not abstract: ranks with parts of a model start in ``runner``
        """Wait until the ranks take part. Called once, after the engine is loaded. Raises GroupError if they cannot start."""

    def occupied(self, busy: bool) -> None:  # noqa: B027  not abstract: many groups ignore it
        """Set whether the engine has requests. Called by the engine's thread."""

    @abstractmethod
    def state(self) -> GroupState | None:
        """Return the group's composition; None before the engine is loaded."""

    def devices(self) -> tuple[str, ...] | None:
        """Return the followers' devices (``meter_name``); None if they cannot be metered or also work for other replicas."""
        return None

    def times(self) -> list[StepTimes]:
        """Return the times of the latest steps; empty if steps are not measured by rank."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Stop the ranks and their supervisor. Idempotent."""
