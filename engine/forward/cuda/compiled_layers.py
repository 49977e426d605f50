"""torch.compile of a model's layers: norms, rotations and products by element become few kernels instead of many.

The layers of a model have the same code, so one of them is compiled and all of them use it; the attention stays as it is. In a
CUDA graph what is left of a small operation is the time in which the GPU starts it, and a layer has many.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, PreTrainedModel

from engine.errors import ModelLoadError
from engine.forward.attention import TREE_ATTENTION, tree_attention


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> int:
    """Has the layers compiled when they are first called, for any number of rows; returns how many there are.

    Args:
        model: see ``ModelRunner``.
        backend: torch's name of it.

    Raises:
        ModelLoadError: it has no list of layers.
    """
    wanted = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == wanted]
    if not lists:
        raise ModelLoadError(f"engine.compile=true is not for {type(model).__name__}: its layers were not found. Leave it out")
    # What a layer hands its attention is read by that alone: nothing is compiled anew for the number of a layer.
    AttentionInterface.register(TREE_ATTENTION, torch.compiler.disable(tree_attention))
    # Between two operations that become one, half precision rounds as the model's own code does.
    options = {"emulate_precision_casts": True} if backend == "inductor" else None
    for layer in lists[0]:
        layer.compile(dynamic=True, backend=backend, options=options)
    return wanted
