"""Choice of a model's runner by its device and by the result of the exactness self-check."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from outrider.configs.slices import EngineOptions
from outrider.engine.accelerator import accelerator
from outrider.engine.cpu.mixers import mixers
from outrider.engine.cuda.static_runner import TREE_ROWS, StaticRunner, has_graphs, lacks_exactness, lacks_graphs
from outrider.engine.errors import ModelLoadError, one_line
from outrider.engine.forward import exactness
from outrider.engine.forward.attention import TREE_ATTENTION, tree_attention
from outrider.engine.forward.runner import ModelRunner, kv_shape
from outrider.engine.kv.kv_cache import KVShape

logger = logging.getLogger(__name__)

RunnerMaker = Callable[[PreTrainedModel, int, EngineOptions, int], ModelRunner]  # see ``make_runner``

# Rows of every forward pass (None: any number), in the order in which they are tried until one is exact. On a GPU, weights are
# read once for 64 rows as for one, and prefill with one row per forward pass would take minutes; on a CPU each row costs time.
_FORMS: dict[str, tuple[int | None, ...]] = {"cuda": (64,), "cpu": (None, 16, 1)}


def make_runner(model: PreTrainedModel, capacity: int, options: EngineOptions, tree_rows: int = TREE_ROWS) -> ModelRunner:
    """Return a runner of a whole model that passed the exactness self-check, unless ``options.exact`` is ``rounding``.

    Args:
        capacity: entries of one slot.
        tree_rows: maximum rows of a request's tree, including its root.

    Raises:
        ModelLoadError: see ``ModelRunner`` and ``refuse_form``; tree attention differs from the model's own; no form is exact.
    """
    with accelerator().current(model.device):
        return _checked(model, capacity, options, tree_rows)


def _checked(model: PreTrainedModel, capacity: int, options: EngineOptions, tree_rows: int) -> ModelRunner:
    graphs, name = has_graphs(model), type(model).__name__
    refuse_form(name, model.config, kv_shape(model), options)
    if options.compile:
        compile_layers(model)
    if options.exact == "rounding":
        if not graphs:
            why = lacks_graphs(model.config, kv_shape(model))
            logger.warning("%s on %s runs without CUDA graphs, which is slower: %s", name, model.device, why)
        runner = _made(model, capacity, options, None, graphs, tree_rows)
        _refuse_strays(runner)
        return runner
    # Recurrent states need a runner for any number of rows.
    forms = (None,) if next(mixers(model), None) is not None else _FORMS[model.device.type]
    for number, rows in enumerate(forms, start=1):
        runner = _made(model, capacity, options, rows, graphs, tree_rows)
        if number == 1:
            _refuse_strays(runner)
        fault = exactness.check(runner, tree_rows)
        if fault is None:
            runner.exact = True
            return runner
        # Its KV slots are freed before the next runner allocates others.
        del runner
        if number < len(forms):
            what = "any number of rows" if rows is None else f"{rows} rows"
            logger.warning(
                "%s on %s is not exact with %s (%s): forward passes are limited to %s rows, which is slower",
                name, model.device, what, fault, forms[number],
            )  # fmt: skip
    advice = "" if model.device.type == "cpu" else " Set engine.exact=rounding, where near-ties may fall either way"
    raise ModelLoadError(f"{name} cannot be served exactly on {model.device}: {fault}.{advice}")


def made_unchecked(
    model: PreTrainedModel, capacity: int, options: EngineOptions, rows: int | None, tree_rows: int
) -> ModelRunner:
    """Return the runner of a form, with ``rows`` per forward pass, that passed the self-check before; see ``cached_checks``."""
    refuse_form(type(model).__name__, model.config, kv_shape(model), options)
    with accelerator().current(model.device):
        runner = _made(model, capacity, options, rows, has_graphs(model), tree_rows)
    runner.exact = True
    return runner


def refuse_form(name: str, config: PreTrainedConfig, shape: KVShape, options: EngineOptions) -> None:
    """Raise ``ModelLoadError`` if ``options.exact`` or ``options.compile`` is not supported for a configuration and KV shape."""
    on_gpu = shape.device.type == "cuda"
    if options.compile and not (on_gpu and lacks_graphs(config, shape) is None):
        raise ModelLoadError(f"engine.compile=true needs a GPU and Triton, and the model is on {shape.device}: leave it out")
    if options.exact == "rounding":
        if not on_gpu:
            raise ModelLoadError(
                "engine.exact=rounding is supported on GPUs only: on a CPU exact outputs are not slower. Leave it out"
            )
        return
    without = lacks_exactness(config, shape) if on_gpu else None
    if without is not None:
        advice = "Set engine.exact=rounding, where near-ties may fall either way, or model.device=cpu"
        raise ModelLoadError(f"{name} cannot be served exactly on {shape.device}: {without}. {advice}")


def _refuse_strays(runner: ModelRunner) -> None:
    """Raise ``ModelLoadError`` if the model's outputs differ from those of the unpatched attention or code."""
    # Layers with states can run only by our code once they are bound: tests compare those model families instead.
    if runner.cache.states is not None:
        return
    name = type(runner.model).__name__
    try:
        fault = exactness.check_attention(runner)
    except (RuntimeError, TypeError, ValueError) as error:
        why = "its own attention, needed for the comparison, failed"
        raise ModelLoadError(f"{name} cannot be served: {why} ({one_line(error)})") from error
    if fault is not None:
        raise ModelLoadError(f"{name} cannot be served: tree attention differs from its own attention beyond rounding ({fault})")
    fault = exactness.check_graphs(runner)
    if fault is not None:
        raise ModelLoadError(f"{name} cannot be served on {runner.model.device}: {fault}")


def _made(
    model: PreTrainedModel, capacity: int, options: EngineOptions, rows: int | None, graphs: bool, tree_rows: int
) -> ModelRunner:
    if not graphs:
        return ModelRunner(model, options.max_running, capacity, fixed_rows=rows, kept=options.kept_slots)
    runner = StaticRunner(model, options.max_running, capacity, rows, kept=options.kept_slots, tree_rows=tree_rows)
    runner.prepare()
    return runner


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> int:
    """Compile a model's layers with torch at their first call, for any number of rows; return the number of layers.

    Raises:
        ModelLoadError: the model has no list of layers.
    """
    wanted = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == wanted]
    if not lists:
        raise ModelLoadError(
            f"engine.compile=true does not support {type(model).__name__}: its layers were not found. Leave it out"
        )
    # Excluded from compilation, so that layers are not recompiled for each layer index that attention reads.
    AttentionInterface.register(TREE_ATTENTION, torch.compiler.disable(tree_attention))
    # Half precision rounds between fused operations as the model's own code does.
    options = {"emulate_precision_casts": True} if backend == "inductor" else None
    # Norms, RoPE and element-wise products become few kernels: in a CUDA graph, a small operation's cost is mostly its launch.
    for layer in lists[0]:
        layer.compile(dynamic=True, backend=backend, options=options)  # all layers share one compiled code
    return wanted
