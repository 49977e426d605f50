"""Python's garbage collector is kept from long pauses in a step loop."""

from __future__ import annotations

import gc


def spare_collector() -> None:
    """Sets aside what is there now, for the life of the process: the collector does not go through it any more.

    For a process that has loaded its model and serves from now on. A full collection goes through all modules and functions of
    torch and transformers, which takes as long as a step or longer, in the middle of one.
    """
    gc.collect()
    gc.freeze()
