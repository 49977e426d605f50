"""Replay of a job without drafts, and comparison of two runs: the core of audits, of the shadow and of ``POST /v1/compare``.

A choice is a function of prompt, parameters and seed, all of which are in its ``GenerationJob``. The same job without drafts must
therefore emit the same tokens and end for the same reason, greedy or sampled, with a grammar, stop strings or penalties.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from outrider.decoding.arrays import Float64Array
from outrider.decoding.request import MAX_LOGIT_BIAS, PLAIN, FinishReason, SamplingParams, SpecStats, StepOutput

if TYPE_CHECKING:  # commands start without them
    from outrider.cluster.serving.generation import EnginePort, GenerationJob

Token = TypeVar("Token")


class ReplayError(RuntimeError):
    """A choice could not be computed again; the message gives the reason."""


@dataclass(slots=True)
class Run:
    """Outputs of one choice as they arrived, with their times."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    error: str | None = None  # reason why the request was ended
    steps: int = 0
    first: int = 0  # tokens at ttft_s: can be more than one if little of the prompt had to be computed
    ttft_s: float = 0.0
    latency_s: float = 0.0
    stats: SpecStats | None = None  # of the last output
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def energy_j(self) -> float | None:
        """Return the energy of the choice; None if the hardware does not count it."""
        return None if self.stats is None else self.stats.energy_j

    @property
    def is_whole(self) -> bool:
        """Return whether the choice ended by itself."""
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def tokens_per_s(self) -> float | None:
        """Return the speed after the first step; None if only one step emitted tokens."""
        took_s, rest = self.latency_s - self.ttft_s, len(self.token_ids) - self.first
        return rest / took_s if rest and took_s > 0 else None

    def on_output(self, output: StepOutput) -> None:
        """Add an output that has just arrived."""
        self.latency_s = time.perf_counter() - self.began_s
        if output.token_ids:
            if not self.steps:
                self.ttft_s, self.first = self.latency_s, len(output.token_ids)
            self.steps += 1
        self.token_ids += output.token_ids
        self.text += output.text
        self.reason, self.error = output.finish_reason, output.error
        if output.stats is not None:
            self.stats = output.stats


@dataclass(frozen=True, slots=True)
class Difference(Generic[Token]):
    """First difference between the output with drafts and without. A token is None if that output had ended."""

    position: int  # index in the output, from 0
    served: Token | None
    plain: Token | None
    served_logprob: float | None = None  # model's log-probability after the common prefix; None if unknown
    plain_logprob: float | None = None

    @property
    def gap(self) -> float | None:
        """Return the log-probability of plain decoding's token minus that of the served token."""
        # If the model is not served exactly, near-ties may differ by as much as the rounding of the logits. A larger gap, or any
        # gap with an exactly served model, is a bug.
        if self.served_logprob is None or self.plain_logprob is None:
            return None
        return self.plain_logprob - self.served_logprob

    def as_dict(self, named: Callable[[Token], dict[str, Any]]) -> dict[str, Any]:
        """Return the JSON of audits; ``named`` returns the fields of a token besides its log-probability."""
        sides = {"served": (self.served, self.served_logprob), "plain": (self.plain, self.plain_logprob)}
        tokens = {side: None if token is None else named(token) | {"logprob": value} for side, (token, value) in sides.items()}
        return {"position": self.position, **tokens, "gap": self.gap}


def difference(served: Sequence[Token], plain: Sequence[Token]) -> Difference[Token] | None:
    """Return the first difference of two outputs; None if they are equal.

    Example: ``a b c`` and ``a b d`` differ at position 2; ``a b`` and ``a b d`` do, too, and the served token there is None.
    """
    common = min(len(served), len(plain))
    position = next((place for place in range(common) if served[place] != plain[place]), common)
    if position == len(served) == len(plain):
        return None
    one, other = (side[position] if position < len(side) else None for side in (served, plain))
    return Difference(position, one, other)


def is_drafted(job: GenerationJob) -> bool:
    """Return whether a job may use drafts."""
    return job.max_draft_tokens != 0 and job.strategy != PLAIN


def recorder(job: GenerationJob, ended: Callable[[Run], None]) -> Callable[[StepOutput], None]:
    """Return a listener that records the choice of a job, and passes it to ``ended`` when it has ended by itself."""
    run = Run(list(job.emitted))

    def hear(output: StepOutput) -> None:
        run.on_output(output)
        if run.is_whole:
            ended(run)

    return hear


def plain_job(job: GenerationJob, request_id: str, **changes: Any) -> GenerationJob:
    """Return the job without drafts. It has no tenant, so it uses no draft sources and adds nothing to any history."""
    return dataclasses.replace(
        job, request_id=request_id, tenant=None, public=False, references=(), strategy=PLAIN, max_draft_tokens=0,
        siblings=False, report=False, embedding=None, **changes,
    )  # fmt: skip


