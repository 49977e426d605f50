"""Engines that follow known outputs on a device: every row is computed, the known token is committed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from configs.slices import EngineOptions, SpeculationOptions
from decoding.drafters import LOSSLESS, build_drafter
from decoding.drafters.base import Drafter
from engine.engine import Engine
from engine.executor import LocalExecutor, Outcome
from engine.forward.batch import Work
from engine.forward.runner import ModelRunner
from engine.loading.model import LoadedModel
from engine.target import LocalTarget
from experiments.bench.engines.contestants import EngineContestant
from experiments.bench.engines.guided import GuidedExecutor

PLAIN = "autoregressive"
STRATEGIES = (PLAIN, "llma", "trie", "auto")


class TraceExecutor(GuidedExecutor):
    """A guided executor whose steps cost what a real model's do: the logits are raised only where a drafter ranks tokens."""

    def execute(self, works: Sequence[Work], top_k: int = 0) -> list[Outcome | None]:
        """See ``Executor``."""
        self.guide.ranked = top_k > 0
        return super().execute(works, top_k)


class Engines:
    """Makes engines over one runner, which runs one of them at a time."""

    def __init__(self, loaded: LoadedModel, runner: ModelRunner, folder: Path, guided: bool = True) -> None:
        """
        Args:
            loaded: the model.
            runner: of it, with one slot.
            folder: where the latency curve is kept: one that is new in this run.
            guided: whether known outputs are followed; else the model says what it says.
        """
        self.loaded, self.runner = loaded, runner
        self.executor = TraceExecutor(runner) if guided else LocalExecutor(runner)
        self._info = loaded.info(PLAIN, True)
        self.target = LocalTarget(runner, self._info, None, folder)

    def drafter(self, strategy: str) -> Drafter:
        """A new one, prepared."""
        drafter = build_drafter(strategy, {})
        drafter.prepare(self.target)
        return drafter

    def engine(self, strategy: str, drafter: Drafter | None = None) -> Engine:
        """A new engine, with a new drafter where none is given."""
        drafter = self.drafter(strategy) if drafter is None else drafter
        options = EngineOptions(max_running=1, prefix_caching=False)
        info = self.loaded.info(strategy, strategy in LOSSLESS)
        return Engine(self.executor, drafter, options, SpeculationOptions().most_draft_tokens, info)

    def contestant(self, strategy: str, max_tokens: int) -> EngineContestant:
        """Such an engine as it runs prompts."""
        guide = self.executor if isinstance(self.executor, TraceExecutor) else None
        return EngineContestant(lambda: self.engine(strategy), max_tokens, guide)
