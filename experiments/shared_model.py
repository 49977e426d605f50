"""One model in this process, and engines that take turns on it."""

from __future__ import annotations

from cluster.strategy_option import StrategyChoice
from configs.slices import EngineOptions
from decoding.drafters import LOSSLESS
from engine.engine import Engine
from engine.executor import LocalExecutor
from engine.loading import LoadedModel
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.target import LocalTarget
from experiments.guided import GuidedExecutor


class SharedModel:
    """The weights and KV slots of a model. Its engines must not have requests at the same time."""

    def __init__(self, loaded: LoadedModel, options: EngineOptions, budget: int, guided: bool = False) -> None:
        """
        Args:
            loaded: with tree attention.
            options: of each engine.
            budget: most drafted rows of a request in a step.
            guided: requests follow known outputs (see ``experiments.guided``).
        """
        self.loaded, self._options, self._budget = loaded, options, budget
        self._runner = ModelRunner(loaded.model, options.max_running, loaded.max_model_len + budget)
        self._target: LocalTarget | None = None  # one for all engines: what it measured is the same for each
        self.executor: LocalExecutor = GuidedExecutor(self._runner) if guided else LocalExecutor(self._runner)

    def engine(self, choice: StrategyChoice) -> Engine:
        """A new engine with a new drafter, which knows no earlier request. It gives token ids and no text.

        Raises:
            ValueError: an unknown strategy or option, or a value outside its range.
        """
        info = self.loaded.info(choice.label, choice.name in LOSSLESS)
        drafter = choice.build()
        if self._target is None:
            self._target = LocalTarget(self._runner, info, self.loaded.tokenizer)
        drafter.prepare(self._target)
        return Engine(self.executor, drafter, Scheduler(self._options, self._budget), info)
