"""The shadow: a baseline also answers a share of the served requests, outside the clients' path, for a comparison.

Both sides get the same prompt, parameters and seed; the baseline's request has no tenant, no drafts and no reused KV. A baseline
that splits the model sums in another order than the engine, so the texts may differ at near-ties.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.cluster.observe import replay_check
from outrider.cluster.observe.audit import REPLAY_ERRORS
from outrider.cluster.observe.replay_check import Figure, Run, difference, figures, is_drafted, recorder, verdict
from outrider.cluster.serving.generation import EnginePort, GenerationJob
from outrider.decoding.request import StepOutput

logger = logging.getLogger(__name__)

NEAR_TIE = 0.25  # difference of log-probabilities: two bfloat16 steps between 16 and 32, the range of likely tokens' logits
KEPT = 1000  # latest pairs from which the figures are computed
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
        whole = not job.emitted and job.prompt_logprobs is None
        if not (is_drafted(job) and whole and job.tenant is not None) or self._draw() >= self._share:
            return None
        return recorder(job, lambda run: self._begin(job, run) if run.token_ids else None)

    def _begin(self, job: GenerationJob, run: Run) -> None:
        if self._running is not None and not self._running.done():
            self._results[ShadowStatus.DROPPED] += 1
            return
        self._running = asyncio.create_task(self._answer(job, run))

    async def settled(self) -> None:
        """Wait for the request that the baseline is answering."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def _answer(self, job: GenerationJob, run: Run) -> None:
        try:
            result = await self._compared(job, run) if await self._has_room() else ShadowStatus.DROPPED
        except REPLAY_ERRORS as error:
            logger.warning("the baseline did not answer a shadowed request: %s", error)
            result = ShadowStatus.FAILED
        except Exception:  # no client waits for it
            logger.exception("comparing two answers failed")
            result = ShadowStatus.FAILED
        self._results[result] += 1

    async def _has_room(self) -> bool:
        """Return whether the baseline can take a request without delaying a client's."""
        room = await replay_check.has_room(self._baseline)
        if room and self._shares_devices:
            room = not any(one.counts.running or one.counts.waiting for one in await self._engine.describe())
        return room

    async def _compared(self, job: GenerationJob, run: Run) -> ShadowStatus:
        plain = replay_check.background_job(job, "shadow", job.priority)
        other = await replay_check.replay(self._baseline, plain)
        self._texts[await self._match(plain, run, other)] += 1
        mine, theirs = (_figures(one, devices) for one, devices in zip((run, other), self._devices, strict=True))
        self._pairs.append((mine, theirs))
        return ShadowStatus.COMPARED

    async def _match(self, plain: GenerationJob, run: Run, other: Run) -> OutputMatch:
        """Compare two outputs; at the first difference, use the baseline's log-probabilities."""
        found = difference(run.token_ids, other.token_ids)
        if found is None:
            return OutputMatch.EQUAL if run.reason is other.reason else OutputMatch.OTHER
        if not plain.params.greedy:
            return OutputMatch.SAMPLED
        gap = (await replay_check.with_logprobs(self._baseline, plain, found, other)).gap
        return OutputMatch.OTHER if gap is None or abs(gap) > NEAR_TIE else OutputMatch.NEAR_TIE

    def summary(self) -> ShadowSummary:
        """Return the summary so far. Takes some milliseconds; may run in any thread."""
        pairs, texts = list(self._pairs), _counts(self._texts)
        found = figures([*HIGHER_IS_BETTER], pairs)
        return ShadowSummary(_counts(self._results), texts, found, verdict(self._kind, len(pairs), found, texts))


def _figures(run: Run, devices: int) -> dict[str, float]:
    count, found = len(run.token_ids), {"ttft_s": run.ttft_s}
    if run.tokens_per_s is not None:
        found |= {"tokens_per_s": run.tokens_per_s, "tpot_s": 1 / run.tokens_per_s}
    if run.latency_s > 0:
        found["tokens_per_device_s"] = count / run.latency_s / devices
    if run.energy_j is not None:
        found["joules_per_token"] = run.energy_j / count
    return found


def _counts(by: Mapping[Any, int]) -> dict[str, int]:
    return {name.value: count for name, count in by.items()}
