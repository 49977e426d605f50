"""Requests of all kinds whose answers are known, and a watch that holds what an engine says against them, output by output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from outrider.decoding.request import FinishReason, Request, RequestState, SamplingParams, StepOutput, TokenLogprob
from outrider.engine.engine import Engine
from outrider.engine.executor import LocalExecutor, VerifyResult
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.forward.runner import ModelRunner

LOGPROB_TOLERANCE = 1e-4  # float32: the rows of a step are multiplied together, and how many there are decides in which order
_WORDS = 40  # tokens that prompts are made of: few, so that texts repeat each other
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "logprobs": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logprobs": 3, "min_tokens": 3},
    {"stop": True},
    {"temperature": 0.8, "repetition_penalty": 1.2, "logit_bias": ((3, 4.0), (17, -100.0)), "stop": True},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.05, "ignore_eos": True},
    {"stop_token": True, "logprobs": 0},
)


@dataclass(frozen=True, eq=False)
class Case:
    """A request, and what plain decoding answers to it alone."""

    prompt: tuple[int, ...]
    params: SamplingParams
    references: tuple[tuple[int, ...], ...]
    ids: tuple[int, ...]
    text: str
    reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]

    def request(self, request_id: str, **options: Any) -> Request:
        """A new request; ``options`` as those of ``Request``."""
        return Request(request_id, self.prompt, self.params, self.references, **options)


def make_cases(alone: Engine, count: int, seed: int, longest_prompt: int, max_tokens: int) -> list[Case]:
    """Cases of all kinds in turns, from greedy to everything at once.

    Prompts have random lengths. Of nine, three begin with one of two system prompts, one is an earlier prompt again, and one goes
    on from an earlier answer, as in a chat.

    Args:
        alone: plain decoding, one request at a time.
        count: cases to make.
        seed: of the choices.
        longest_prompt: tokens of prompts, but for those that go on; at least 4.
        max_tokens: most tokens of an answer.
    """
    rng = np.random.default_rng(seed)
    systems = [rng.integers(1, _WORDS, longest_prompt // part).tolist() for part in (2, 3)]
    cases: list[Case] = []
    for number in range(count):
        length = int(rng.integers(1, longest_prompt + 1))
        prompt = rng.integers(1, _WORDS, length).tolist()
        earlier = cases[int(rng.integers(len(cases)))] if cases else None
        if number % 9 in (1, 4, 7):
            system = systems[number % 2]
            prompt = [*system, *prompt[: longest_prompt - len(system)]]
        elif earlier and number % 9 == 3:
            prompt = list(earlier.prompt)
        elif earlier and number % 9 == 6 and len(earlier.prompt) <= longest_prompt:
            prompt = [*earlier.prompt, *earlier.ids, *prompt[:5]]
        kind = dict(_KINDS[(number + number // 9) % len(_KINDS)])  # every shape meets every kind
        limit = int(rng.integers(1, max_tokens + 1))
        kind["min_tokens"] = min(kind.get("min_tokens", 0), limit)
        cases.append(_answered(alone, prompt, kind, limit, seed=seed + number))
    return cases


def _answered(alone: Engine, prompt: list[int], kind: dict[str, Any], limit: int, seed: int) -> Case:
    """The case of a prompt. Where it is to end early, it ends at what the whole answer has in its middle."""
    stops, stop_tokens = kind.pop("stop", False), kind.pop("stop_token", False)
    params = SamplingParams(limit, seed=seed, **kind)
    case = _play_alone(alone, prompt, params)
    if stops:
        middle = case.text[len(case.text) // 2 :][:2]
        params = replace(params, stop=(middle or "never there", "nor there"))
    if stop_tokens:
        params = replace(params, stop_token_ids=(case.ids[len(case.ids) // 2],))
    return _play_alone(alone, prompt, params) if stops or stop_tokens else case


def _play_alone(alone: Engine, prompt: list[int], params: SamplingParams) -> Case:
    assert not alone.has_work
    alone.add(Request("alone", prompt, params))
    outputs: list[StepOutput] = []
    while alone.has_work:
        outputs += alone.step()
    reason = outputs[-1].finish_reason
    assert reason is not None
    ids = tuple(token for output in outputs for token in output.token_ids)
    logprobs = tuple(entry for output in outputs for entry in output.logprobs or ())
    # Right in places: every seventh token is another.
    reference = tuple(token + (at % 7 == 6) for at, token in enumerate(ids))
    return Case(tuple(prompt), params, (reference,), ids, "".join(output.text for output in outputs), reason, logprobs)


class StepFailureError(RuntimeError):
    """A step failed, as for want of memory."""


class FailingExecutor(LocalExecutor):
    """Every so-many-th step fails, in turns before anything and after everything is computed."""

    def __init__(self, runner: ModelRunner, every: int) -> None:
        super().__init__(runner)
        self._every, self._steps = every, 0

    def execute(self, works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        """See ``Executor``; raises ``StepFailureError`` when it is time to."""
        self._steps += 1
        if self._steps % (2 * self._every) == 0:
            super().execute(works, top_k)
        if self._steps % self._every == 0:
            raise StepFailureError
        return super().execute(works, top_k)


@dataclass
class _Said:
    """What was said to a live request."""

    case: Case
    request: Request
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Watch:
    """An engine's live requests. Each output is compared when it comes: a wrong token fails in the step that says it."""

    def __init__(self, engine: Engine) -> None:
        """
        Args:
            engine: without requests; the watch is the only one to add to it and to step it.
        """
        assert not engine.has_work
        self.engine = engine
        self.live: dict[str, _Said] = {}
        self.ended: Counter[FinishReason] = Counter()
        self.accepted = self.cached = self.preemptions = self.steps = 0

    def add(self, case: Case, request_id: str, **options: Any) -> None:
        """Adds a case; ``options`` as those of ``Request``."""
        request = case.request(request_id, **options)
        self.engine.add(request)
        self.live[request_id] = _Said(case, request)

    def abort(self, request_id: str) -> None:
        """Ends a request, of which nothing may come after it."""
        self._take(request_id, FinishReason.ABORT)

    def _take(self, request_id: str, why: FinishReason) -> None:
        said = self.live.pop(request_id)
        assert self.engine.abort(request_id)
        assert not self.engine.abort(request_id)
        self._count(said, why)

    def step(self) -> None:
        """One step of the engine. When it fails, the requests that were in it end, as in a replica."""
        self.steps += 1
        try:
            outputs = self.engine.step()
        except StepFailureError:
            for request_id in [key for key, said in self.live.items() if said.request.state is RequestState.RUNNING]:
                self._take(request_id, FinishReason.ERROR)
            return
        for output in outputs:
            said = self.live[output.request_id]
            self._read(said, output)
            if output.finish_reason is not None:
                del self.live[output.request_id]
                self._end(said, output)

    def drain(self, most_steps: int = 100_000) -> None:
        """Steps until all requests have ended."""
        until = self.steps + most_steps
        while self.live:
            assert self.engine.has_work, list(self.live)
            assert self.steps < until, list(self.live)
            self.step()
        assert not self.engine.has_work

    def _read(self, said: _Said, output: StepOutput) -> None:
        case = said.case
        at, upto = len(said.ids), len(said.ids) + len(output.token_ids)
        assert output.error is None, output
        assert output.token_ids == case.ids[at:upto], (output.request_id, at, output.token_ids, case.ids)
        said.ids += output.token_ids
        said.text += output.text
        assert case.text.startswith(said.text), (output.request_id, said.text, case.text)
        assert (output.logprobs is None) == (case.params.logprobs is None), output.request_id
        said.logprobs += output.logprobs or ()

    def _end(self, said: _Said, output: StepOutput) -> None:
        case = said.case
        assert (tuple(said.ids), said.text, output.finish_reason) == (case.ids, case.text, case.reason), output.request_id
        assert said.request.output_ids.tolist() == said.ids
        assert _numbers(said.logprobs) == pytest.approx(_numbers(case.logprobs), abs=LOGPROB_TOLERANCE)
        assert [entry.token_id for entry in said.logprobs] == [entry.token_id for entry in case.logprobs]
        self._count(said, case.reason)

    def _count(self, said: _Said, reason: FinishReason) -> None:
        stats, tenant = said.request.stats, said.request.tenant
        assert tenant is not None or stats.cached_tokens == 0  # private: it takes over nothing
        self.ended[reason] += 1
        self.accepted += stats.accepted
        self.cached += stats.cached_tokens
        self.preemptions += stats.preemptions


