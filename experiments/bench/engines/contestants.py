"""What generates from the same prompts, side by side: the port, and our engine behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from decoding.replay import KnownText
from decoding.request import Request, SamplingParams
from engine.engine import Engine
from experiments.bench.engines.guided import GuidedExecutor
from experiments.bench.workloads import run_engine


@dataclass(frozen=True, slots=True)
class Prompt:
    """A record that fits."""

    id: str
    ids: list[int]
    references: list[list[int]]
    known: list[int] | None = None  # the output to follow, in guided runs
    answer: str | None = None  # the file's output, with which those of the model are compared

    @classmethod
    def of(cls, text: KnownText) -> Prompt:
        """A text whose output is followed."""
        return cls(text.id, text.prompt_ids.tolist(), [ids.tolist() for ids in text.references], text.output_ids.tolist())

    def text(self) -> KnownText:
        """The same for a replay without the model."""
        references = tuple(np.asarray(ids, np.int32) for ids in self.references)
        return KnownText(self.id, np.asarray(self.ids, np.int32), references, np.asarray(self.known or (), np.int32))


@dataclass(frozen=True, slots=True)
class Run:
    """What a contestant made of some prompts. Times are seconds; of several prompts, each counts the steps it shares."""

    outputs: list[list[int]]  # of each prompt, the end token included
    steps: int  # target forwards that emitted tokens, counted for each prompt that they served
    prefill_s: float  # to the first token
    forward_s: float  # target forwards after the first token
    propose_s: float | None = None  # drafting after the first token; None where it cannot be told apart
    drafted: int | None = None  # as propose_s
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    wall_s: float | None = None  # of all of it, where whoever waited for it would count the way there as well


class Contestant(Protocol):
    """A way to generate."""

    name: str

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """Generates from a group of prompts."""
        ...

    def renew(self) -> None:
        """Forgets what earlier prompts taught."""
        ...


def make_request(prompt: Prompt, max_tokens: int, guide: GuidedExecutor | None = None) -> Request:
    """A greedy request for a prompt.

    Args:
        prompt: what to continue.
        max_tokens: of the output; of a known one, its length counts.
        guide: the executor that is to follow the known output, where there is one.
    """
    if prompt.known is not None:
        assert guide is not None, prompt.id
        guide.known[prompt.id] = prompt.known
        max_tokens = len(prompt.known)
    return Request(prompt.id, prompt.ids, SamplingParams(max_tokens), prompt.references, tenant="local")


class EngineContestant:
    """Our engine with one strategy."""

    def __init__(self, make_engine: Callable[[], Engine], max_tokens: int, guide: GuidedExecutor | None = None) -> None:
        """
        Args:
            make_engine: makes an engine that has seen no request.
            max_tokens: of each output.
            guide: the executor of these engines, in guided runs.
        """
        self._make_engine, self._max_tokens, self._guide = make_engine, max_tokens, guide
        self.engine = make_engine()
        self.name = self.engine.info.strategy

    def renew(self) -> None:
        """A new engine with a new drafter."""
        self.engine = self._make_engine()

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """See ``Contestant``."""
        return run_requests(self.engine, [make_request(prompt, self._max_tokens, self._guide) for prompt in prompts])


def run_requests(engine: Engine, requests: Sequence[Request]) -> Run:
    """Runs new requests, all at once, to their end on an engine without other work."""
    first_s: list[float] = []  # seconds in forwards when the first token of each came
    run_engine(engine, requests, on_first=lambda request: first_s.append(request.stats.forward_s))
    stats = [request.stats for request in requests]
    by_source: Counter[str] = Counter()
    for entry in stats:
        by_source.update(entry.accepted_by_source)
    return Run(
        [request.output_ids.tolist() for request in requests],
        sum(entry.steps for entry in stats),
        sum(entry.prefill_s for entry in stats),
        sum(entry.forward_s for entry in stats) - sum(first_s),
        sum(entry.propose_s for entry in stats),
        sum(entry.drafted for entry in stats),
        by_source,
    )
