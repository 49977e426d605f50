"""A load that rises and falls at once: does speed come back as it was?"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.contestants import Prompt
from experiments.load_servers import EngineServer
from experiments.load_traffic import Journey, advance

WINDOW_S = 0.5
STRETCH_S = 2.0  # what is compared with the first phase
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Phase:
    """So many clients at once, from ``start_s`` to ``end_s`` of the run; when each lot of tokens came, and how much it was."""

    concurrency: int
    start_s: float
    end_s: float
    moments: np.ndarray  # [n, 3] float64: seconds since the phase began, tokens, rows drafted for them


def drive_step(server: EngineServer, prompts: Sequence[Prompt], levels: Sequence[int], phase_s: float) -> list[Phase]:
    """Runs the phases of a load step. When the load falls, all clients hang up, and as many as are left ask anew.

    A phase at the first one's level gets the first one's prompts, from the beginning, so that the two can be compared token by
    token. They come from another tenant then, as do those between: what the first phase left, texts and KV, helps no later one.

    Args:
        server: not begun.
        prompts: half of them for the phases at the first level.
        levels: concurrency of each phase.
        phase_s: seconds of each.
    """
    assert len(prompts) > 1, "a load step needs two prompts"
    half = (len(prompts) + 1) // 2
    others = _endless(prompts[half:], "others")
    server.begin()
    journeys: dict[str, Journey] = {}
    phases, began = [], time.perf_counter()
    try:
        for number, level in enumerate(levels):
            source = _endless(prompts[:half], str(number)) if level == levels[0] else others
            tenant = "before" if number == 0 else "after"
            if number and level < levels[number - 1]:
                for journey in journeys.values():
                    server.cancel(journey.key)
                journeys = {}
            phases.append(_run_phase(server, source, level, tenant, journeys, time.perf_counter() - began, phase_s, began))
    finally:
        server.end()
    return phases


def _endless(prompts: Sequence[Prompt], mark: str) -> Iterator[Prompt]:
    """The prompts again and again, each time with new ids."""
    for turn in itertools.count():
        for prompt in prompts:
            yield replace(prompt, id=f"{prompt.id}#{mark}.{turn}")


def _run_phase(
    server: EngineServer, source: Iterator[Prompt], level: int, tenant: str, live: dict[str, Journey], start_s: float,
    phase_s: float, began: float,
) -> Phase:  # fmt: skip
    """One phase; ``live`` holds the requests under way, before and after."""
    moments: list[tuple[float, int, int]] = []
    while (now := time.perf_counter() - began) < start_s + phase_s:
        while len(live) < level:
            prompt = next(source)
            live[prompt.id] = Journey(prompt.id, now, now)
            server.submit(prompt, tenant)
        for progress in server.poll(WINDOW_S):
            moments.append((progress.at_s - began - start_s, len(progress.tokens), progress.drafted))
            if advance(live[progress.key], progress, began):
                del live[progress.key]
    return Phase(level, start_s, time.perf_counter() - began, np.array(moments, np.float64).reshape(-1, 3))


def windows(phase: Phase) -> list[dict[str, float | None]]:
    """Tokens by request and step, rows drafted for them, and seconds by output token of a client, for each ``WINDOW_S``."""
    rows = []
    places = (phase.moments[:, 0] // WINDOW_S).astype(int)
    for place in range(int((phase.end_s - phase.start_s) / WINDOW_S)):
        inside = phase.moments[places == place]
        tokens, turns = inside[:, 1].sum(), len(inside)
        rows.append(
            {
                "at_s": round(phase.start_s + (place + 0.5) * WINDOW_S, 3),
                "tokens_per_step": round(tokens / turns, 3) if turns else None,
                "drafted_per_request_step": round(inside[:, 2].sum() / turns, 2) if turns else None,
                "tpot_ms": round(1e3 * WINDOW_S * phase.concurrency / tokens, 2) if tokens else None,
            }
        )
    return rows


def back_after_s(first: Phase, last: Phase) -> dict[str, float | None]:
    """When a later phase was as fast as the first one on the same tokens: at first in the ``STRETCH_S`` from then on.

    Texts differ from place to place far more than 10 %, so a stretch is compared with the way that the first phase took through
    the very same tokens. It is back where it needs at most 10 % more time, and at most 1 / 0.9 of the steps.

    Example: from second 1.0 to 3.0 the last phase emitted its tokens 200 to 500 in 100 steps. The first phase went from its token
    200 to its token 500 in 1.9 seconds and 95 steps: 2.0 / 1.9 and 100 / 95 are below 1.1, so it was back after 1.0 s, if the
    stretches from 0.0 and 0.5 were slower.

    Returns:
        ``latency_s`` and ``acceptance_s``, seconds since the phase began, in halves, and ``both_s``: the first moment at which
        both hold; None where there was none. ``latency_ratio``, over all tokens that both phases came to: the first one's seconds
        over the last one's.
    """
    length = last.end_s - last.start_s
    found: dict[str, float | None] = {"latency_s": None, "acceptance_s": None, "both_s": None}
    for start_s in np.arange(0.0, length - STRETCH_S + 1e-9, WINDOW_S):
        own, theirs = _way(last, start_s, start_s + STRETCH_S), None
        if own is not None:
            theirs = _way_through(first, own[0], own[1])
        if own is None or theirs is None:
            continue
        seconds, steps = STRETCH_S / theirs[0], own[2] / theirs[1]
        holds = {"latency_s": seconds <= 1 + TOLERANCE, "acceptance_s": steps <= 1 / (1 - TOLERANCE)}
        holds["both_s"] = all(holds.values())
        for key, held in holds.items():
            if held and found[key] is None:
                found[key] = float(start_s)
    return found | {"latency_ratio": _whole_ratio(first, last)}


def _way(phase: Phase, start_s: float, end_s: float) -> tuple[float, float, int] | None:
    """Tokens of a phase before a stretch and at its end, and the steps in it; None where nothing came."""
    times = phase.moments[:, 0]
    before, behind = np.searchsorted(times, (start_s, end_s))
    if before == behind:
        return None
    tokens = np.cumsum(phase.moments[:, 1])
    return float(tokens[before - 1]) if before else 0.0, float(tokens[behind - 1]), int(behind - before)


def _way_through(phase: Phase, first_token: float, last_token: float) -> tuple[float, float] | None:
    """Seconds and steps that a phase took from one token to another; None where it did not come so far."""
    tokens = np.concatenate(([0.0], np.cumsum(phase.moments[:, 1])))
    if last_token > tokens[-1]:
        return None
    times = np.concatenate(([0.0], phase.moments[:, 0]))
    started_s, ended_s = np.interp((first_token, last_token), tokens, times)
    first_step, last_step = np.interp((first_token, last_token), tokens, np.arange(len(tokens), dtype=np.float64))
    return max(float(ended_s - started_s), 1e-9), max(float(last_step - first_step), 1e-9)


def _whole_ratio(first: Phase, last: Phase) -> float | None:
    common = min(first.moments[:, 1].sum(), last.moments[:, 1].sum())
    ways = [_way_through(phase, 0.0, common) for phase in (first, last)] if common else [None, None]
    return round(ways[0][0] / ways[1][0], 3) if ways[0] and ways[1] else None


def told(phases: Sequence[Phase]) -> dict[str, Any]:
    """What a record keeps of a load step: the phases, their windows, and when the last one at the first level was back."""
    again = [phase for phase in phases[1:] if phase.concurrency == phases[0].concurrency]
    return {
        "phases": [{"concurrency": p.concurrency, "start_s": round(p.start_s, 3), "end_s": round(p.end_s, 3)} for p in phases],
        "windows": [window for phase in phases for window in windows(phase)],
        "back_after": back_after_s(phases[0], again[-1]) if again else None,
    }


def back_after_text(found: Mapping[str, float | None]) -> str:
    """In words what ``back_after_s`` found."""
    both_s = found["both_s"]
    return "not back in its last phase" if both_s is None else f"back after {both_s:g} s"
