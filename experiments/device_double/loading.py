"""Loading of models to the double of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import AutoModelForCausalLM

from experiments.device_double.gpu import DoubleGpu


@contextlib.contextmanager
def loading(gpu: DoubleGpu) -> Iterator[None]:
    """Have transformers read a model with a ``device_map`` on the CPU within a block; its weights are moved to the double then.

    Transformers asks ``torch.cuda`` for memory before it reads weights straight to a GPU.
    """
    original = AutoModelForCausalLM.from_pretrained

    def read(*args: Any, device_map: Any = None, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if device_map is not None:
            gpu.move(found[0] if isinstance(found, tuple) else found, device_map[""])
        return found

    AutoModelForCausalLM.from_pretrained = read
    try:
        yield
    finally:
        AutoModelForCausalLM.from_pretrained = original
