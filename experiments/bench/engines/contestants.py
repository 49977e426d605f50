"""Contestants: the port of anything that generates from prompts, and this project's engines on one shared model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from outrider.configs.slices import EngineOptions, SpeculationOptions
from outrider.decoding.drafters.base import DraftModel
from outrider.decoding.drafters.registry import LOSSLESS, StrategyChoice, build_drafters
from outrider.decoding.replay import KnownText
from outrider.decoding.request import PLAIN, Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.executor import LocalExecutor
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model import LoadedModel
from outrider.engine.target import LocalTarget
from outrider.experiments.bench.engines.guided import GuidedExecutor, KnownExecutor
from outrider.experiments.bench.workloads import run_engine


class SharedModel:
    """Weights and KV slots of a model. Its engines must not have requests at the same time."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        budget: int,
        guided: bool = False,
        draft_model: DraftModel | None = None,
        runner: ModelRunner | None = None,
        kept: Path | None = None,
    ) -> None:
        """Prepare engines with ``options`` and at most ``budget`` draft rows per request and step.

        ``guided`` engines follow known outputs; ``draft_model`` serves all of them; ``runner`` replaces a new one; ``kept`` is
        the folder of the latency curve and tables, the user's cache by default.
        """
        self.loaded, self._options, self._budget, self._draft_model = loaded, options, budget, draft_model
        self.runner = ModelRunner(loaded.model, options.max_running, loaded.max_model_len + budget) if runner is None else runner
        self.guide = GuidedExecutor(self.runner, {}) if guided else None  # holds the known outputs of all engines
        self.target = LocalTarget(
            self.runner, loaded.info(PLAIN, True), loaded.tokenizer, kept
        )  # shared, so that it is measured once

    def engine(self, choice: StrategyChoice, paying: bool = False, counted: bool = False) -> Engine:
        """Return an engine without history, which emits token ids and no text.

        ``paying``: draft as a server does by default, at most 64 rows and only those that pay off on this device. ``counted``:
        of a guided model, count the steps along the known outputs and compute nothing.

        Raises:
            ValueError: an unknown strategy or option, or a value outside its range.
        """
        budget = min(self._budget, SpeculationOptions().usual_draft_tokens) if paying else self._budget
        drafter = build_drafters(choice.name, choice.options, (), budget) if paying else choice.build()
        drafter.draft_model = self._draft_model
        drafter.prepare(self.target)
        if self.guide is None:
            executor = LocalExecutor(self.runner)
        else:
            executor = (KnownExecutor if counted else GuidedExecutor)(self.runner, self.guide.known)
        info = self.loaded.info(f"{choice.label} (rows that pay)" if paying else choice.label, choice.name in LOSSLESS)
        return Engine(executor, drafter, self._options, budget, info, target=self.target)

    def contestant(self, choice: StrategyChoice, max_tokens: int, paying: bool = False) -> EngineContestant:
        """Return a strategy as a contestant with at most ``max_tokens`` of each output that is not known; see ``engine``."""
        return EngineContestant(lambda: self.engine(choice, paying), max_tokens, self.guide)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokenized record of a workload."""

    id: str
    ids: list[int]
    references: list[list[int]]
    known: list[int] | None = None  # the output to follow, in guided runs
    answer: str | None = None  # the output in the file, as text

    @classmethod
    def of(cls, text: KnownText) -> Prompt:
        """Return the prompt of a text whose output is followed."""
        return cls(text.id, text.prompt_ids.tolist(), [ids.tolist() for ids in text.references], text.output_ids.tolist())

    def text(self) -> KnownText:
        """Return the same for a replay without a model."""
        references = tuple(np.asarray(ids, np.int32) for ids in self.references)
        return KnownText(self.id, np.asarray(self.ids, np.int32), references, np.asarray(self.known or (), np.int32))


@dataclass(frozen=True, slots=True)
class Run:
    """Outputs and counters of some prompts. Times are sums over prompts; each counts the steps it shares."""

    outputs: list[list[int]]  # one per prompt, the end token included
    steps: int  # target forwards that emitted tokens, counted once per prompt
    prefill_s: float  # to the first token
    forward_s: float  # target forwards after the first token
    propose_s: float | None = None  # drafting after the first token; None if unknown
    drafted: int | None = None  # None if unknown
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    wall_s: float | None = None  # measured by the contestant, if its caller's clock would include overhead


class Contestant(Protocol):
    """A way to generate."""

    name: str

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """Generate from a batch of prompts."""
        ...

    def renew(self) -> None:
        """Forget all earlier prompts."""
        ...


def make_request(prompt: Prompt, max_tokens: int, guide: GuidedExecutor | None = None) -> Request:
    """Return a greedy request; a prompt with a known output needs the ``guide`` that follows it, and has its length."""
    if prompt.known is not None:
        assert guide is not None, prompt.id
        guide.known[prompt.id] = prompt.known
        max_tokens = len(prompt.known)
    return Request(prompt.id, prompt.ids, SamplingParams(max_tokens), prompt.references, tenant="local")


class EngineContestant:
    """This project's engine with one strategy."""

    def __init__(self, make_engine: Callable[[], Engine], max_tokens: int, guide: GuidedExecutor | None = None) -> None:
        """Use engines of ``make_engine``, each without history; ``guide`` is their executor in guided runs."""
        self._make_engine, self._max_tokens, self._guide = make_engine, max_tokens, guide
        self.engine = make_engine()
        self.name = self.engine.info.strategy

    def renew(self) -> None:
        """Make a new engine with a new drafter."""
        self.engine = self._make_engine()

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """Generate from a batch of prompts."""
        return run_requests(self.engine, [make_request(prompt, self._max_tokens, self._guide) for prompt in prompts])


def run_requests(engine: Engine, requests: Sequence[Request]) -> Run:
    """Run new requests as one batch to their end on an engine without other work."""
    first_s: list[float] = []  # seconds in forwards before the first token of each request
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
