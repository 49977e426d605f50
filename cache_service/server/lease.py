"""Leader election with an expiring lease in Redis."""

from __future__ import annotations

import logging
import secrets
import time

from outrider.cache_service.store.redis_store import RedisStore

logger = logging.getLogger(__name__)


class LeaseLostError(Exception):
    """Error raised if another instance holds the lease."""


class Lease:
    """Lease from the view of one candidate. Use it from one thread, except for ``held``."""

    def __init__(self, store: RedisStore, name: str, lease_s: float) -> None:
        self._store, self._name, self._lease_s = store, name, lease_s
        self._holder = secrets.token_hex(16)
        self._until = 0.0  # monotonic seconds; 0 if another instance holds the lease
        self._renew_at = 0.0

    @property
    def held(self) -> bool:
        """Return whether this instance surely holds the lease, without asking Redis."""
        return time.monotonic() < self._until

    def acquire_or_renew(self, work_s: float = 0.0) -> None:
        """Acquire the lease, or extend it if a third of its time has passed or ``work_s`` seconds of work follow.

        Raises ``LeaseLostError`` if another instance holds it. If Redis fails, it stays valid until it expires.
        """
        now = time.monotonic()
        if now < self._renew_at and now + work_s < self._until:
            return
        lease_s = self._lease_s + work_s
        had, has = self._until > 0.0, self._store.acquire(self._name, self._holder, lease_s)
        if had != has:
            logger.info("cache service: %s", "acquired leader lease" if has else "lost leader lease to another instance")
        self._until = now + lease_s if has else 0.0
        self._renew_at = now + self._lease_s / 3
        if not has:
            raise LeaseLostError

    def doubt(self) -> None:
        """Make the next ``hold`` ask Redis."""
        self._renew_at = 0.0

    def release(self) -> None:
        """Release the lease, if held."""
        if self._until:
            self._store.release(self._name, self._holder)
        self._until = 0.0
