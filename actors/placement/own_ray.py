"""Starting Ray: one that belongs to this process, or joining one that runs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray._private import node, parameter, ray_constants
from ray._private import utils as ray_utils

OBJECT_STORE_BYTES = 128 * 2**20  # requests and outputs travel inside calls: only unusually long prompts pass through the store


class RayTokenError(ValueError):
    """Ray's token would not keep strangers out; the message says what to do."""


def start_ray(address: str | None = None, namespace: str | None = None) -> None:
    """Starts a Ray of this process's own, which ends with ``ray.shutdown()``, or joins the one at an address.

    Ray runs code for whoever reaches one of its ports with its token. All ports of one that is started here are on the loopback
    interface, but for those that replicas of Ray Serve open; its token is made here and is in the environment of its processes
    only, unless ``RAY_AUTH_TOKEN`` says another one. SIGTERM stays with the caller's handler: Ray's own raises wherever it
    interrupts, so that one in the middle of the start is lost at times, and leaves processes to themselves at others.

    Args:
        address: of a cluster to join; None starts a Ray of this process's own, even where one runs already.
        namespace: of named actors; None is one of Ray's making.

    Raises:
        RayTokenError: ``RAY_AUTH_MODE`` is not ``token`` where a Ray starts, or others may read the file with the token of the
            one that is joined.
        RuntimeError, ValueError, OSError, ray.exceptions.RayError: it does not start, or nothing answers at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the behaviour of coming versions, without the warning
    own: dict[str, Any] = {}
    lean: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if address:
        _check_token_file()
    else:
        _keep_out_strangers()
        lean = _without_helpers()
        own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "_node_ip_address": "127.0.0.1"}
    with lean, mock.patch.object(ray_utils, "set_sigterm_handler"):
        ray.init(address or "local", namespace=namespace, log_to_driver=False, logging_level=logging.ERROR, **own)


@contextlib.contextmanager
def _without_helpers() -> Iterator[None]:
    """Has the Ray that is started in the block go without what a Ray of one machine and one driver has no use for.

    That is the autoscaler, the watcher of log files, whose lines nobody prints, and the dashboard's server: three processes that
    start while the model wants to load. ``ray.init`` has no option for them.
    """
    params = functools.partial(parameter.RayParams, no_monitor=True, include_log_monitor="")
    with mock.patch.object(parameter, "RayParams", params), mock.patch.object(node.Node, "start_api_server"):
        yield


def _keep_out_strangers() -> None:
    """Has the Ray that is started next listen on the loopback interface, with a token that is in no file."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")  # Ray sets it itself
    if mode.lower() != "token":
        raise RayTokenError(f"RAY_AUTH_MODE is {mode}: whoever reaches a port of Ray could run code here; unset it")
    if not os.environ.get("RAY_AUTH_TOKEN"):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Where Ray may form clusters it takes 127.0.0.1 for the address by which others reach this machine. Its processes read the
    # variable, and this one has read it.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _check_token_file() -> None:
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if path.is_file() and path.stat().st_mode & 0o077:
        raise RayTokenError(f"{path} holds Ray's token, and others may read it: chmod 600 {path}, or set RAY_AUTH_TOKEN")


@contextlib.contextmanager
def own_ray() -> Iterator[None]:
    """A Ray of this process's own for the length of the block. Raises as ``start_ray``."""
    start_ray()
    try:
        yield
    finally:
        ray.shutdown()
