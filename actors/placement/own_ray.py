"""Starting a private Ray cluster, or joining a running one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray._private import node, parameter, ray_constants
from ray._private import utils as ray_utils
from ray.job_config import JobConfig

from outrider.actors.placement.ray_folder import MARK, SESSION, RayFolder
from outrider.engine.child_process import CODE

_CoreWorker: Callable[..., Any] = vars(ray._raylet)["CoreWorker"]
OBJECT_STORE_BYTES = 128 * 2**20  # requests and outputs travel inside calls: only unusually long prompts use the store


class RayTokenError(ValueError):
    """Error of a Ray token that would not protect the cluster; the message says what to do."""


class _Job(JobConfig):
    """Job configuration whose workers import this process's code, and nothing from the current folder."""

    def __init__(self) -> None:
        super().__init__(_py_driver_sys_path=[CODE])

    def _runtime_env_has_working_dir(self) -> bool:
        return True  # otherwise Ray puts the current and the script's folder first


def start_ray(address: str | None = None, namespace: str | None = None, folder: RayFolder | None = None) -> None:
    """Start a private Ray cluster in a folder, or join the one at an address. The caller's signal handlers stay in place.

    Args:
        address: cluster to join; None starts a private one, even if another one runs already.
        namespace: of named actors; None lets Ray choose one.
        folder: for a private cluster; the caller ends it after ``ray.shutdown()``, also if the start fails.

    Raises:
        RayTokenError: ``RAY_AUTH_MODE`` is not ``token`` for a new cluster, or others may read the token file of the joined one.
        RuntimeError, ValueError, OSError, ray.exceptions.RayError: Ray does not start, or no cluster answers at the address.
    """
    # Security: Ray runs code for any client that reaches one of its ports with its token. A cluster started here listens on
    # loopback only, except for the ports that replicas of Serve open. Its token is generated here (unless RAY_AUTH_TOKEN is set)
    # and exists only in the environment of its processes. Only this user can enter the folder of its sockets and logs.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the behaviour of coming versions, without the warning
    own: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if address:
            _check_token_file()
        else:
            _keep_out_strangers()
            assert folder is not None, "a Ray of this process's own needs a folder"
            temporary = str(folder.ray)
            own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "_node_ip_address": "127.0.0.1"}
            own |= {"_temp_dir": temporary}
            stack.enter_context(_without_helpers())
            # Ray's processes import nothing from their current folder, and are identified by MARK.
            stack.enter_context(environment({"PYTHONSAFEPATH": "1", MARK: temporary}))
        # Ray's Python handler raises at any point, which loses a signal during the start or leaves processes behind. Its C++
        # handler aborts the process after three seconds.
        stack.enter_context(mock.patch.object(ray_utils, "set_sigterm_handler"))
        stack.enter_context(mock.patch.object(ray._raylet, "CoreWorker", _core_worker))
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address or "local", namespace=namespace, job_config=_Job(), **quiet, **own)


def _core_worker(*arguments: Any) -> Any:
    made = _CoreWorker(*arguments)
    # Give SIGTERM back to Python's handler.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    return made


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the block; processes started in it inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _without_helpers() -> Iterator[None]:
    """Start Ray in the block without autoscaler, log monitor and dashboard server: a private cluster needs none of them."""
    # ``ray.init`` has no option for them, nor for the session name, which is part of the socket paths.
    params = functools.partial(parameter.RayParams, no_monitor=True, include_log_monitor="", session_name=SESSION)
    with mock.patch.object(parameter, "RayParams", params), mock.patch.object(node.Node, "start_api_server"):
        yield


def _keep_out_strangers() -> None:
    """Make the next Ray listen on loopback, with a token that is in no file."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")  # Ray sets it itself
    if mode.lower() != "token":
        raise RayTokenError(f"RAY_AUTH_MODE is {mode}: anyone who reaches a port of Ray could run code here; unset it")
    if not os.environ.get("RAY_AUTH_TOKEN"):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # If Ray may form clusters, it replaces 127.0.0.1 by the machine's external address. Ray's processes read the
    # variable; this process has already read it.
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
    """Run the block with a private Ray cluster. Raises the errors of ``start_ray``."""
    folder = RayFolder.make()
    try:
        start_ray(folder=folder)
        yield
    finally:
        # Ray first: its processes use the folder until they end.
        ray.shutdown()
        folder.end()
