"""Which runner a model gets: by its device, and by how exact the engine is to be."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from engine.runner import ModelRunner
from engine.static_runner import StaticRunner, has_graphs
from engine.strict import check_strict, strict_rows

RunnerMaker = Callable[[PreTrainedModel, int, int, bool], ModelRunner]  # see ``make_runner``


def make_runner(model: PreTrainedModel, slots: int, capacity: int, strict: bool = False) -> ModelRunner:
    """A runner of a whole model.

    Args:
        model: see ``ModelRunner``.
        slots: sequences held at once.
        capacity: entries of one slot.
        strict: every number of a row is a function of the tokens before it alone: see ``engine.strict``.

    Raises:
        ModelLoadError: see ``ModelRunner`` and ``engine.strict``.
    """
    fixed_rows = strict_rows(model) if strict else None
    if has_graphs(model):
        runner = StaticRunner(model, slots, capacity, fixed_rows)
        runner.prepare()
    else:
        runner = ModelRunner(model, slots, capacity, fixed_rows=fixed_rows)
    if strict:
        check_strict(runner)
    return runner
