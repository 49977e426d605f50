"""One model in this process, shared by engines that take turns."""

from __future__ import annotations

from pathlib import Path

from outrider.configs.slices import EngineOptions
from outrider.decoding.drafters.base import DraftModel
from outrider.decoding.drafters.registry import LOSSLESS, StrategyChoice
from outrider.decoding.request import PLAIN
from outrider.engine.engine import Engine
from outrider.engine.executor import LocalExecutor
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model import LoadedModel
from outrider.engine.target import LocalTarget
from outrider.experiments.bench.engines.contestants import EngineContestant
from outrider.experiments.bench.engines.guided import GuidedExecutor


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

    def engine(self, choice: StrategyChoice) -> Engine:
        """Return an engine without history, which emits token ids and no text.

        Raises:
            ValueError: an unknown strategy or option, or a value outside its range.
        """
        drafter = choice.build()
        drafter.draft_model = self._draft_model
        drafter.prepare(self.target)
        executor = LocalExecutor(self.runner) if self.guide is None else GuidedExecutor(self.runner, self.guide.known)
        info = self.loaded.info(choice.label, choice.name in LOSSLESS)
        return Engine(executor, drafter, self._options, self._budget, info, target=self.target)

    def contestant(self, choice: StrategyChoice, max_tokens: int) -> EngineContestant:
        """Return a strategy as a contestant with at most ``max_tokens`` of each output that is not known."""
        return EngineContestant(lambda: self.engine(choice), max_tokens, self.guide)
