"""Which runner a model gets: by its device, and by how exact the engine is to be."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from configs.slices import EngineOptions
from engine.compiled_layers import compile_layers
from engine.errors import ModelLoadError
from engine.runner import ModelRunner
from engine.static_runner import StaticRunner, has_graphs
from engine.strict import check_strict, strict_rows

RunnerMaker = Callable[[PreTrainedModel, int, EngineOptions], ModelRunner]  # see ``make_runner``


def make_runner(model: PreTrainedModel, capacity: int, options: EngineOptions) -> ModelRunner:
    """A runner of a whole model.

    Args:
        model: see ``ModelRunner``.
        capacity: entries of one slot.
        options: of the engine: ``max_running`` slots, ``exact`` (see ``engine.strict``) and ``compile`` count here.

    Raises:
        ModelLoadError: see ``ModelRunner`` and ``engine.strict``; or layers are to be compiled and there are no graphs.
    """
    runner: ModelRunner
    fixed_rows = strict_rows(model) if options.exact == "strict" else None
    if has_graphs(model):
        if options.compile:
            compile_layers(model)
        runner = graphs = StaticRunner(model, options.max_running, capacity, fixed_rows)
        graphs.prepare()
    elif options.compile:
        raise ModelLoadError(f"engine.compile=true needs a GPU and Triton, and the model is on {model.device}: leave it out")
    else:
        runner = ModelRunner(model, options.max_running, capacity, fixed_rows=fixed_rows)
    if fixed_rows is not None:
        check_strict(runner)
    return runner
