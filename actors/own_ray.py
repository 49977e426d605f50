"""Starting Ray: one that belongs to this process, or joining one that runs."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import ray

OBJECT_STORE_BYTES = 128 * 2**20  # requests and outputs travel inside calls: only unusually long prompts pass through the store


def start_ray(address: str | None = None, namespace: str | None = None) -> None:
    """Starts a Ray that only this machine reaches and that ends with ``ray.shutdown()``, or joins the one at an address.

    Args:
        address: of a cluster to join; None starts a Ray of this process's own, even where one runs already.
        namespace: of named actors; None is one of Ray's making.

    Raises:
        RuntimeError, ValueError, OSError, ray.exceptions.RayError: it does not start, or nothing answers at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the behaviour of coming versions, without the warning
    own: dict[str, Any] = {}
    if not address:
        own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "_node_ip_address": "127.0.0.1"}
    ray.init(address or "local", namespace=namespace, log_to_driver=False, logging_level=logging.ERROR, **own)


@contextlib.contextmanager
def own_ray() -> Iterator[None]:
    """A Ray of this process's own for the length of the block."""
    start_ray()
    try:
        yield
    finally:
        ray.shutdown()
