"""The connections to Redis: made when they are needed, dropped when they answer nonsense, errors of two kinds only."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import redis
from redis.exceptions import RedisClusterException
from redis.sentinel import MasterNotFoundError

from cache_service.store.addresses import Client, connect

_P = ParamSpec("_P")
_R = TypeVar("_R")
_L = TypeVar("_L", bound="RedisLink")


def translated(method: Callable[Concatenate[_L, _P], _R]) -> Callable[Concatenate[_L, _P], _R]:
    """What the client library raises besides ``RedisError`` and ``OSError`` becomes one of them."""

    @functools.wraps(method)
    def wrapped(link: _L, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(link, *args, **kwargs)
        except RedisClusterException as error:  # not a RedisError: no node of a cluster answers
            raise redis.ConnectionError(f"cluster: {error}") from error
        except MasterNotFoundError as error:  # its words are the settings of each connection, for pages
            raise redis.ConnectionError("no sentinel answers, or none knows a master of that name") from error
        except redis.InvalidResponse:
            link._drop_connections()
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # an answer that redis-py or we cannot read
            link._drop_connections()
            raise redis.InvalidResponse(f"not the answer of a Redis: {type(error).__name__}") from error

    return wrapped


class RedisLink:
    """What sends commands to one Redis, for the keys of one prefix. Safe to use from several threads."""

    def __init__(self, url: str, prefix: str, timeout_s: float) -> None:
        """Reads the address; nothing is sent yet.

        Args:
            url: see ``cache_service/store/addresses.py``.
            prefix: of all keys.
            timeout_s: of one operation, in seconds.

        Raises:
            ValueError: an address that cannot be.
        """
        if not prefix or "{" in prefix or "}" in prefix:
            raise ValueError(f"cache.prefix: {prefix!r} must not be empty or hold braces")
        self._url, self._timeout_s = url, timeout_s
        self._tag = f"{{{prefix}}}"
        self._lock = threading.Lock()
        self._closed = False
        self._clients: dict[float, Client] = {}  # by how long they may block
        if "+cluster:" not in url.partition("//")[0]:
            self._client()  # a bad address is an error now; a cluster is asked first when it is needed

    @translated
    def ping(self) -> None:
        """Returns if Redis answers."""
        if self._run("EVAL", "return 1", 0) != 1:
            raise redis.InvalidResponse("not the answer of a Redis")

    def close(self) -> None:
        """Closes all connections for good; what another thread is waiting for ends with ``redis.ConnectionError``."""
        with self._lock:
            self._closed = True
        self._drop_connections()

    def _client(self, block_s: float = 0.0) -> Client:
        with self._lock:
            if self._closed:
                raise redis.ConnectionError("this store is closed")
            if block_s not in self._clients:
                self._clients[block_s] = connect(self._url, self._timeout_s, block_s)
            return self._clients[block_s]

    def _run(self, *words: Any, block_s: float = 0.0) -> Any:
        client: Any = self._client(block_s)
        return client.execute_command(*words)

    def _drop_connections(self) -> None:
        """Nonsense may go on after the part that was read: the next command gets a connection of its own."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _key(self, namespace: str, kind: str) -> str:
        return f"{self._tag}:{namespace}:{kind}"

    def _keys(self, namespace: str, *kinds: str) -> list[str]:
        return [self._key(namespace, kind) for kind in kinds]


def answers_of(pipe: Any) -> list[Any]:
    """The answers of a pipeline. The first error is raised as it is: redis-py would add the command, tokens and all, to it."""
    answers = pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return list(answers)
