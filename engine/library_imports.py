"""Imports of torch and transformers without their slow parts. Importing this module imports neither."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_DYNAMO = "torch._dynamo"
_TRACED = f"{_DYNAMO}._trace_wrapped_higher_order_op"


def import_transformers() -> None:
    """Import transformers' model code without torch's compiler and DTensor, which are half of its import."""
    import torch

    with unbounded_caches():
        from transformers.utils import is_torch_distributed_available

    available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        is_torch_distributed_available()  # transformers keeps the answer
    finally:
        torch.distributed.is_available = available
    try:
        with without_compiler():
            for name in ("torch.nn.attention.bias", "transformers.modeling_utils", "transformers.generation.utils"):
                importlib.import_module(name)
    except (ImportError, AttributeError) as error:  # a release that uses more of torch's compiler imports it
        logger.debug("transformers is imported with torch's compiler: %s", error)


@contextlib.contextmanager
def unbounded_caches() -> Iterator[None]:
    """Remove the limit of 128 entries from caches in the block: transformers reads its 549 folders of models twice with it."""
    limited: Any = functools.lru_cache
    functools.lru_cache = lambda maxsize=128, typed=False: cache(maxsize) if callable(maxsize) else limited(maxsize, typed)
    try:
        yield
    finally:
        functools.lru_cache = limited


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Keep ``torch._dynamo``, which takes seconds, from being imported in the block for its marks on functions alone."""
    import torch

    if _DYNAMO in sys.modules:
        yield
        return
    lazy: Any = ModuleType(_DYNAMO)
    lazy.allow_in_graph = lazy.assume_constant_result = lazy.disable = _unmarked
    lazy.__path__, lazy.__getattr__ = [], _of_compiler
    traced: Any = ModuleType(_TRACED)
    traced.TransformGetItemToIndex = lambda: importlib.import_module(_TRACED).TransformGetItemToIndex()
    sys.modules[_DYNAMO] = torch._dynamo = lazy
    sys.modules[_TRACED] = traced
    try:
        yield
    finally:
        if sys.modules[_DYNAMO] is lazy:
            del sys.modules[_DYNAMO], sys.modules[_TRACED], torch._dynamo


@contextlib.contextmanager
def values_on_cpu() -> Iterator[None]:
    """Initialize no weights, and compute RoPE frequencies on the CPU: on the meta device torch imports sympy, which is slow."""
    import torch
    from transformers.initialization import no_init_weights

    arange = torch.arange

    def on_cpu(*args: Any, **options: Any) -> torch.Tensor:
        return arange(*args, **{"device": "cpu", **options})

    torch.arange = on_cpu
    try:
        with no_init_weights():
            yield
    finally:
        torch.arange = arange


def _of_compiler(name: str) -> Any:
    """Import torch's compiler after all and return its attribute."""
    if name.startswith("__"):  # which tools ask every module for
        raise AttributeError(name)
    del sys.modules[_DYNAMO], sys.modules[_TRACED]
    return getattr(importlib.import_module(_DYNAMO), name)


def _unmarked(function: Callable[..., Any] | None = None, *args: object, **options: object) -> Callable[..., Any]:
    return (lambda given: given) if function is None else function
