"""Turns of forms of attack against a running server: the calm client alone, beside the attack, beside polite clients."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import psutil

from outrider.experiments.bench.progress import Progress
from outrider.experiments.service.attacks.attacker import Attacker, Load
from outrider.experiments.service.attacks.calm import CalmClient, Window
from outrider.experiments.service.attacks.forms import Form
from outrider.experiments.service.attacks.turns import SIDES, p95_ms
from outrider.experiments.service.served import Served

_WARM_UP_S = 0.4  # of a load, before the calm client's times count
_FIRST_S = 3.0  # of the calm client, before the first turn
_BUSY = 0.3  # cores above which a server counts as busy
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
            progress: for messages.
        """
        self._server, self._attacker, self._seconds, self._progress = server, attacker, seconds, progress
        target = attacker.target
        self._calm = CalmClient(target.host, target.port, target.model, calm_key)
        self._pids = server.serve_pids()

    def play(self, forms: Sequence[Form], rounds: int) -> list[dict[str, Any]]:
        """Measure each form in each round, and the memory after the forms of a kind.

        Raises:
            RuntimeError: the server has ended.
        """
        found: list[dict[str, Any]] = []
        with contextlib.closing(self._calm):
            self._calm.window(_FIRST_S)
            for number in range(rounds):
                for kind, group in groupby(forms, lambda form: form.kind):
                    before_mib = _memory_mib(self._server)
                    for form in group:
                        found.append({"form": form.title, "round": number, "emits": form.emits, **self._turn(form, number)})
                    memory = {"before_mib": before_mib, "after_mib": self._memory_after(before_mib)}
                    found.append({"form": kind, "kind": kind, "round": number, "memory": memory})
        return found

    def _turn(self, form: Form, number: int) -> dict[str, Any]:
        if not self._server.process.is_running() or self._server.process.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError(f"the server has ended before {form.title}, round {number + 1}")
        alone = self._calm.window(self._seconds)
        attack, load = self._beside(form, False, None)
        idle_s = self._settle()
        polite, polite_load = self._beside(form, True, load.per_s)
        self._settle()
        pids = self._server.serve_pids()
        sides = {"alone": figures(alone), "attack": figures(attack, load), "polite": figures(polite, polite_load)}
        sides["attack"]["idle_after_s"] = idle_s
        ratio = sides["attack"]["p95_ms"] / sides["polite"]["p95_ms"]
        times = ", ".join(f"{side} {sides[side]['p95_ms']:.1f}" for side in SIDES)
        self._progress.note(f"round {number + 1}, {form.title}: p95 in ms {times}, {ratio:.2f} times")
        same, self._pids = pids == self._pids, pids
        return sides | {"same_processes": same}

    def _beside(self, form: Form, polite: bool, per_s: float | None) -> tuple[Window, Load]:
        """Return the calm client's window beside the clients of a form, and their load."""
        self._attacker.begin(form.title, polite, per_s)
        try:
            window = self._calm.window(self._seconds, _WARM_UP_S)
        finally:
            load = self._attacker.stop()
        return window, load

    def _settle(self) -> float:
        """Wait until the server is nearly idle, for some seconds at most, and return how long that was."""
        began, last = time.monotonic(), _cpu_s(self._server)
        while time.monotonic() - began < _SETTLE_S:
            time.sleep(_LOOK_S)
            now = _cpu_s(self._server)
            if now - last < _BUSY * _LOOK_S:
                break
            last = now
        return round(time.monotonic() - began, 2)

    def _memory_after(self, before_mib: float) -> float:
        """Return the memory once it is as before, or after some seconds."""
        until = time.monotonic() + _MEMORY_S
        while (now := _memory_mib(self._server)) > 1.05 * before_mib and time.monotonic() < until:
            time.sleep(_SAMPLE_S)
        return now


def figures(window: Window, load: Load | None = None) -> dict[str, Any]:
    """Return the figures of a window, and of the load beside it."""
    found: dict[str, Any] = {
        "p95_ms": p95_ms(window.gaps_s),
        "max_ms": p95_ms(window.gaps_s, 100),
        "ttft_p95_ms": p95_ms(window.firsts_s),
        "answer_p95_ms": p95_ms(window.wholes_s),
        "lost": window.lost,
        "others": window.others,
        "statuses": dict(window.statuses),
    }
    return found | ({} if load is None else {"load": load.statuses})


def _processes(server: Served) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [server.process, *server.process.children(recursive=True)]
    return []


def _memory_mib(server: Served) -> float:
    """Return the resident memory of all processes of a server together."""
    found = 0
    for process in _processes(server):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += process.memory_info().rss
    return round(found / 2**20, 1)


def _cpu_s(server: Served) -> float:
    """Return the processor time of all running processes of a server."""
    found = 0.0
    for process in _processes(server):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            found += times.user + times.system
    return found
