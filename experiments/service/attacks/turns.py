"""Turns of forms of attack against a running server: the calm client alone, beside the attack, beside polite clients."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import psutil

from experiments.bench.progress import Progress
from experiments.bench.record import Kept
from experiments.service.attacks.attacker import Attacker, Load
from experiments.service.attacks.calm import CalmClient, Window
from experiments.service.attacks.form import Form
from experiments.service.attacks.verdicts import p95_ms
from experiments.service.overload import engine_pids
from experiments.service.served import Served

_WARM_UP_S = 0.4  # for which others run before the calm client's times count
_FIRST_S = 3.0  # of the calm client, before the first turn
_BUSY = 0.3  # cores that the processes of a server with work take
_LOOK_S, _SETTLE_S, _MEMORY_S = 0.2, 8.0, 6.0
_SAMPLE_S = 0.25


class Turns:
    """A server, its attacker and its calm client."""

    def __init__(self, server: Served, attacker: Attacker, calm_key: str, seconds: float, progress: Progress) -> None:
        """
        Args:
            server: with keys for all of them.
            attacker: of this server.
            calm_key: of the calm client.
            seconds: of a window.
            progress: told what runs.
        """
        self._server, self._attacker, self._seconds, self._progress = server, attacker, seconds, progress
        target = attacker.target
        self._calm = CalmClient(target.host, target.port, target.model, calm_key)
        self._pids = engine_pids(server)

    def play(self, forms: Sequence[Form], kept: Kept, rounds: int, minutes: float) -> None:
        """Measure each form in each round and keep it, until so many minutes are over; what is kept already is left out.

        Raises:
            RuntimeError: the server has ended.
        """
        until = time.monotonic() + 60 * minutes
        self._progress.left = lambda: f", {max(0.0, until - time.monotonic()) / 60:.0f} min left at most"
        with contextlib.closing(self._calm):
            self._calm.window(_FIRST_S)
            for number in range(rounds):
                for kind, group in groupby(forms, lambda form: form.kind):
                    missing = [form for form in group if not kept.has((form.title, number))]
                    before_mib = memory_mib(self._server)
                    for form in missing:
                        if time.monotonic() > until:
                            self._progress.say(f"the time is over in round {number + 1}")
                            return
                        kept.add({"form": form.title, "round": number, "emits": form.emits, **self._turn(form, number)})
                    if missing and not kept.has((kind, number)):
                        memory = {"before_mib": before_mib, "after_mib": self._memory_after(before_mib)}
                        kept.add({"form": kind, "kind": kind, "round": number, "memory": memory})

    def _turn(self, form: Form, number: int) -> dict[str, Any]:
        if not self._server.process.is_running() or self._server.process.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError(
                f"the server has ended before {form.title}, round {number + 1}: --resume goes on with the next one"
            )
        alone = self._calm.window(self._seconds)
        with self._peak() as peak:
            attack, load = self._beside(form, False, None)
        idle_s = self._settle()
        polite, polite_load = self._beside(form, True, load.per_s)
        self._settle()
        pids = engine_pids(self._server)
        sides = {"alone": told(alone), "attack": told(attack), "polite": told(polite)}
        sides["attack"] |= {
            "load": load.statuses,
            "shots_per_s": round(load.per_s, 2),
            "peak_mib": peak[0],
            "idle_after_s": idle_s,
        }
        sides["polite"] |= {"load": polite_load.statuses, "shots_per_s": round(polite_load.per_s, 2)}
        ratio = sides["attack"]["p95_ms"] / sides["polite"]["p95_ms"]
        times = ", ".join(f"{side} {sides[side]['p95_ms']:.1f}" for side in ("alone", "polite", "attack"))
        self._progress.note(f"round {number + 1}, {form.title}: p95 in ms {times}, {ratio:.2f} times")
        same, self._pids = pids == self._pids, pids
        return sides | {"same_processes": same}

    def _beside(self, form: Form, polite: bool, per_s: float | None) -> tuple[Window, Load]:
        """Return the calm client's window beside the clients of a form, and what these sent."""
        self._attacker.arm(form.title, polite)
        self._attacker.begin(per_s)
        try:
            window = self._calm.window(self._seconds, _WARM_UP_S)
        finally:
            load = self._attacker.stop()
        return window, load

    def _settle(self) -> float:
        """Wait until the server's processes have little to do, for some seconds at most, and return how long that was."""
        began, last = time.monotonic(), cpu_s(self._server)
        while time.monotonic() - began < _SETTLE_S:
            time.sleep(_LOOK_S)
            now = cpu_s(self._server)
            if now - last < _BUSY * _LOOK_S:
                break
            last = now
        return round(time.monotonic() - began, 2)

    def _memory_after(self, before_mib: float) -> float:
        """Return the memory once it is as before, or what it is after some seconds."""
        until = time.monotonic() + _MEMORY_S
        while (now := memory_mib(self._server)) > 1.05 * before_mib and time.monotonic() < until:
            time.sleep(_SAMPLE_S)
        return now

    @contextlib.contextmanager
    def _peak(self) -> Iterator[list[float]]:
        """Within the block memory is read; the most of it stands in the list."""
        most, ends = [0.0], threading.Event()

        def read() -> None:
            while not ends.wait(_SAMPLE_S):
                most[0] = max(most[0], memory_mib(self._server))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield most
        finally:
            ends.set()
            thread.join()


def told(window: Window) -> dict[str, Any]:
    """Return the figures of a window."""
    return {
        "p50_ms": p95_ms(window.gaps_s, 50),
        "p95_ms": p95_ms(window.gaps_s),
        "max_ms": p95_ms(window.gaps_s, 100),
        "ttft_p95_ms": p95_ms(window.firsts_s),
        "answer_p95_ms": p95_ms(window.wholes_s),
        "answers": len(window.firsts_s),
        "lost": window.lost,
        "others": window.others,
        "statuses": dict(window.statuses),
    }


def _processes(server: Served) -> list[psutil.Process]:
    try:
        return [server.process, *server.process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def memory_mib(server: Served) -> float:
    """Return the resident memory of all processes of a server together."""
    found = 0
    for process in _processes(server):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += process.memory_info().rss
    return round(found / 2**20, 1)


def cpu_s(server: Served) -> float:
    """Return the processor time of all processes of a server that run."""
    found = 0.0
    for process in _processes(server):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            found += times.user + times.system
    return found
