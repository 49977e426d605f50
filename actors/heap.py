"""Memory of processes that serve: no long pauses for the garbage collector, and nothing held that loading has left."""

from __future__ import annotations

import ctypes
import gc


def spare_collector() -> None:
    """Sets aside what is there now, for the life of the process: the collector does not go through it any more.

    For a process that has loaded its model and serves from now on. A full collection goes through all modules and functions of
    torch and transformers, which takes as long as a step or longer, in the middle of one.
    """
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Gives pages back that loading has used and freed, where the C library can: glibc's keeps them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
