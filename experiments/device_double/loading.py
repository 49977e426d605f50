"""Loading of models to the double of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import transformers.modeling_utils as modeling

from outrider.engine.environment import environment


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Have transformers read weights to the double within a block: in this thread, the only one whose device is current.

    Transformers also asks ``torch.cuda`` how much memory it can take at once; that is left out.
    """
    warm_up = modeling.caching_allocator_warmup
    modeling.caching_allocator_warmup = lambda *_: None
    try:
        with environment("HF_DEACTIVATE_ASYNC_LOAD", "1"):
            yield
    finally:
        modeling.caching_allocator_warmup = warm_up
