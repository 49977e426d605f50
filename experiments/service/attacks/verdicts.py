"""Verdicts on the forms of attack: the calm client's times, relative to those alone and beside polite clients."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.experiments.service.attacks.calm import TOKENS
from outrider.experiments.service.attacks.shots import is_fault

PERIOD_S = 0.04  # minimum time between two events of a stream while four or more requests emit
LEAST_MS = 2.0  # a step: faster events come in a burst
NOTHING_MS = 30_000.0  # the calm client's timeout
SIDES = ("alone", "polite", "attack")
_RESAMPLES = 2000
_COVERED = 0.9  # of the resamples, within an interval


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
    """Return a form's figures over its rounds, and its failures.

    Args:
        title: of the form.
        emits: of the form; if true, the calm client's time alone counts as a period of events at least.
        rounds: each with a window of every side.
        goals: upper bounds.
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
