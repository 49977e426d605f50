"""Ray actor that runs a rank."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import ray

from outrider.actors.heap import spare_collector
from outrider.actors.lookahead.link import Address
from outrider.actors.lookahead.rank import RankServer
from outrider.actors.placement.pinning import allowed_cores, own_cores, pin_thread
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.engine.engine import load_runner
from outrider.engine.executor import LocalExecutor
from outrider.engine.measures.energy import meter_name


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Address, process and device of a rank."""

    address: Address
    pid: int
    node: str
    device: str  # model device as ``engine.measures.energy`` names it on that node
    max_model_len: int  # tokens of a request that fit into its slots


class RankActor:
    """Follower with a copy of the model. Ends with the actor that created it."""

    def __init__(
        self,
        model: ModelOptions,
        engine: EngineOptions,
        speculation: SpeculationOptions,
        parallelism: ParallelismOptions,
        world_size: int,
    ) -> None:
        self._model, self._engine, self._speculation = model, engine, speculation
        self._parallelism, self._world_size = parallelism, world_size
        self._server: RankServer | None = None

    def load(self, pinned: tuple[int, int] | None, secret: bytes) -> RankAddress:
        """Load the model and listen. Raises ModelLoadError, or GroupError if the node has too few cores.

        ``pinned`` is (number of lower ranks on the node, cores per rank); None does not pin threads.
        """
        prepare = None if pinned is None else functools.partial(pin_thread, own_cores(*pinned, allowed_cores()))
        loaded, runner = load_runner(self._model, self._engine, self._speculation, self._world_size)
        spare_collector()
        host = "127.0.0.1" if self._parallelism.placement == "STRICT_PACK" else ray.util.get_node_ip_address()
        self._server = RankServer(LocalExecutor(runner), secret, self._parallelism, host, prepare)
        node, device = ray.get_runtime_context().get_node_id(), meter_name(runner.model.device)
        return RankAddress(self._server.address, os.getpid(), node, device, loaded.max_model_len)
