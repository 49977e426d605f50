"""Transports between ranks, measured beside each other by ``experiments/exchange.py``: what a step sends and answers."""

from __future__ import annotations

import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist

from actors.lookahead.link import set_timeouts

COMMAND_BYTES, ANSWER_BYTES = 1000, 300  # 32 rows with tokens and parents, and a walk with the argmax below each row
COMMAND, ANSWER = struct.Struct("<I996x"), struct.Struct("<d292x")  # products to compute; seconds that they took
_SECRET = b"of the measurement"
_TIMEOUT_S = 60.0
_SIDE = 256  # of the matrices that stand for compute

Step = tuple[float, float]  # seconds of a step, and of the compute of its slowest rank


class Transport(Protocol):
    """The leader's end."""

    def step(self, products: int, compute: Callable[[int], float]) -> Step:
        """Has every rank compute, this one too, and waits for all answers."""
        ...

    def close(self) -> None:
        """Leaves the other ranks."""
        ...


class Star:
    """A connection to each rank, as in ``actors.lookahead.link``: over TCP with TCP_NODELAY, or over Unix sockets."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def step(self, products: int, compute: Callable[[int], float]) -> Step:
        """See ``Transport``."""
        started = time.perf_counter()
        command = COMMAND.pack(products)
        for connection in self._connections:
            connection.send_bytes(command)
        own = compute(products)
        slowest = max(own, *(ANSWER.unpack(connection.recv_bytes())[0] for connection in self._connections))
        return time.perf_counter() - started, slowest

    def close(self) -> None:
        """See ``Transport``."""
        for connection in self._connections:
            connection.close()


class Gloo:
    """torch.distributed: the leader's command is broadcast, then all gather all answers. Every rank runs ``take_part``."""

    def __init__(self, rank: int, group: dist.ProcessGroup, world: int) -> None:
        self._rank, self._group = rank, group
        self._command, self._answer = torch.zeros(COMMAND_BYTES // 4, dtype=torch.int32), torch.zeros(ANSWER_BYTES // 4)
        self._answers = [torch.zeros(ANSWER_BYTES // 4) for _ in range(world)]

    def step(self, products: int, compute: Callable[[int], float]) -> Step:
        """See ``Transport``. A negative command ends ``take_part``."""
        started = time.perf_counter()
        self._command[0] = products
        dist.broadcast(self._command, 0, self._group)
        self._answer[0] = compute(products) if products >= 0 else 0.0
        dist.all_gather(self._answers, self._answer, self._group)
        return time.perf_counter() - started, max(float(answer[0]) for answer in self._answers)

    def take_part(self, compute: Callable[[int], float]) -> None:
        """What the other ranks do until ``close``."""
        products = 0
        while products >= 0:
            dist.broadcast(self._command, 0, self._group)
            products = int(self._command[0])
            self._answer[0] = compute(products) if products >= 0 else 0.0
            dist.all_gather(self._answers, self._answer, self._group)

    def close(self) -> None:
        """See ``Transport``."""
        self.step(-1, lambda products: 0.0)


class ExchangeRank:
    """A process of one thread that computes. Rank 0 is the leader, which measures; the others answer."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        generator = torch.Generator().manual_seed(rank)
        self._matrices = [torch.randn(_SIDE, _SIDE, generator=generator) for _ in range(2)]
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._groups: dict[int, dist.ProcessGroup] = {}

    def process_id(self) -> int:
        """Of the actor."""
        return os.getpid()

    def pin(self, cores: set[int]) -> None:
        """Keeps all threads of the process on some cores."""
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)

    def products_for(self, seconds: float) -> int:
        """How many products take so long here."""
        self.compute(20)
        return max(1, round(seconds / min(self.compute(20) for _ in range(5)) * 20))

    def compute(self, products: int) -> float:
        """Multiplies matrices on one thread; returns the seconds."""
        started = time.perf_counter()
        for _ in range(products):
            torch.mm(*self._matrices)
        return time.perf_counter() - started

    def answer(self, command: bytes) -> bytes:
        """A rank's part of a step."""
        return ANSWER.pack(self.compute(COMMAND.unpack(command)[0]))

    def listen(self) -> tuple[tuple[str, int], str]:
        """Answers one leader over TCP and one over a Unix socket, each from a thread; returns the two addresses."""
        self._folder = tempfile.TemporaryDirectory(prefix="exchange-")
        listeners = [
            Listener(("127.0.0.1", 0), family="AF_INET", authkey=_SECRET),
            Listener(str(Path(self._folder.name) / "rank"), family="AF_UNIX", authkey=_SECRET),
        ]
        for listener in listeners:
            threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        return tuple(listener.address for listener in listeners)

    def _serve(self, listener: Listener) -> None:
        while True:
            with listener.accept() as connection:
                if isinstance(listener.address, tuple):
                    set_timeouts(connection, _TIMEOUT_S)
                try:
                    while True:
                        connection.send_bytes(self.answer(connection.recv_bytes()))
                except EOFError:
                    pass  # the leader has closed it; the next one may come

    def join(self, store: str, worlds: Sequence[int]) -> None:
        """Makes gloo groups of the first ranks, one for each world size; all ranks do so at once."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=600), max(worlds), self._rank)
        self._groups = {world: dist.new_group(list(range(world))) for world in worlds}

    def take_part(self, world: int) -> None:
        """Answers over gloo until the leader is done."""
        Gloo(self._rank, self._groups[world], world).take_part(self.compute)

    def measure(
        self, name: str, products: int, steps: int, idle_s: float, followers: Sequence[Any], addresses: Sequence[Any],
        processes: Sequence[int],
    ) -> tuple[list[Step], float | None]:  # fmt: skip
        """The leader: opens a transport, takes steps, pauses, and takes one more.

        Args:
            name: of the transport, one of ``TRANSPORTS``.
            products: computed by each rank in a step.
            steps: that are timed, after a few that are not.
            idle_s: the pause, in which all wait; 0 for none.
            followers: the actors of the other ranks that take part.
            addresses: what their ``listen`` said.
            processes: their process ids.

        Returns:
            The steps, and the cores that one of the others kept busy in the pause, on average; None without one.
        """
        transport = self.open(name, followers, addresses)
        try:
            for _ in range(5):
                transport.step(products, self.compute)
            times = [transport.step(products, self.compute) for _ in range(steps)]
            cores = None
            if idle_s:
                cores = _busy_cores(processes, idle_s)
                transport.step(0, self.compute)
            return times, cores
        finally:
            transport.close()

    def open(self, name: str, followers: Sequence[Any], addresses: Sequence[Any]) -> Transport:
        """The leader's end of a transport to some ranks: see ``measure``."""
        if name == "tcp":
            connections = [Client(address, family="AF_INET", authkey=_SECRET) for address, _ in addresses]
            for connection in connections:
                set_timeouts(connection, _TIMEOUT_S)
            return Star(connections)
        if name == "unix":
            return Star([Client(path, family="AF_UNIX", authkey=_SECRET) for _, path in addresses])
        assert name == "gloo", name
        return Gloo(0, self._groups[len(followers) + 1], len(followers) + 1)


def _busy_cores(processes: Sequence[int], seconds: float) -> float:
    """Processor time over time of some processes, on average, while nothing is asked of them."""
    watched = [psutil.Process(process) for process in processes]
    before, started = [sum(process.cpu_times()[:2]) for process in watched], time.perf_counter()
    time.sleep(seconds)
    took = time.perf_counter() - started
    return sum(sum(process.cpu_times()[:2]) - was for process, was in zip(watched, before, strict=True)) / len(watched) / took
