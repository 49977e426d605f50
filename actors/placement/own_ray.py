"""Starting Ray: one that belongs to this process, or joining one that runs."""

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

from actors.placement.ray_folder import MARK, SESSION, RayFolder
from engine.child_process import CODE

_CoreWorker: Callable[..., Any] = vars(ray._raylet)["CoreWorker"]
OBJECT_STORE_BYTES = 128 * 2**20  # requests and outputs travel inside calls: only unusually long prompts pass through the store


class RayTokenError(ValueError):
    """Ray's token would not keep strangers out; the message says what to do."""


class _Job(JobConfig):
    """Has workers import the code of this process, and nothing from the folder in which it was started."""

    def __init__(self) -> None:
        super().__init__(_py_driver_sys_path=[CODE])

    def _runtime_env_has_working_dir(self) -> bool:
        return True  # else Ray puts the current folder, and the script's, before all others


def start_ray(address: str | None = None, namespace: str | None = None, folder: RayFolder | None = None) -> None:
    """Start a Ray of this process's own in a folder, or join the one at an address.

    Ray runs code for whoever reaches one of its ports with its token. All ports of one that is started here are on the loopback
    interface, but for those that replicas of Ray Serve open; its token is made here and is in the environment of its processes
    only, unless ``RAY_AUTH_TOKEN`` says another one. Its sockets and logs are in a folder that no other user can enter. Signals
    stay with the caller's handlers: Ray's own raises wherever it interrupts, so that one in the middle of the start is lost at
    times, and leaves processes to themselves at others; that of its C++ part aborts the process after three seconds.

    ``ray.shutdown()``, and then ``folder.end()``, end it.

    Args:
        address: of a cluster to join; None starts a Ray of this process's own, even where one runs already.
        namespace: of named actors; None is one of Ray's making.
        folder: for a Ray of this process's own; to be ended where the start fails, too.

    Raises:
        RayTokenError: ``RAY_AUTH_MODE`` is not ``token`` where a Ray starts, or others may read the file with the token of the
            one that is joined.
        RuntimeError, ValueError, OSError, ray.exceptions.RayError: it does not start, or nothing answers at the address.
    """
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
            # Its processes import nothing from their current folder, and are found by the folder.
            stack.enter_context(environment({"PYTHONSAFEPATH": "1", MARK: temporary}))
        stack.enter_context(mock.patch.object(ray_utils, "set_sigterm_handler"))
        stack.enter_context(mock.patch.object(ray._raylet, "CoreWorker", _core_worker))
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address or "local", namespace=namespace, job_config=_Job(), **quiet, **own)


def _core_worker(*arguments: Any) -> Any:
    """Return Ray's part in C++, with SIGTERM given back to Python's handler."""
    made = _CoreWorker(*arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    return made


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """For the length of the block, variables that processes which are started within it inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _without_helpers() -> Iterator[None]:
    """Has the Ray that is started in the block go without what a Ray of one machine and one driver has no use for.

    That is the autoscaler, the watcher of log files, whose lines nobody prints, and the dashboard's server: three processes that
    start while the model wants to load. ``ray.init`` has no option for them, nor for the name of its session, which is part of
    the paths of sockets.
    """
    params = functools.partial(parameter.RayParams, no_monitor=True, include_log_monitor="", session_name=SESSION)
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
    folder = RayFolder.make()
    try:
        start_ray(folder=folder)
        yield
    finally:
        ray.shutdown()
        folder.end()
