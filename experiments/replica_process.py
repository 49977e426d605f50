"""A replica in a process of its own, asked through a pipe: what experiments use where a Serve application would add noise."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from actors.lookahead.elastic import Elastic
from actors.lookahead.link import Address
from actors.replica import Replica
from configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from decoding.request import Request, SamplingParams
from experiments.contestants import Prompt

_LOAD_S, _ANSWER_S, _STOP_S = 300.0, 600.0, 30.0
# Forked from a process that has imported everything and computed nothing: several replicas start as fast as one.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["experiments.replica_process"])


@dataclass(frozen=True, slots=True)
class Answered:
    """A request, streamed to its end."""

    output: list[int]
    steps: int  # forwards that emitted tokens
    seconds: float  # from asking to the end
    widths: list[int]  # ranks that shared the steps, whenever tokens came


@dataclass(frozen=True, slots=True)
class _Meet:
    rank: int
    peers: dict[int, Address]


@dataclass(frozen=True, slots=True)
class _Ask:
    prompts: list[Prompt]
    max_tokens: int
    at_once: bool


@dataclass(frozen=True, slots=True)
class ReplicaSetting:
    """What a replica is."""

    model: ModelOptions  # with the number of threads
    engine: EngineOptions
    speculation: SpeculationOptions
    parallelism: ParallelismOptions | None  # of an elastic group; None for a replica that computes alone
    secret: bytes  # of the group
    world_size: int  # the most ranks of a group


class ReplicaProcess:
    """The other end of the pipe."""

    def __init__(self, setting: ReplicaSetting) -> None:
        """Starts it, and returns when the model is loaded. Raises RuntimeError when it does not come up."""
        self._pipe, theirs = _forks.Pipe()
        self._process = _forks.Process(target=_serve, args=(theirs, setting), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._address: Address | None = self._hear(_LOAD_S)
        except (EOFError, TimeoutError) as error:
            self.close()
            raise RuntimeError(f"a replica with {setting.model.path} did not come up; its own message stands above") from error

    @property
    def address(self) -> Address:
        """Where its peers reach it."""
        assert self._address is not None, "a replica that computes alone listens nowhere"
        return self._address

    def meet(self, rank: int, peers: dict[int, Address]) -> None:
        """Tells it its number, and where the others are."""
        self._pipe.send(_Meet(rank, peers))

    def ask(self, prompts: Sequence[Prompt], max_tokens: int, at_once: bool) -> None:
        """Has it answer some prompts with ``max_tokens`` each, greedily; ``answers`` waits for them."""
        self._pipe.send(_Ask(list(prompts), max_tokens, at_once))

    def answers(self) -> list[Answered]:
        """What ``ask`` asked for, in order. Raises TimeoutError when it hangs, EOFError when it has ended."""
        answers: list[Answered] = self._hear(_ANSWER_S)
        return answers

    def close(self) -> None:
        """Ends it."""
        self._pipe.close()
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _hear(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"a replica says nothing for {timeout_s:.0f} s")
        return self._pipe.recv()


def _serve(pipe: Connection, setting: ReplicaSetting) -> None:
    """Of the process: answers until the other end of the pipe is gone."""
    elastic = None
    if setting.parallelism is not None:
        elastic = Elastic(setting.parallelism, setting.secret, setting.world_size)
    replica = Replica(setting.model, setting.engine, setting.speculation, None, elastic)
    numbers = itertools.count()
    try:
        pipe.send(None if elastic is None else elastic.address)
        while True:
            command = pipe.recv()
            if isinstance(command, _Meet):
                assert elastic is not None, "a replica that computes alone meets nobody"
                elastic.meet(command.rank, command.peers)
            else:
                pipe.send(asyncio.run(_answer_all(replica, command, numbers)))
    except (EOFError, ConnectionError):  # the experiment has ended
        replica.stop()


async def _answer_all(replica: Replica, ask: _Ask, numbers: Iterator[int]) -> list[Answered]:
    if ask.at_once:
        return list(await asyncio.gather(*(_answer(replica, prompt, ask.max_tokens, next(numbers)) for prompt in ask.prompts)))
    return [await _answer(replica, prompt, ask.max_tokens, next(numbers)) for prompt in ask.prompts]


async def _answer(replica: Replica, prompt: Prompt, max_tokens: int, number: int) -> Answered:
    """One request, of no tenant: what it says teaches no other."""
    params = SamplingParams(max_tokens, ignore_eos=True)
    request = Request(str(number), prompt.ids, params, prompt.references)
    widths, began = [], time.perf_counter()
    async for output in replica.generate(request):
        if output.error is not None:
            raise RuntimeError(f"a request failed: {output.error}")
        if output.token_ids:
            group = replica.describe().group
            widths.append(1 if group is None or group.width is None else group.width)
    return Answered(request.output_ids.tolist(), request.stats.steps, time.perf_counter() - began, widths)
