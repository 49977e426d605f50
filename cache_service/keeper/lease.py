"""Leader election by a lease in Redis that runs out unless its holder extends it."""

from __future__ import annotations

import logging
import secrets
import time

from cache_service.store.redis_store import RedisStore

logger = logging.getLogger(__name__)


class LeaseLostError(Exception):
    """Another one has the lease."""


class Lease:
    """A lease as one of those who want it sees it. For one thread, but for ``held``."""

    def __init__(self, store: RedisStore, name: str, lease_s: float) -> None:
        self._store, self._name, self._lease_s = store, name, lease_s
        self._holder = secrets.token_hex(16)
        self._until = 0.0  # monotonic seconds; 0 where another has it
        self._renew_at = 0.0

    @property
    def held(self) -> bool:
        """Whether it is ours for sure, without asking Redis."""
        return time.monotonic() < self._until

    def hold(self, work_s: float = 0.0) -> None:
        """Takes the lease, or extends it when a third of its time has passed or ``work_s`` asks for more.

        Args:
            work_s: seconds that may pass until the next call, beyond the usual.

        Raises:
            LeaseLostError: another one has it.
            redis.RedisError, OSError: nobody can say. It stays ours until Redis says otherwise.
        """
        now = time.monotonic()
        if now < self._renew_at and now + work_s < self._until:
            return
        lease_s = self._lease_s + work_s
        had, has = self._until > 0.0, self._store.acquire(self._name, self._holder, lease_s)
        if had != has:
            logger.info("cache service: %s", "takes office" if has else "leaves office, another one has the lease")
        self._until = now + lease_s if has else 0.0
        self._renew_at = now + self._lease_s / 3
        if not has:
            raise LeaseLostError

    def doubt(self) -> None:
        """The next ``hold`` asks Redis."""
        self._renew_at = 0.0

    def release(self) -> None:
        """Gives it back, if it is ours."""
        if self._until:
            self._store.release(self._name, self._holder)
        self._until = 0.0
