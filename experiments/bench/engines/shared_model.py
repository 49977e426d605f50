"""One model in this process, and engines that take turns on it."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.cli.generate.strategy_option import StrategyChoice
from configs.slices import EngineOptions
from decoding.drafters import LOSSLESS
from decoding.drafters.with_model.draft_model import DraftModel
from engine.engine import Engine
from engine.executor import LocalExecutor
from engine.forward.runner import ModelRunner
from engine.loading.model import LoadedModel
from engine.target import LocalTarget
from experiments.bench.engines.guided import GuidedExecutor


class SharedModel:
    """The weights and KV slots of a model. Its engines must not have requests at the same time."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        budget: int,
        guided: bool = False,
        draft_model: DraftModel | None = None,
    ) -> None:
        """
        Args:
            loaded: with tree attention.
            options: of each engine.
            budget: most drafted rows of a request in a step.
            guided: requests follow known outputs (see ``experiments.bench.engines.guided``).
            draft_model: for the strategies that draft with one, all engines one after the other.
        """
        self.loaded, self._options, self._budget, self._draft_model = loaded, options, budget, draft_model
        self._runner = ModelRunner(loaded.model, options.max_running, loaded.max_model_len + budget)
        self._target: LocalTarget | None = None  # one for all engines: what it measured is the same for each
        self.executor = self._new_executor(guided, {})  # takes the known outputs of guided runs, for all engines

    def _new_executor(self, guided: bool, known: dict[str, Sequence[int]]) -> LocalExecutor:
        return GuidedExecutor(self._runner, known) if guided else LocalExecutor(self._runner)

    def engine(self, choice: StrategyChoice) -> Engine:
        """A new engine with a new drafter and executor, which know no earlier request. It gives token ids and no text.

        Raises:
            ValueError: an unknown strategy or option, or a value outside its range.
        """
        info = self.loaded.info(choice.label, choice.name in LOSSLESS)
        drafter = choice.build()
        drafter.draft_model = self._draft_model
        if self._target is None:
            self._target = LocalTarget(self._runner, info, self.loaded.tokenizer)
        drafter.prepare(self._target)
        guide = self.executor if isinstance(self.executor, GuidedExecutor) else None
        executor = self._new_executor(guide is not None, {} if guide is None else guide.known)
        return Engine(executor, drafter, self._options, self._budget, info)
