"""The shadow: a baseline also answers a share of the served requests, outside the clients' path, for a comparison.

Both sides get the same prompt, parameters and seed; the baseline's request has no tenant, no drafts and no reused KV. A baseline
that splits the model sums in another order than the engine, so the texts may differ at near-ties.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.cluster.http.errors import ApiError
from outrider.cluster.observe.audit import ReplayError, logprob_of
from outrider.cluster.observe.difference import first_difference
from outrider.cluster.observe.timed_run import TimedRun
from outrider.cluster.serving.generation import EnginePort, GenerationJob
from outrider.decoding.request import PLAIN, FinishReason, StepOutput
from outrider.engine.errors import QueueFullError, RequestError

logger = logging.getLogger(__name__)

NEAR_TIE = 0.25  # difference of log-probabilities: two bfloat16 steps between 16 and 32, the range of likely tokens' logits
KEPT = 1000  # latest pairs from which the figures are computed
_RESAMPLES = 1000
_BOUNDS = (5, 95)  # percentiles of the resampled medians
_ENDED = (FinishReason.STOP, FinishReason.LENGTH)
HIGHER_IS_BETTER = {  # figure: whether higher is better
    "tokens_per_s": True,  # after the first step
    "ttft_s": False,  # time to first token, including the queue
    "tpot_s": False,  # time per output token after the first step
    "tokens_per_device_s": True,  # whole request: tokens / (seconds * devices)
    "joules_per_token": False,  # only if the hardware counts energy
}


class ShadowStatus(enum.StrEnum):
    """Result of answering a request twice."""

    COMPARED = "compared"
    DROPPED = "dropped"  # the baseline had no room
    FAILED = "failed"  # the baseline gave no answer


class OutputMatch(enum.StrEnum):
    """Relation of two answers to one request."""

    EQUAL = "equal"
    NEAR_TIE = "near_tie"  # greedy: the baseline's log-probabilities of the two tokens differ by at most ``NEAR_TIE``
    SAMPLED = "sampled"  # sampled: the texts differ; whether at a near-tie of the draw is unknown
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians over all pairs with this figure on both sides, and of the pairs' ratios."""

    pairs: int
    engine: float
    baseline: float
    ratio: float  # engine / baseline
    low: float  # bounds of 90 % of the resamples
    high: float


@dataclass(frozen=True, slots=True)
class ShadowSummary:
    """Summary of engine against baseline."""

    results: Mapping[str, int]  # since the start
    texts: Mapping[str, int]  # since the start
    figures: Mapping[str, Figure]  # over the latest pairs; figures without pairs are left out
    sentence: str


