"""What a form of attack did to the calm client, by the goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.service.attacks.calm import TOKENS

PERIOD_S = 0.04  # between two events of a stream at least, while four or more requests emit
LEAST_MS = 2.0  # a step: events that come faster come in a burst
NOTHING_MS = 30_000.0  # as long as the calm client waits
SIDES = ("alone", "polite", "attack")
_RESAMPLES = 2000
_COVERED = 0.9  # of the resamples, within an interval


@dataclass(frozen=True, slots=True)
class Goals:
    """Bounds of what an attack may do. A token that is late once in an answer does not count in the p95 of inter-token times, so
    that those of whole answers are bounded as well."""

    to_polite: float = 1.5  # p95 beside an attack, relative to that beside polite clients
    to_alone: float = 3.0  # likewise, to that without other clients
    memory: float = 1.1  # of all processes after the attacks of a kind, relative to before
    rows: float = 0.5  # steps with a row of the calm request, relative to those beside polite requests


def p95_ms(times_s: Sequence[float], share: float = 95) -> float:
    """Return a percentile in milliseconds; ``NOTHING_MS`` where nothing came."""
    return round(1e3 * float(np.percentile(times_s, share)), 3) if times_s else NOTHING_MS


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the interval of the medians of resamples."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values, float), (_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), ((1 - _COVERED) / 2, (1 + _COVERED) / 2), method="nearest")
    return round(float(low), 3), round(float(high), 3)


def ratios(rounds: Sequence[Mapping[str, Any]], to: str, least_ms: float = 0.0, figure: str = "p95_ms") -> dict[str, Any]:
    """Return a figure beside the attack relative to that of another side: median over the rounds, range and interval."""
    found = [each["attack"][figure] / max(each[to][figure], least_ms, LEAST_MS) for each in rounds]
    return {
        "median": round(statistics.median(found), 3),
        "range": [round(min(found), 3), round(max(found), 3)],
        "interval": list(interval(found)),
    }


def verdict(title: str, emits: bool, rounds: Sequence[Mapping[str, Any]], goals: Goals) -> dict[str, Any]:
    """Return a form's figures over its rounds, and what of them fails.

    Args:
        title: of the form.
        emits: see ``Form``; where it does, the calm client's time alone counts as a period of events at least.
        rounds: each with a window of every side.
        goals: see ``Goals``.
    """
    least_ms = 1e3 * PERIOD_S if emits else 0.0
    to_polite, to_alone = ratios(rounds, "polite"), ratios(rounds, "alone", least_ms)
    answers = {
        side: ratios(rounds, side, TOKENS * least, "answer_p95_ms") for side, least in (("polite", 0.0), ("alone", least_ms))
    }
    fails = [
        f"{what} {told['median']:.2f} times {side}, at most {goal:g}"
        for what, side, told, goal in (
            ("tokens", "polite", to_polite, goals.to_polite),
            ("tokens", "alone", to_alone, goals.to_alone),
            ("answers", "polite", answers["polite"], goals.to_polite),
            ("answers", "alone", answers["alone"], goals.to_alone),
        )
        if told["median"] > goal
    ]
    for name, words in (("lost", "calm streams lost"), ("others", "calm texts are other ones")):
        count = sum(each[side][name] for each in rounds for side in SIDES)
        fails += [f"{count} {words}"] if count else []
    refused = sum(
        count for each in rounds for side in SIDES for status, count in each[side]["statuses"].items() if status != "200"
    )
    faults = sum(_server_errors(each["attack"]["load"]) for each in rounds)
    fails += [f"{refused} calm requests not answered with 200"] if refused else []
    fails += [f"{faults} answers to the attack are a 5xx"] if faults else []
    fails += ["a process was replaced"] if not all(each["same_processes"] for each in rounds) else []
    return {
        "form": title,
        "fails": fails,
        **{f"{side}_p95_ms": [round(min(each), 2), round(statistics.median(each), 2), round(max(each), 2)]
           for side in SIDES if (each := [turn[side]["p95_ms"] for turn in rounds])},
        "attack_max_ms": max(turn["attack"]["max_ms"] for turn in rounds),
        "attack_ttft_p95_ms": statistics.median(turn["attack"]["ttft_p95_ms"] for turn in rounds),
        "to_polite": to_polite,
        "to_alone": to_alone,
        "answers_to_polite": answers["polite"],
        "answers_to_alone": answers["alone"],
        "idle_after_s": max(turn["attack"]["idle_after_s"] for turn in rounds),
        "rounds": len(rounds),
    }  # fmt: skip


def _server_errors(load: Mapping[str, int]) -> int:
    """Return how many answers were faults of the server; a 503 and a 504 say that it is busy, or the client's time is over."""
    return sum(count for label, count in load.items() if is_fault(label))


def is_fault(label: str) -> bool:
    """Tell whether a label of ``Reply`` is a fault of the server."""
    return label.endswith("+error") or (label.startswith("5") and label not in ("503", "504"))


def memory_fails(kind: str, memory: Mapping[str, float], goals: Goals) -> list[str]:
    """Return that memory did not come back after the attacks of a kind, where it did not."""
    ratio = memory["after_mib"] / memory["before_mib"]
    words = f"{kind}: {memory['before_mib']:.0f} MiB before and {memory['after_mib']:.0f} after"
    return [f"{words}, {ratio:.2f} times, at most {goals.memory:g}"] if ratio > goals.memory else []
