"""A context that sets an environment variable of this process and puts it back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """A variable has a value within the block, for this process and those that it starts, and what it had before after it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
