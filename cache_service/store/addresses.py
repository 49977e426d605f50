"""Parsing of Redis addresses (server, socket, Sentinel, Cluster, with or without TLS) into clients of redis-py.

====================================================  ===================================================================
``redis://[USER:PASSWORD@]HOST[:PORT][/DB]``          one server
``rediss://...``                                      the same over TLS; the query has redis-py's arguments:
                                                      ``?ssl_ca_certs=/etc/ca.pem&ssl_certfile=...&ssl_keyfile=...``
``unix://[USER:PASSWORD@]/PATH[?db=N]``               a Unix socket
``redis+sentinel://[...@]H1[:P1],H2[:P2]/NAME[/DB]``  the master that the sentinels call NAME, and its user and password;
                                                      those of the sentinels are ``?sentinel_username=&sentinel_password=``
``redis+cluster://[...@]H1[:P1],H2[:P2]``             a cluster, discovered from any of its nodes
``rediss+sentinel://``, ``rediss+cluster://``         over TLS
====================================================  ===================================================================

Passwords are percent-encoded, as in any URL. Errors show only the scheme of an address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

Client = redis.Redis | RedisCluster

# redis-py has no types for these
_parse_url: Callable[[str], dict[str, Any]] = parse_url
_make_sentinel: Callable[..., Any] = Sentinel
_make_node: Callable[[str, int], Any] = ClusterNode

_REDIS_PORT = 6379
_SENTINEL_PORT = 26379
# The store relies on these: setting them in the address would change the form of replies or the timeouts.
_OURS = ("socket_timeout", "socket_connect_timeout", "timeout", "protocol", "decode_responses", "encoding", "retry_on_timeout",
         "retry_on_error", "legacy_responses", "single_connection_client")  # fmt: skip


def connect(url: str, timeout_s: float, block_s: float = 0.0) -> Client:
    """Return a client for an address. Only a cluster is contacted now, other servers by the first command.

    ``timeout_s`` limits a connection and a reply. Commands may block in the server for ``block_s``. Raises ValueError for an
    invalid address (one line, without the password); redis.RedisError, OSError, RedisClusterException: no cluster answers.
    """
    scheme = url.partition("://")[0]
    if scheme not in ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"):
        raise ValueError(
            "redis_url: unknown scheme; use redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// "
            "(rediss+sentinel://, rediss+cluster:// for TLS)"
        )
    try:
        parts = urlsplit(url)
        arguments = _arguments(parts)
        arguments |= {
            "socket_timeout": timeout_s + block_s, "socket_connect_timeout": timeout_s, "protocol": 2, "decode_responses": False,
        }  # fmt: skip
        if scheme.endswith("+sentinel"):
            return _sentinel(parts, arguments)
        if scheme.endswith("+cluster"):
            return _cluster(parts, arguments)
        return _single(parts, arguments)
    except _AddressError as error:
        raise ValueError(f"redis_url ({scheme}://...): {error}") from None
    except (ValueError, TypeError):  # from URL parsers; their messages may contain a part of the password
        raise ValueError(
            f"redis_url ({scheme}://...): cannot be read; check the port, the database number and the arguments after '?', and "
            "percent-encode special characters of the password"
        ) from None


def with_password(url: str, password: str) -> str:
    """Return an address with this password, percent-encoded, if it has none; otherwise the address unchanged."""
    scheme, separator, rest = url.partition("://")
    ends = [at for at in map(rest.find, "/?") if at >= 0]
    end = min(ends, default=len(rest))
    user, _, hosts = rest[:end].rpartition("@")
    if not separator or not password or ":" in user:
        return url
    return f"{scheme}://{user}:{quote(password, safe='')}@{hosts}{rest[end:]}"


def holds_secret(url: str) -> bool:
    """Return whether an address contains a password, of its user or among its arguments."""
    hosts, _, arguments = url.partition("://")[2].partition("?")
    user, at, _ = hosts.rpartition("@")
    return bool(at and ":" in user) or "password" in arguments


class _AddressError(Exception):
    """Error in an address; the message has no secrets."""


def _arguments(parts: SplitResult) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(_parse_url(f"redis://?{parts.query}"))
    for name in _OURS:
        if name in arguments:
            raise _AddressError(f"{name} cannot be set in the address; times are cache.timeout_s")
    user, at, _ = parts.netloc.rpartition("@")
    if at:
        name, _, password = user.partition(":")
        arguments |= {"username": unquote(name)} if name else {}
        arguments |= {"password": unquote(password)} if password else {}
    if "@" in parts.path and parts.scheme != "unix":
        raise _AddressError("percent-encode special characters of the password (/ is %2F, @ is %40)")
    return arguments


def _database(path: str) -> dict[str, int]:
    if not path:
        return {}
    if not path.isdecimal():
        raise _AddressError("the database after the host must be a number, such as /0")
    return {"db": int(path)}


def _hosts(parts: SplitResult, port: int) -> list[tuple[str, int]]:
    found = []
    for host in parts.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{host}")
        if not one.hostname:
            raise _AddressError("name at least one host: HOST[:PORT],HOST[:PORT]")
        found.append((one.hostname, one.port or port))
    return found


def _no_retry(retries: int = 0) -> Retry:
    # Not redis-py's own retries: they would multiply the timeout that callers expect.
    return Retry(NoBackoff(), retries)


def _single(parts: SplitResult, arguments: dict[str, Any]) -> redis.Redis:
    kinds = {"redis": redis.Connection, "rediss": redis.SSLConnection, "unix": redis.UnixDomainSocketConnection}
    if parts.scheme == "unix":
        if parts.path in ("", "/"):
            raise _AddressError("name the socket: unix:///PATH")
        arguments["path"] = unquote(parts.path)
        arguments.pop("socket_connect_timeout")  # redis-py before 5.3 does not accept it for sockets
    else:
        host, port = _hosts(parts, _REDIS_PORT)[0]
        arguments |= {"host": host, "port": port, **_database(parts.path.strip("/"))}
        if "," in parts.netloc.rpartition("@")[2]:
            raise _AddressError("several hosts need redis+sentinel:// or redis+cluster://")
    pool = redis.ConnectionPool(connection_class=kinds[parts.scheme], retry=_no_retry(), **arguments)
    _check(kinds[parts.scheme], arguments)
    return redis.Redis.from_pool(pool)  # closes the pool with the client


def _sentinel(parts: SplitResult, arguments: dict[str, Any]) -> redis.Redis:
    name, _, database = parts.path.strip("/").partition("/")
    if not name:
        raise _AddressError("name the master: redis+sentinel://HOST[:PORT]/NAME")
    sentinel_user = {key: arguments.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in arguments}
    arguments |= _database(database)
    tls = parts.scheme.startswith("rediss")
    _check(redis.SSLConnection if tls else redis.Connection, arguments)
    if tls:
        arguments["ssl"] = True
    secured = {key: value for key, value in arguments.items() if key.startswith("ssl")}
    times = {key: value for key, value in arguments.items() if key.startswith("socket_")}
    sentinels = _make_sentinel(
        _hosts(parts, _SENTINEL_PORT), sentinel_kwargs={**times, **secured, **sentinel_user, "retry": _no_retry()},
        retry=_no_retry(), **arguments,
    )  # fmt: skip
    master: redis.Redis = sentinels.master_for(name)
    return master


def _cluster(parts: SplitResult, arguments: dict[str, Any]) -> RedisCluster:
    if parts.path.strip("/") or "db" in arguments:
        raise _AddressError("a cluster has only one database: remove the path")
    tls = parts.scheme.startswith("rediss")
    _check(redis.SSLConnection if tls else redis.Connection, arguments)
    if tls:
        arguments["ssl"] = True
    nodes = [_make_node(host, port) for host, port in _hosts(parts, _REDIS_PORT)]
    # One retry, which a cluster needs to follow a moved slot.
    return RedisCluster(startup_nodes=nodes, retry=_no_retry(1), **arguments)


def _check(kind: type[redis.Connection], arguments: dict[str, Any]) -> None:
    """Check arguments by creating an unused connection: redis-py validates them only there."""
    pool_only = ("max_connections",)
    try:
        kind(**{key: value for key, value in arguments.items() if key not in pool_only})
    except (TypeError, redis.RedisError):
        raise _AddressError("an argument after '?' that redis-py does not know, or a value it does not take") from None
