"""Engines that follow known outputs on a device: every row is computed, the known token is committed."""

from __future__ import annotations

from pathlib import Path

from outrider.configs.slices import EngineOptions, SpeculationOptions
from outrider.decoding.drafters.registry import parse_strategy
from outrider.decoding.request import PLAIN
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model import LoadedModel
from outrider.experiments.bench.engines.contestants import EngineContestant, SharedModel

STRATEGIES = (PLAIN, "llma", "trie", "auto")


def engines(loaded: LoadedModel, runner: ModelRunner, folder: Path, guided: bool = True) -> SharedModel:
    """What makes engines over one runner, which runs one of them at a time.

    Args:
        loaded: the model.
        runner: of it, with one slot.
        folder: where the latency curve is kept: one that is new in this run.
        guided: whether known outputs are followed; else the model says what it says.
    """
    options = EngineOptions(max_running=1, prefix_caching=False)
    return SharedModel(loaded, options, SpeculationOptions().most_draft_tokens, guided, runner=runner, kept=folder)


def contestants(model: SharedModel, max_tokens: int) -> dict[str, EngineContestant]:
    """Those of ``STRATEGIES`` as they run prompts."""
    return {name: model.contestant(parse_strategy(name), max_tokens) for name in STRATEGIES}
