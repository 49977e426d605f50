"""Ranks with parts of one model on emulated devices: real processes and messages, and device times instead of all-reduces."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from transformers import PreTrainedModel

from outrider.actors.description import GroupState
from outrider.actors.lookahead.link import LINK_ERRORS, Link, connect, readable
from outrider.actors.ranks import GroupError, Ranks
from outrider.actors.sharded.group import CONNECT_S, RankHost
from outrider.actors.sharded.messages import DoneMessage, ReadyMessage, ShardedStep
from outrider.actors.sharded.rank import ShardServer
from outrider.actors.sharded.shard import GroupSettings, ShardSpec
from outrider.actors.wire import Message, WireError, encode
from outrider.configs.slices import EmulationOptions, EngineOptions
from outrider.engine.emulation.clock import EmulatedClock
from outrider.engine.emulation.device import local_executor
from outrider.engine.emulation.roofline import DeviceRoofline
from outrider.engine.errors import DeviceError, one_line
from outrider.engine.executor import Executor
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.runners import make_runner


def _of_group(roofline: DeviceRoofline, shard: ShardSpec) -> DeviceRoofline:
    return dataclasses.replace(roofline, split=shard.mode, ranks=shard.world_size)


class EmulatedShardServer(ShardServer):
    """``ShardServer`` without a model: takes the device time of each step, and says so."""

    def __init__(self, shard: ShardSpec, terms: GroupSettings, emulation: EmulationOptions) -> None:
        """Listen on a free loopback port. Raises ``ModelLoadError`` for an unknown model or link."""
        self._roofline, self._clock = _of_group(DeviceRoofline.of(emulation), shard), EmulatedClock(emulation.time_dilation)
        super().__init__(None, shard, terms)

    def _follow(self, link: Link) -> None:
        link.send(ReadyMessage(self._roofline.card.name))
        # All ranks end an all-reduce together; a stage of a pipeline ends after those before it.
        share = (self._shard.rank + 1) / self._shard.world_size if self._shard.mode == "pipeline" else 1.0
        while True:
            step = self._take(link)
            if not isinstance(step, ShardedStep):
                raise WireError(f"expected ShardedStep from the leader, got {type(step).__name__}")
            hidden_s = self._clock.hidden_s
            with self._clock.working(share * self._roofline.seconds(step.batch.segments)):
                pass
            link.send(DoneMessage(self._clock.wall(), self._clock.hidden_s - hidden_s))


class EmulatedShards(Ranks):
    """``Ranks`` whose devices are emulated. The leader has the whole model or the known outputs, and the others nothing."""

    world_size = 1  # all ranks compute the same trees

    def __init__(self, shard: ShardSpec, housing: RankHost, terms: GroupSettings) -> None:
        """Store the parts. ``housing`` starts an ``EmulatedShardServer`` for each follower; ``shard`` is the leader's, rank 0."""
        assert shard.rank == 0 and shard.world_size > 1, shard
        self._shard, self.housing, self._terms = shard, housing, terms
        self._links: list[Link] = []
        self.done = [0] * (shard.world_size - 1)  # steps that each follower has computed

    def runner(self, model: PreTrainedModel, capacity: int, options: EngineOptions, tree_rows: int) -> ModelRunner:
        """See ``Ranks``."""
        try:
            for address in self.housing.addresses(self._terms.start_timeout_s):
                self._links.append(connect(address, self._terms.secret, CONNECT_S))
            self._each(ReadyMessage, self._terms.start_timeout_s)
        except LINK_ERRORS as error:
            raise GroupError(one_line(error)) from error
        return make_runner(model, capacity, options, tree_rows)

    def executor(self, runner: ModelRunner) -> Executor:
        """See ``Ranks``."""
        device = runner.emulated
        assert device is not None
        device.roofline = _of_group(device.roofline, self._shard)
        device.together = self._announcing(device.clock)
        return local_executor(runner)

    def state(self) -> GroupState | None:
        """See ``Ranks``. All ranks are ready for as long as this process runs."""
        return GroupState(self._shard.world_size, tuple(range(self._shard.world_size)), (), 0, None, 0, 0)

    def close(self) -> None:
        """See ``Ranks``."""
        for link in self._links:
            link.close()
        self.housing.close()

    def _announcing(self, clock: EmulatedClock) -> Callable[[Batch], contextlib.AbstractContextManager[None]]:
        @contextlib.contextmanager
        def together(batch: Batch) -> Iterator[None]:
            hidden_s = clock.hidden_s
            try:
                data = encode(ShardedStep((), batch))
                for link in self._links:
                    link.send_bytes(data)
                yield
                began = clock.wall()
                done = self._each(DoneMessage, self._terms.step_timeout_s)
            except (GroupError, *LINK_ERRORS) as error:  # as a rank that is lost in an all-reduce: the process has to end
                raise DeviceError(f"a rank is gone: {one_line(error)}") from error
            clock.join(hidden_s, began, [(one.ended_s, one.hidden_s) for one in done if isinstance(one, DoneMessage)])

        return together

    def _each(self, kind: type[Message], timeout_s: float) -> Sequence[Message]:
        """Return a message of each follower. Raises GroupError for another kind or after a time, or one of ``LINK_ERRORS``."""
        deadline, missing, found = time.monotonic() + timeout_s, list(self._links), []
        while missing:
            ready = readable(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise GroupError(f"{len(missing)} ranks did not answer within {timeout_s:.0f} s")
            for link in ready:
                message = link.take()
                if not isinstance(message, kind):
                    raise GroupError(f"rank {self._links.index(link) + 1} sent {message}")
                self.done[self._links.index(link)] += isinstance(message, DoneMessage)
                found.append(message)
                missing.remove(link)
        return found