def background_job(job: GenerationJob, purpose: str, priority: int) -> GenerationJob:
    """Return the job without drafts for a replay from its first token, which no client waits for."""
    name = f"{purpose}-{secrets.token_hex(12)}/0"
    return plain_job(
        job, name, priority=priority, account="", weight=1.0, session=None, emitted=(), prompt_logprobs=None, resumed=False
    )


async def replay(engine: EnginePort, plain: GenerationJob) -> Run:
    """Run a job to its end. Raises ``ReplayError``, and as ``EnginePort.generate``."""
    run = Run()
    async with contextlib.aclosing(engine.generate(plain)[0]) as outputs:
        async for output in outputs:
            run.on_output(output)
    if not run.is_whole:
        raise ReplayError(run.error or "the engine ended the request")
    return run


async def with_logprobs(engine: EnginePort, plain: GenerationJob, found: Difference[int], run: Run) -> Difference[int]:
    """Return a difference of ``run``, the output of ``plain``, with the model's log-probabilities of both tokens.

    They stay unknown if ``run`` had ended. Raises ``ReplayError``, and as ``EnginePort.generate``.
    """
    if found.plain is None:
        return found
    emitted = tuple(run.token_ids[: found.position])
    served = None if found.served is None else await _logprob_of(engine, plain, emitted, found.served)
    expected = await _logprob_of(engine, plain, emitted, found.plain)
    return dataclasses.replace(found, served_logprob=served, plain_logprob=expected)


async def _logprob_of(engine: EnginePort, plain: GenerationJob, emitted: tuple[int, ...], token: int) -> float | None:
    """Return the log-probability of ``token`` after the prompt and ``emitted``; None if not emitted."""
    # The bias forces the token; reported log-probabilities exclude it.
    params = SamplingParams(max_tokens=len(emitted) + 1, logprobs=0, logit_bias=((token, MAX_LOGIT_BIAS),))
    name = f"{plain.request_id.partition('/')[0]}-{secrets.token_hex(4)}/0"
    job = dataclasses.replace(plain, request_id=name, params=params, emitted=emitted)
    async with contextlib.aclosing(engine.generate(job)[0]) as outputs:
        async for output in outputs:
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise ReplayError(output.error or "the engine ended the request")
            for one in output.logprobs or ():
                return one.logprob if one.token_id == token else None
    return None


async def has_room(engine: EnginePort) -> bool:
    """Return whether a slot is free and no request waits."""
    counts = [replica.counts for replica in await engine.describe()]
    return any(one.free_slots for one in counts) and not any(one.waiting for one in counts)


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians over all pairs with this figure on both sides, and of the pairs' ratios."""

    pairs: int
    engine: float
    baseline: float
    ratio: float  # engine / baseline
    low: float  # bounds of 90 % of the resamples
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} times ({self.low:.2f}-{self.high:.2f})"


def median_interval(values: Float64Array, generator: np.random.Generator, resamples: int = 1000) -> tuple[float, float]:
    """Return the bounds of 90 % of the medians of resamples (percentile bootstrap)."""
    medians = np.median(values[generator.integers(0, len(values), (resamples, len(values)))], axis=1)
    low, high = np.percentile(medians, (5, 95))
    return float(low), float(high)


def figures(names: Sequence[str], pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, Figure]:
    """Return the figures with these names over pairs of engine and baseline; those without pairs are left out."""
    found, generator = dict[str, Figure](), np.random.default_rng(0)
    for name in names:
        both = np.array([(mine[name], theirs[name]) for mine, theirs in pairs if mine.get(name) and theirs.get(name)])
        if len(both):
            ratios, (engine, baseline) = both[:, 0] / both[:, 1], np.median(both, axis=0)
            low, high = median_interval(ratios, generator)
            found[name] = Figure(len(both), float(engine), float(baseline), float(np.median(ratios)), low, high)
    return found


def verdict(kind: str, pairs: int, found: Mapping[str, Figure], texts: Mapping[str, int]) -> str:
    """Return one sentence about an engine and its baseline of this kind: which is ahead, by how much, how the texts agree."""
    speed, first = found.get("tokens_per_s"), found.get("ttft_s")
    if speed is None or first is None or speed.pairs < 2:
        return f"{pairs} requests were answered by both: too few to compare."
    if speed.low > 1:
        ahead = f"The engine is ahead of the {kind} baseline, with {speed} its tokens per second"
    elif speed.high < 1:
        turned = Figure(speed.pairs, speed.baseline, speed.engine, 1 / speed.ratio, 1 / speed.high, 1 / speed.low)
        ahead = f"The {kind} baseline is ahead of the engine, with {turned} its tokens per second"
    else:
        ahead = f"Neither is ahead: the engine has {speed} the {kind} baseline's tokens per second"
    agreement = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in texts.items() if count)
    return f"{ahead} over {speed.pairs} requests, and its first token comes after {first} as long; texts: {agreement}."