class Shadow:
    """Comparison of the engine with a baseline that answers some requests, one at a time, while it has room."""

    def __init__(
        self,
        engine: EnginePort,
        baseline: EnginePort,
        kind: str,
        share: float,
        devices: tuple[int, int],
        shares_devices: bool,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Initialize the comparison.

        Args:
            kind: name of the baseline in messages.
            share: share of the requests, 0 to 1.
            devices: number of devices per request, of the engine and of the baseline.
            shares_devices: both compute on the same devices, so the engine must be idle, too.
            draw: returns a random number in [0, 1) for each request.
        """
        self._engine, self._baseline, self._kind, self._share, self._devices = engine, baseline, kind, share, devices
        self._shares_devices, self._draw = shares_devices, draw
        self._running: asyncio.Task[None] | None = None
        self._pairs: deque[tuple[dict[str, float], dict[str, float]]] = deque(maxlen=KEPT)
        self._results, self._texts = dict.fromkeys(ShadowStatus, 0), dict.fromkeys(OutputMatch, 0)

    def on_output(self, job: GenerationJob) -> Callable[[StepOutput], None] | None:
        """Return a listener for a request that the baseline shall also answer; None for others and those without a tenant."""
        drafted = job.max_draft_tokens != 0 and job.strategy != PLAIN
        whole = not job.emitted and job.prompt_logprobs is None
        if not (drafted and whole and job.tenant is not None) or self._draw() >= self._share:
            return None
        run, began_s = TimedRun(), time.perf_counter()

        def hear(output: StepOutput) -> None:
            run.on_output(output, time.perf_counter() - began_s)
            if run.reason in _ENDED and run.token_ids:
                self._begin(job, run)

        return hear

    def _begin(self, job: GenerationJob, run: TimedRun) -> None:
        if self._running is not None and not self._running.done():
            self._results[ShadowStatus.DROPPED] += 1
            return
        self._running = asyncio.create_task(self._answer(job, run))

    async def settled(self) -> None:
        """Wait for the request that the baseline is answering."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def _answer(self, job: GenerationJob, run: TimedRun) -> None:
        try:
            result = await self._compared(job, run) if await self._has_room() else ShadowStatus.DROPPED
        except (ApiError, QueueFullError, RequestError, ReplayError) as error:
            logger.warning("the baseline did not answer a shadowed request: %s", error)
            result = ShadowStatus.FAILED
        except Exception:  # no client waits for it
            logger.exception("comparing two answers failed")
            result = ShadowStatus.FAILED
        self._results[result] += 1

    async def _has_room(self) -> bool:
        """Return whether the baseline can take a request without delaying a client's."""
        replicas = await self._baseline.describe()
        room = any(one.counts.free_slots for one in replicas) and not any(one.counts.waiting for one in replicas)
        if room and self._shares_devices:
            room = not any(one.counts.running or one.counts.waiting for one in await self._engine.describe())
        return room

    async def _compared(self, job: GenerationJob, run: TimedRun) -> ShadowStatus:
        plain = dataclasses.replace(
            job, request_id=f"shadow-{secrets.token_hex(12)}/0", tenant=None, public=False, references=(), strategy=PLAIN,
            max_draft_tokens=0, siblings=False, report=False, embedding=None, session=None,
        )  # fmt: skip
        other, began_s = TimedRun(), time.perf_counter()
        async with contextlib.aclosing(self._baseline.generate(plain)[0]) as outputs:
            async for output in outputs:
                other.on_output(output, time.perf_counter() - began_s)
        if other.reason not in _ENDED:
            raise ReplayError(other.error or "it ended the request")
        self._texts[await self._texts_of(plain, run, other)] += 1
        mine, theirs = (_figures(one, devices) for one, devices in zip((run, other), self._devices, strict=True))
        self._pairs.append((mine, theirs))
        return ShadowStatus.COMPARED

    async def _texts_of(self, plain: GenerationJob, run: TimedRun, other: TimedRun) -> OutputMatch:
        """Compare two outputs; at the first difference, use the baseline's log-probabilities."""
        position = first_difference(run.token_ids, other.token_ids)
        if position is None:
            return OutputMatch.EQUAL if run.reason is other.reason else OutputMatch.OTHER
        if not plain.params.greedy:
            return OutputMatch.SAMPLED
        tokens = [each.token_ids[position] for each in (run, other) if position < len(each.token_ids)]
        if len(tokens) < 2:
            return OutputMatch.OTHER
        emitted = tuple(run.token_ids[:position])
        mine, theirs = [await logprob_of(self._baseline, plain, emitted, token) for token in tokens]
        near = mine is not None and theirs is not None and abs(mine - theirs) <= NEAR_TIE
        return OutputMatch.NEAR_TIE if near else OutputMatch.OTHER

    def summary(self) -> ShadowSummary:
        """Return the summary so far. Takes some milliseconds; may run in any thread."""
        pairs, generator = list(self._pairs), np.random.default_rng(0)
        figures = {name: figure for name in HIGHER_IS_BETTER if (figure := _figure(name, pairs, generator)) is not None}
        return ShadowSummary(_counts(self._results), _counts(self._texts), figures, self._sentence(figures))

    def _sentence(self, figures: Mapping[str, Figure]) -> str:
        speed, first = figures.get("tokens_per_s"), figures.get("ttft_s")
        if speed is None or first is None or speed.pairs < 2:
            return f"{len(self._pairs)} requests were answered by both: too few to compare."
        if speed.low > 1:
            ahead = f"The engine is ahead of the {self._kind} baseline, with {_times(speed)} its tokens per second"
        elif speed.high < 1:
            turned = Figure(speed.pairs, speed.baseline, speed.engine, 1 / speed.ratio, 1 / speed.high, 1 / speed.low)
            ahead = f"The {self._kind} baseline is ahead of the engine, with {_times(turned)} its tokens per second"
        else:
            ahead = f"Neither is ahead: the engine has {_times(speed)} the {self._kind} baseline's tokens per second"
        texts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in _counts(self._texts).items() if count)
        return f"{ahead} over {speed.pairs} requests, and its first token comes after {_times(first)} as long; texts: {texts}."


def _figures(run: TimedRun, devices: int) -> dict[str, float]:
    count, found = len(run.token_ids), {"ttft_s": run.ttft_s}
    if run.tokens_per_s is not None:
        found |= {"tokens_per_s": run.tokens_per_s, "tpot_s": 1 / run.tokens_per_s}
    if run.latency_s > 0:
        found["tokens_per_device_s"] = count / run.latency_s / devices
    if run.energy_j is not None:
        found["joules_per_token"] = run.energy_j / count
    return found


def _figure(
    name: str, pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]], generator: np.random.Generator
) -> Figure | None:
    both = np.array([(mine[name], theirs[name]) for mine, theirs in pairs if mine.get(name) and theirs.get(name)])
    if not len(both):
        return None
    ratios = both[:, 0] / both[:, 1]
    medians = np.median(ratios[generator.integers(0, len(ratios), (_RESAMPLES, len(ratios)))], axis=1)
    low, high = np.percentile(medians, _BOUNDS)
    engine, baseline = np.median(both, axis=0)
    return Figure(len(both), float(engine), float(baseline), float(np.median(ratios)), float(low), float(high))


def _times(figure: Figure) -> str:
    return f"{figure.ratio:.2f} times ({figure.low:.2f}-{figure.high:.2f})"


def _counts(by: Mapping[Any, int]) -> dict[str, int]:
    return {name.value: count for name, count in by.items()}
