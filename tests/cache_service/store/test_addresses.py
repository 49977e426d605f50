"""Addresses against real servers: a socket, TLS, Sentinel, Cluster, an ACL user on each; and what bad ones say."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from outrider.cache_service.store.addresses import connect
from outrider.cache_service.store.redis_binary import find_redis_server
from outrider.cache_service.store.redis_store import RedisStore
from tests.helpers.network import certificate, ending_tls, free_port
from tests.helpers.redis_user import acl_rule, use_every_command
from tests.helpers.waiting import eventually

A = "a" * 32
PASSWORD = "p@ss:w/rd"
QUOTED = "p%40ss%3Aw%2Frd"


@contextmanager
def server(folder: Path, port: int, *options: str, sentinel: bool = False, password: str | None = None) -> Iterator[redis.Redis]:
    """A redis-server with options of the test's own."""
    binary = find_redis_server()
    assert binary is not None
    config = folder / f"{port}.conf"
    config.write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\n" + "\n".join(options) + "\n")
    command = [str(binary.path), str(config), *(["--sentinel"] if sentinel else [])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, password=password) as client:
            eventually(answers(lambda: bool(client.ping())))
            yield client
    finally:
        process.kill()
        process.wait()


def answers(condition: Callable[[], bool]) -> Callable[[], bool]:
    """A condition that is not met while Redis raises."""

    def met() -> bool:
        try:
            return condition()
        except redis.RedisError:
            return False

    return met


def add_user(client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "limited", "on", f">{PASSWORD}", *acl_rule("outrider").split())


def works(url: str) -> None:
    """What the cache clients and the service do, through this address."""
    store = RedisStore(url, "outrider", 5.0)
    use_every_command(store)
    with pytest.raises(redis.RedisError, match=r"permission|NOPERM"):
        RedisStore(url, "another", 5.0).append([(A, b"x")])
    store.close()


def test_plain_server_database_and_unix_socket(tmp_path: Path) -> None:
    port, path = free_port(), tmp_path / "redis.sock"
    with server(tmp_path, port, f"unixsocket {path}") as client:
        add_user(client)
        works(f"redis://limited:{QUOTED}@127.0.0.1:{port}/3")
        works(f"unix://limited:{QUOTED}@{path}?db=4")
        works(f"redis://limited:{QUOTED}@localhost:{port}?health_check_interval=30")
        assert set(client.info("keyspace")) == {"db0", "db3", "db4"}


def test_sentinel(tmp_path: Path) -> None:
    port, watch, secured, unused = free_port(), free_port(), free_port(), free_port()
    monitor = f"sentinel monitor mymaster 127.0.0.1 {port} 1"
    with server(tmp_path, port) as client:
        add_user(client)
        with server(tmp_path, watch, monitor, sentinel=True):
            works(f"redis+sentinel://limited:{QUOTED}@127.0.0.1:{unused},127.0.0.1:{watch}/mymaster/2")
            with pytest.raises(redis.ConnectionError, match="nomaster"):
                connect(f"redis+sentinel://127.0.0.1:{watch}/nomaster", 1.0).execute_command("PING")
        with server(tmp_path, secured, monitor, f'requirepass "{PASSWORD}"', sentinel=True, password=PASSWORD):
            address = f"redis+sentinel://limited:{QUOTED}@127.0.0.1:{secured}/mymaster"
            works(f"{address}?sentinel_password={QUOTED}")
            with pytest.raises(redis.ConnectionError):
                connect(address, 1.0).execute_command("PING")


@pytest.mark.slow
def test_cluster(tmp_path: Path) -> None:
    port = free_port()
    options = ("cluster-enabled yes", f"cluster-config-file {tmp_path}/nodes.conf")
    with server(tmp_path, port, *options) as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        add_user(client)
        eventually(answers(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO")))
        works(f"redis+cluster://limited:{QUOTED}@127.0.0.1:{free_port()},127.0.0.1:{port}")
        held = RedisStore(f"redis+cluster://127.0.0.1:{port}", "outrider", 2.0)
        held.ping()
    new = RedisStore(f"redis+cluster://127.0.0.1:{port}", "outrider", 0.5)  # nothing is asked yet
    for store in (held, new, held, new):
        with pytest.raises((redis.RedisError, OSError)):
            store.append([(A, b"x")])
    with server(tmp_path, port, *options):
        for store in (held, new):
            eventually(answers(lambda store=store: len(store.append([(A, b"x")])) == 1))  # type: ignore[misc]
            store.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make a certificate with")
def test_tls(tmp_path: Path) -> None:
    port, (own, key) = free_port(), certificate(tmp_path)
    with server(tmp_path, port) as client, ending_tls(own, key, port) as secured:
        add_user(client)
        works(f"rediss://limited:{QUOTED}@localhost:{secured}/0?ssl_ca_certs={own}")
        for url in (f"rediss://localhost:{secured}/0", f"redis://localhost:{secured}/0"):  # unknown authority, no TLS
            with pytest.raises((redis.RedisError, OSError)):
                RedisStore(url, "outrider", 1.0).ping()
        missing = RedisStore(f"rediss://localhost:{secured}/0?ssl_ca_certs={tmp_path}/none.pem", "outrider", 1.0)
        with pytest.raises((redis.RedisError, OSError)):
            missing.ping()


def test_nothing_is_sent_before_the_first_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = f"127.0.0.1:{listener.getsockname()[1]}"
        for url in (
            f"redis://{here}", f"rediss://u:p@{here}/0?ssl_ca_certs=/none", "unix:///none", f"redis+sentinel://{here}/m",
            f"redis+cluster://{here}", f"rediss+cluster://{here}", f"rediss+sentinel://[::1]:1,{here}/m/1?ssl_cert_reqs=none",
        ):  # fmt: skip
            RedisStore(url, "outrider", 1.0).close()
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):  # nobody has come
            listener.accept()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:6379", "unknown scheme"),
        ("http://u:SECRET@h", "unknown scheme"),
        ("redis://u:SECRET@h:port/0", "cannot be read"),
        ("redis://u:SECRET@h:99999/0", "cannot be read"),
        ("redis://u:SECRET@h/zero", "database"),
        ("redis://u:SECRET@h,i/0", "several hosts"),
        ("redis://:SE/CRET@h/0", "percent-encode"),
        ("redis://u:SECRET@h/0?nonsense=1", "does not know"),
        ("redis://u:SECRET@h/0?db=SECRET", "cannot be read"),
        ("redis://u:SECRET@h/0?socket_timeout=9", "socket_timeout cannot be set"),
        ("rediss://u:SECRET@h/0?ssl_cert_reqs=SECRET", "does not know"),
        ("redis://u:SECRET@h/0?ssl_ca_certs=x", "does not know"),
        ("unix://u:SECRET@", "name the socket"),
        ("redis+sentinel://u:SECRET@h:1", "name the master"),
        ("redis+sentinel://u:SECRET@/m", "name at least one host"),
        ("redis+sentinel://u:SECRET@h/m/x", "database"),
        ("redis+sentinel://u:SECRET@h/m?nonsense=1", "does not know"),
        ("redis+cluster://u:SECRET@h/1", "one database"),
        ("redis+cluster://u:SECRET@h,:7", "name at least one host"),
        ("redis+cluster://u:SECRET@h?nonsense=1", "does not know"),
    ],
)
def test_bad_addresses_are_refused_in_one_line_without_the_password(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        connect(url, 1.0)
    text = str(caught.value)
    assert text.startswith("redis_url") and "\n" not in text
    assert "SECRET" not in text and "CRET" not in text
