"""Hostile clients in a process of their own, which gives way to all others; and one shot of each form."""

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

from experiments.service.attacks.catalog import all_forms
from experiments.service.attacks.form import Form
from experiments.service.attacks.shots import Reply, Shot, Target, fire
from experiments.service.served import give_way

_POLL_S = 0.02
_ARM_S, _STOP_S = 60.0, 20.0  # within which the process answers, or is replaced
_ONCE_S = 25.0  # for which one shot of a form is waited
_AGAIN_S = 0.5  # after a 429


@dataclass(frozen=True, slots=True)
class Load:
    """What clients sent."""

    shots: int  # begun
    seconds: float
    statuses: dict[str, int]  # of those that ended

    @property
    def per_s(self) -> float:
        """Shots in a second."""
        return self.shots / max(self.seconds, 1e-9)


class Attacker:
    """The process. It is started with its first load, and again where it does not answer."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self.restarts = -1  # since the first start

    def arm(self, title: str, polite: bool) -> None:
        """Have the shots of a form made, or those of its polite clients."""
        self._ask(("arm", title, polite), _ARM_S)

    def begin(self, per_s: float | None = None) -> None:
        """Have clients fire what was made, so many shots a second at most."""
        assert self._pipe is not None
        self._pipe.send(("begin", per_s))

    def stop(self) -> Load:
        """Have all clients leave, and return what they sent; nothing is known of a process that has to be replaced."""
        told = self._ask(("stop",), _STOP_S)
        return told if isinstance(told, Load) else Load(0, 1.0, {"attacker replaced": 1})

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = None

    def _ask(self, message: tuple[object, ...], within_s: float) -> object:
        """Send a message and return the answer; None where the process had to be replaced."""
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(message)
            if self._pipe.poll(within_s):
                answer = self._pipe.recv()
                if isinstance(answer, Exception):
                    raise answer
                return answer
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # it has ended
        self.close()
        return None

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(self.target, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.restarts += 1


def attacker_cores() -> list[int]:
    """Return the cores that attackers keep to: the last one of those that this process may use."""
    return [max(os.sched_getaffinity(0))] if hasattr(os, "sched_getaffinity") else []


def _serve(target: Target, pipe: Connection) -> None:
    """Do what the other end of the pipe says, until it is closed."""
    give_way()
    if cores := attacker_cores():
        os.sched_setaffinity(0, cores)
    forms = {form.title: form for form in all_forms()}
    form, shots = next(iter(forms.values())), list[Shot]()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            name, *arguments = pipe.recv()
            if name == "arm":
                form = forms[str(arguments[0])]
                try:
                    shots = list((form.polite if arguments[1] else form.attack)(target))
                    pipe.send("armed")
                except OSError as error:  # a stream that was to be gone on with did not come
                    pipe.send(RuntimeError(f"{form.title}: {error!r}"))
            elif name == "begin":
                pipe.send(asyncio.run(play(form, shots, target, arguments[0], pipe)))
            else:
                pipe.send(Load(0, 1.0, {}))  # nothing was begun


async def play(form: Form, shots: Sequence[Shot], target: Target, per_s: float | None, ends: Connection) -> Load:
    """Fire shots from all clients of a form until something comes through a pipe.

    Args:
        form: says how many clients there are.
        shots: fired in turns.
        target: of them.
        per_s: shots in a second at most, of all clients together.
        ends: tells when to end.
    """
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
    forms: Sequence[Form], target: Target, most: int = 40, at_once: int = 4, within_s: float = _ONCE_S
) -> dict[str, dict[str, int]]:
    """Fire each shot of each form once, those of a form at the same time; by form how many answers had which status.

    Args:
        forms: without those of an admin port that the target does not have.
        target: of them.
        most: shots of a form.
        at_once: forms that are tried at the same time.
        within_s: for which the answer to a shot is waited.
    """
    free, found = asyncio.Semaphore(at_once), dict[str, dict[str, int]]()

    async def one(form: Form) -> None:
        async with free:
            shots = (await asyncio.to_thread(form.attack, target))[:most]
            replies = await asyncio.gather(*(_accepted(shot, target, within_s) for shot in shots))
            found[form.title] = dict(Counter(reply.label for reply in replies))

    reachable = [form for form in forms if target.admin_port is not None or not form.on_admin_port]
    await asyncio.gather(*map(one, reachable))
    return {form.title: found[form.title] for form in reachable}


async def _accepted(shot: Shot, target: Target, within_s: float) -> Reply:
    """Return the answer to a shot, which is fired again where the server has too much to do."""
    reply = Reply()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while (reply := await fire(shot, target)).status == 429:
                await asyncio.sleep(_AGAIN_S)
    return reply
