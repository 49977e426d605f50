"""Turns of forms of attack against a running server, and verdicts on them.

In a turn the calm client is alone, then beside the attack, then beside polite clients.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import psutil

from outrider.cluster.observe.replay_check import median_interval
from outrider.experiments.bench.progress import Progress
from outrider.experiments.service.attacks.attacker import Attacker, Load
from outrider.experiments.service.attacks.calm import TOKENS, CalmClient, Window
from outrider.experiments.service.attacks.forms import Form
from outrider.experiments.service.attacks.shots import is_fault
from outrider.experiments.service.served import Served

PERIOD_S = 0.04  # minimum time between two events of a stream while four or more requests emit
LEAST_MS = 2.0  # a step: faster events come in a burst
NOTHING_MS = 30_000.0  # the calm client's timeout
SIDES = ("alone", "polite", "attack")
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Goals:
    """Upper bounds of an attack's effect. Whole answers are bounded, too, since the p95 hides one late token per answer."""

    to_polite: float = 1.5  # p95 beside an attack, relative to that beside polite clients
    to_alone: float = 3.0  # the same, relative to that without other clients
    memory: float = 1.1  # of all processes after the attacks of a kind, relative to before
    rows: float = 0.5  # steps with a row of the calm request, relative to those beside polite requests


def p95_ms(times_s: Sequence[float], share: float = 95) -> float:
    """Return a percentile in milliseconds; ``NOTHING_MS`` without values."""
    return round(1e3 * float(np.percentile(times_s, share)), 3) if times_s else NOTHING_MS


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the bounds of 90 % of the medians of resamples."""
    low, high = median_interval(np.asarray(values, float), np.random.default_rng(seed), _RESAMPLES)
    return round(low, 3), round(high, 3)


def ratios(rounds: Sequence[Mapping[str, Any]], to: str, least_ms: float = 0.0, figure: str = "p95_ms") -> dict[str, Any]:
    """Return a figure beside the attack relative to that of another side: median over the rounds, range and interval."""
    found = [each["attack"][figure] / max(each[to][figure], least_ms, LEAST_MS) for each in rounds]
    return {
        "median": round(statistics.median(found), 3),
        "range": [round(min(found), 3), round(max(found), 3)],
        "interval": list(interval(found)),
    }


def verdict(title: str, emits: bool, rounds: Sequence[Mapping[str, Any]], goals: Goals) -> dict[str, Any]:
    """Return a form's figures over its rounds, which have a window of every side, and its failures.

    If the form ``emits``, the calm client's time alone counts as a period of events at least.
    """
    least_ms = 1e3 * PERIOD_S if emits else 0.0
    compared = {
        ("tokens", "polite"): (ratios(rounds, "polite"), goals.to_polite),
        ("tokens", "alone"): (ratios(rounds, "alone", least_ms), goals.to_alone),
        ("answers", "polite"): (ratios(rounds, "polite", 0.0, "answer_p95_ms"), goals.to_polite),
        ("answers", "alone"): (ratios(rounds, "alone", TOKENS * least_ms, "answer_p95_ms"), goals.to_alone),
    }
    fails = [
        f"{what} {ratio['median']:.2f} times {side}, at most {goal:g}"
        for (what, side), (ratio, goal) in compared.items()
        if ratio["median"] > goal
    ]
    windows = [each[side] for each in rounds for side in SIDES]
    counts = {
        "calm streams lost": sum(window["lost"] for window in windows),
        "calm texts are other ones": sum(window["others"] for window in windows),
        "calm requests not answered with 200": sum(
            count for window in windows for status, count in window["statuses"].items() if status != "200"
        ),
        "answers to the attack are a 5xx": sum(
            count for each in rounds for label, count in each["attack"]["load"].items() if is_fault(label)
        ),
    }
    fails += [f"{count} {words}" for words, count in counts.items() if count]
    fails += ["a process was replaced"] if not all(each["same_processes"] for each in rounds) else []
    times = {side: [each[side]["p95_ms"] for each in rounds] for side in SIDES}
    return {
        "form": title,
        "fails": fails,
        **{f"{side}_p95_ms": [round(of(each), 2) for of in (min, statistics.median, max)] for side, each in times.items()},
        "attack_max_ms": max(each["attack"]["max_ms"] for each in rounds),
        "attack_ttft_p95_ms": statistics.median(each["attack"]["ttft_p95_ms"] for each in rounds),
        "to_polite": compared["tokens", "polite"][0],
        "to_alone": compared["tokens", "alone"][0],
        "answers_to_polite": compared["answers", "polite"][0],
        "answers_to_alone": compared["answers", "alone"][0],
        "idle_after_s": max(each["attack"]["idle_after_s"] for each in rounds),
        "rounds": len(rounds),
    }


def memory_fails(kind: str, memory: Mapping[str, float], goals: Goals) -> list[str]:
    """Return a failure if memory did not come back after the attacks of a kind."""
    ratio = memory["after_mib"] / memory["before_mib"]
    words = f"{kind}: {memory['before_mib']:.0f} MiB before and {memory['after_mib']:.0f} after"
    return [f"{words}, {ratio:.2f} times, at most {goals.memory:g}"] if ratio > goals.memory else []


_WARM_UP_S = 0.4  # of a load, before the calm client's times count
_FIRST_S = 3.0  # of the calm client, before the first turn
_BUSY = 0.3  # cores above which a server counts as busy
_LOOK_S, _SETTLE_S, _MEMORY_S = 0.2, 8.0, 6.0
_SAMPLE_S = 0.25


class Turns:
    """A server, its attacker and its calm client."""

    def __init__(self, server: Served, attacker: Attacker, calm_key: str, seconds: float, progress: Progress) -> None:
        """Prepare turns whose windows last ``seconds``."""
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