@dataclass(frozen=True, slots=True)
class Rush:
    """Requests that arrive and leave while others are under way, in groups and one by one."""

    count: int  # requests
    most_live: int  # of them at once
    abort_share: float = 0.1  # of the requests, at a random moment of theirs
    check_share: float = 0.02  # steps before which the engine's integrity is checked

    def play(self, watch: Watch, cases: Sequence[Case], seed: int, options: Callable[[int], Mapping[str, Any]]) -> None:
        """Plays it, until no request is live.

        Args:
            watch: of the engine.
            cases: requests are random ones of them.
            seed: of the choices.
            options: of the request of a number, as those of ``Request``.
        """
        rng = np.random.default_rng(seed)
        ended_before = watch.ended.total()
        added, aborts_at = 0, set[int]()
        while added < self.count or watch.live:
            if added < self.count and len(watch.live) < self.most_live and rng.random() < 0.4:
                group = min(self.count - added, self.most_live - len(watch.live), int(rng.geometric(0.4)))
                for number in range(added, added + group):
                    watch.add(cases[int(rng.integers(len(cases)))], str(number), **options(number))
                    if rng.random() < self.abort_share:
                        aborts_at.add(watch.steps + int(rng.integers(16)))
                added += group
            if watch.steps in aborts_at and watch.live:
                watch.abort(str(rng.choice(list(watch.live))))
            if rng.random() < self.check_share:
                watch.engine.check_integrity()
            watch.step()
        watch.engine.check_integrity()
        assert watch.ended.total() - ended_before == self.count  # none was lost, none ended twice
        counts = watch.engine.counts()
        assert (counts.running, counts.waiting) == (0, 0) and not watch.engine.has_work


def _numbers(entries: Sequence[TokenLogprob]) -> list[float]:
    """Log-probabilities, those of the alternatives included."""
    return [value for entry in entries for value in (entry.logprob, *(value for _, value in entry.top))]
