"""How long the steps of an engine really take, and what of that a latency curve does not tell."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decoding.budget.latency import LatencyCurve
from engine.engine import Engine
from experiments.bench.engines.contestants import Prompt, make_request
from experiments.bench.engines.guided import GuidedExecutor
from experiments.simulation.steps import Host, RankLoad, StepTimes

_BARE_ROWS = 64  # of a prefill whose time tells anything


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step in which all requests decode, or in which one prefills."""

    load: RankLoad
    seconds: float
    propose_s: float


def timed_steps(engine: Engine, prompts: Sequence[Prompt], guide: GuidedExecutor | None) -> list[TimedStep]:
    """The steps of some requests that begin at once, but for those in which some decode and some prefill."""
    requests = {prompt.id: make_request(prompt, 1, guide) for prompt in prompts}
    for request in requests.values():
        engine.add(request)
    steps = []
    while engine.has_work:
        live = [request for request in requests.values() if request.remaining]
        before = [(request.num_computed, request.stats.drafted, request.stats.propose_s) for request in live]
        decoding = all(request.num_output for request in live)
        began = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - began
        propose_s = max(request.stats.propose_s - was[2] for request, was in zip(live, before, strict=True))
        context = sum(was[0] for was in before)
        if decoding and len(outputs) == len(live):
            drafted = sum(request.stats.drafted - was[1] for request, was in zip(live, before, strict=True))
            steps.append(TimedStep(RankLoad(len(live), len(live) + drafted, context), seconds, propose_s))
        elif len(requests) == 1:
            found = context or live[0].stats.cached_tokens
            rows = live[0].num_computed - found
            steps.append(TimedStep(RankLoad(1, rows, found, rows - len(outputs)), seconds, propose_s))
    return steps


def fitted(curve: LatencyCurve, steps: Sequence[TimedStep]) -> StepTimes:
    """What steps take beside their forward, and what a row without logits takes of one with them, each in the middle.

    Example: steps of one request take 0.5 ms longer than the curve and their drafting, steps of four 1.4 ms: 0.35 ms a request,
    and 0.15 ms a step. A prefill of 301 rows that takes as long as 241 drafted rows would: four fifths.
    """
    bare = StepTimes("lookahead", 1, curve, Host(0.0, 0.0, 0.0))
    decodes = [step for step in steps if not step.load.bare]
    left = np.array([step.seconds - step.propose_s - bare.forward_s(step.load) for step in decodes])
    together = np.array([step.load.sequences for step in decodes])
    alone = max(float(np.median(left[together == 1])), 0.0)
    many = [max(float(np.median(left[together == count])), 0.0) / count for count in {*together.tolist()} if count > 1]
    request_s = min(statistics.median(many), alone) if many else alone
    propose_s = sum(step.propose_s for step in decodes) / int(together.sum())
    shares, grid = [], np.linspace(0.0, 1.5, 61)
    for step in steps:
        if step.load.bare >= _BARE_ROWS:
            guesses = [dataclasses.replace(bare, bare_share=share).forward_s(step.load) for share in grid.tolist()]
            shares.append(float(np.interp(step.seconds - alone, guesses, grid)))
    share = statistics.median(shares) if shares else 1.0
    return dataclasses.replace(bare, host=Host(alone - request_s, request_s, propose_s), bare_share=share)
