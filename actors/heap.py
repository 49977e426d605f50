"""Memory settings of serving processes: short garbage collector pauses, and freed heap returned to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no garbage in the block, whose imports or model create objects that stay, and exclude them for good."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def spare_collector() -> None:
    """Exclude all current objects from garbage collection for good. Call it after the model is loaded."""
    # A full collection walks all modules and functions of torch and transformers. That takes about as long as a step and would
    # interrupt one.
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Return freed heap pages to the operating system, where the C library supports it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
