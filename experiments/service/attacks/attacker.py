"""Hostile clients in a low-priority process, and one shot of each form."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from outrider.experiments.service.attacks.forms import Form, all_forms
from outrider.experiments.service.attacks.shots import Shot, Target, answered, fire
from outrider.experiments.service.served import give_way

_POLL_S = 0.02
_BEGIN_S, _STOP_S = 60.0, 20.0  # within which the process answers, or is replaced


@dataclass(frozen=True, slots=True)
class Load:
    """The shots of some clients."""

    shots: int  # begun
    seconds: float
    statuses: dict[str, int]  # of those that ended

    @property
    def per_s(self) -> float:
        """Shots per second."""
        return self.shots / max(self.seconds, 1e-9)


class Attacker:
    """The process, started with its first load and replaced when it does not answer."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._begun = False

    def begin(self, title: str, polite: bool, per_s: float | None = None) -> None:
        """Start the clients of a form or its polite ones, limited to so many shots per second together."""
        self._begun = self._ask((title, polite, per_s), _BEGIN_S) is not None

    def stop(self) -> Load:
        """Stop all clients and return their load; without figures if the process had to be replaced."""
        load = self._ask("stop", _STOP_S) if self._begun else None
        return load if isinstance(load, Load) else Load(0, 1.0, {"attacker replaced": 1})

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = None

    def _ask(self, message: object, within_s: float) -> object:
        """Send a message and return the answer; None if the process had to be replaced."""
        if self._process is None or not self._process.is_alive():
            spawn = multiprocessing.get_context("spawn")
            self._pipe, theirs = spawn.Pipe()
            self._process = spawn.Process(target=_serve, args=(self.target, theirs), daemon=True)
            self._process.start()
            theirs.close()
        assert self._pipe is not None
        answer: object = None
        # A process that has ended breaks the pipe. Like one that does not answer, it is replaced, and ``stop`` reports it.
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            self._pipe.send(message)
            answer = self._pipe.recv() if self._pipe.poll(within_s) else None
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            self.close()
        return answer


def attacker_cores() -> list[int]:
    """Return the cores of attackers: the last one of those available."""
    return [max(os.sched_getaffinity(0))] if hasattr(os, "sched_getaffinity") else []


def _serve(target: Target, pipe: Connection) -> None:
    """Play the forms named by the other end of the pipe, until it is closed."""
    give_way()
    if cores := attacker_cores():
        os.sched_setaffinity(0, cores)
    forms = {form.title: form for form in all_forms()}
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            title, polite, per_s = pipe.recv()
            form = forms[title]
            try:
                shots = (form.polite if polite else form.attack)(target)
            except OSError as error:  # the stream to be resumed did not come
                pipe.send(RuntimeError(f"{title}: {error!r}"))
                continue
            pipe.send("begun")
            pipe.send(asyncio.run(play(form, shots, target, per_s, pipe)))


async def play(form: Form, shots: Sequence[Shot], target: Target, per_s: float | None, ends: Connection) -> Load:
    """Fire shots in turns from all clients of a form, at most ``per_s`` per second together, until a message comes."""
    statuses: Counter[str] = Counter()
    begun, clients = 0, target.scaled(form.clients)
    gap_s = clients / per_s if per_s else 0.0
    began = time.monotonic()

    async def client(number: int) -> None:
        nonlocal begun
        at, due = number, time.monotonic() + number / clients * gap_s
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due, begun = max(due + gap_s, time.monotonic()), begun + 1
            reply = await fire(shots[at % len(shots)], target)
            statuses[reply.label] += 1
            at += clients
            await asyncio.sleep(form.pause_s)

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    while not ends.poll():
        await asyncio.sleep(_POLL_S)
    ends.recv()
    seconds = time.monotonic() - began
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(ended, asyncio.CancelledError):
            statuses[repr(ended)] += 1
    return Load(begun, seconds, dict(statuses))


async def once(
    forms: Sequence[Form], target: Target, most: int = 40, at_once: int = 4, within_s: float = 25.0
) -> dict[str, dict[str, int]]:
    """Fire each shot of each form once, at most ``most`` of a form, and count the answers of each form by status.

    Forms of an admin port that the target does not have are left out.
    """
    free, found = asyncio.Semaphore(at_once), dict[str, dict[str, int]]()

    async def one(form: Form) -> None:
        async with free:
            shots = (await asyncio.to_thread(form.attack, target))[:most]
            replies = await asyncio.gather(*(answered(shot, target, within_s, tries=100) for shot in shots))
            found[form.title] = dict(Counter(reply.label for reply in replies))

    reachable = [form for form in forms if target.admin_port is not None or not form.on_admin_port]
    await asyncio.gather(*map(one, reachable))
    return {form.title: found[form.title] for form in reachable}
