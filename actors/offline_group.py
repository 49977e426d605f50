"""``OfflineEngine`` over several ranks, in a private Ray cluster that stops with it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group

from outrider.actors.heap import spare_collector
from outrider.actors.lookahead.group import Group
from outrider.actors.offline import GroupCounts, OfflineEngine, OfflinePrompt
from outrider.actors.placement.bundles import BundleActor
from outrider.actors.placement.own_ray import start_ray
from outrider.actors.placement.ray_folder import RayFolder
from outrider.actors.ranks import GroupError
from outrider.configs.schema import MAX_WORLD_SIZE
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.decoding.request import SamplingParams, StepOutput
from outrider.engine.errors import ModelLoadError, one_line
from outrider.engine.loading.model_info import ModelInfo

logger = logging.getLogger(__name__)

STREAM_S = 0.05  # period of output messages; each costs the leader's thread a fraction of a millisecond


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Number of ranks, and the resources of each."""

    world_size: int
    device: str  # cuda or cpu
    threads: int | None  # per rank on a CPU; None on GPUs

    @property
    def bundle(self) -> dict[str, float]:
        """Return the resources that Ray reserves for a rank."""
        return {"GPU": 1.0} if self.threads is None else {"CPU": float(self.threads)}


def group_shape(world_size: int | str, model: ModelOptions, cpus: int, gpus: int) -> GroupShape:
    """Return the ranks that fit on a machine. Raises GroupError for too few GPUs or cores, or a device that is a single GPU.

    Example: on 16 cores without a GPU, ``auto`` with 4 threads is 4 ranks; 3 ranks without a number of threads get 5 each.
    """
    if model.device.startswith("cuda:"):
        raise GroupError(f"device {model.device} is one GPU: several ranks take one each, so give cuda")
    if model.device == "cuda" or (model.device == "auto" and gpus):
        ranks = max(1, min(gpus, MAX_WORLD_SIZE)) if world_size == "auto" else int(world_size)
        if ranks > gpus:
            raise GroupError(f"world size {ranks} needs {ranks} GPUs, one for each rank, but there are {gpus}")
        return GroupShape(ranks, "cuda", None)
    if world_size == "auto":
        threads = model.threads or 1
        ranks = max(1, min(cpus // threads, MAX_WORLD_SIZE))
    else:
        ranks = int(world_size)
        threads = model.threads or max(1, cpus // ranks)
    if ranks * threads > cpus:
        raise GroupError(
            f"world size {ranks} with {threads} threads a rank needs {ranks * threads} CPU cores, but there are {cpus}: lower "
            "one of them"
        )
    return GroupShape(ranks, "cpu", threads)


class OfflineLeader:
    """Actor that runs the leader: the engine, and the group that shares its steps."""

    def load(
        self, model: ModelOptions, engine: EngineOptions, speculation: SpeculationOptions, parallelism: ParallelismOptions
    ) -> ModelInfo:
        """Load the model in this process and in its followers. Raises the errors of ``OfflineEngine``."""
        self._engine = OfflineEngine(model, engine, speculation, Group(model, engine, speculation, parallelism))
        spare_collector()
        return self._engine.info

    def submit(self, prompts: Sequence[OfflinePrompt], params: SamplingParams, chat: bool) -> list[int | str]:
        """See ``OfflineEngine``."""
        return self._engine.submit(prompts, params, chat)

    def outputs(self) -> Iterator[list[StepOutput]]:
        """See ``OfflineEngine``."""
        yield from self._engine.outputs(STREAM_S)

    def group_counts(self) -> GroupCounts | None:
        """See ``OfflineEngine``."""
        return self._engine.group_counts()


class OfflineGroup:
    """``OfflineEngine`` with a leader and followers in a placement group of a private Ray cluster."""

    def __init__(
        self, model: ModelOptions, engine: EngineOptions, speculation: SpeculationOptions, parallelism: ParallelismOptions
    ) -> None:
        """Start Ray and the ranks of ``group_shape``, and load the model. Raises ModelLoadError, GroupError, or ValueError."""
        self._failed = False
        try:
            self._folder = RayFolder.make()
        except OSError as error:
            raise GroupError(f"Ray did not start: {one_line(error)[:400]}") from error
        try:
            _start(self._folder)
            resources = ray.cluster_resources()
            shape = group_shape(parallelism.world_size, model, int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))
            self.world_size, self.threads = shape.world_size, shape.threads
            # One machine: the configured placement across nodes does not apply.
            parallelism = dataclasses.replace(parallelism, mode="lookahead", world_size=shape.world_size, placement="STRICT_PACK")
            model = dataclasses.replace(model, device=shape.device, threads=shape.threads or model.threads)
            bundles = placement_group([shape.bundle] * shape.world_size, strategy="STRICT_PACK")
            self._leader = BundleActor(OfflineLeader, bundles, 0).handle
            self.info: ModelInfo = _answer(self._leader.load.remote(model, engine, speculation, parallelism))
        except BaseException as error:
            self._failed = isinstance(error, GroupError)
            self.close()
            raise

    def submit(self, prompts: Sequence[OfflinePrompt], params: SamplingParams, chat: bool) -> list[int | str]:
        """See ``OfflineEngine``."""
        counts: list[int | str] = _answer(self._leader.submit.remote(list(prompts), params, chat))
        return counts

    def outputs(self) -> Iterator[list[StepOutput]]:
        """See ``OfflineEngine``. Raises GroupError if the leader fails."""
        for reference in self._leader.outputs.options(num_returns="streaming").remote():
            try:
                outputs: list[StepOutput] = _answer(reference)
            except GroupError:
                self._failed = True
                raise
            yield outputs

    def group_counts(self) -> GroupCounts | None:
        """See ``OfflineEngine``."""
        counts: GroupCounts | None = _answer(self._leader.group_counts.remote())
        return counts

    def close(self) -> None:
        """Stop Ray and all ranks. Idempotent."""
        ray.shutdown()
        kept = self._folder.end(keep_logs=self._failed)
        if kept is not None:
            logger.warning("the logs of the ranks are kept in %s", kept)


def _start(folder: RayFolder) -> None:
    try:
        with _uninterrupted():
            start_ray(folder=folder)
    except (RuntimeError, ValueError, OSError, RayError) as error:
        raise GroupError(f"Ray did not start: {one_line(error)[:400]}") from error


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.alarm(0)  # if Ray's C++ handler got SIGTERM first, it aborts after 3 s
    sys.exit(128 + number)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C, SIGTERM and SIGHUP until the block ends."""
    # If Ray is interrupted during its start, it cannot be stopped cleanly. SIGTERM and SIGHUP are recorded instead of blocked,
    # because Ray's processes would inherit the signal mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    noted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    came: list[int] = []
    for number in noted:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number in noted:
            signal.signal(number, _terminate)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if came:
        _terminate(came[0], None)


def _answer(reference: ray.ObjectRef[Any]) -> Any:
    """Return the result of a call to the leader; raise errors meant for users unchanged, all others as a one-line GroupError."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, (ModelLoadError, GroupError, ValueError)):
            raise error.cause from None
        raise GroupError(f"the leader of the group failed: {one_line(error.cause)[:400]}") from error
    except RayError as error:
        said = str(error).strip().split("\n")[0]  # the following lines are Ray internals
        raise GroupError(f"the leader of the group ended, possibly out of memory: {said}") from error
