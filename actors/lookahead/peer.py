"""Client of another replica of the node: whether it answers, whether it is busy, and the link over which it is led."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from outrider.actors.lookahead.link import LINK_ERRORS, Address, Link, connect
from outrider.actors.lookahead.messages import Heartbeat

logger = logging.getLogger(__name__)

# a replica that was stopped (SIGSTOP) finds all connections of that time when it continues
# backoff: a replica that was suspended finds all connections of that time when it continues
_REDIAL_S, _LONGEST_REDIAL_S = 0.5, 4.0


class Peer:
    """Listener to the beats of one replica's ``RankServer``, in a thread that reconnects when they end."""

    def __init__(self, address: Address, secret: bytes, timeout_s: float, changed: Callable[[], None]) -> None:
        """Start the thread. ``changed`` is called when the peer appears, disappears, becomes busy or becomes free.

        A peer without a sign of life for ``timeout_s`` counts as absent.
        """
        self.address, self._secret, self._timeout_s, self._changed = address, secret, timeout_s, changed
        self._busy: bool | None = None  # None: absent
        self._link: Link | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name=f"peer-{address[1]}", daemon=True)
        self._thread.start()

    @property
    def present(self) -> bool:
        """Return whether the peer sends signs of life."""
        return self._busy is not None

    @property
    def busy(self) -> bool:
        """Return whether the peer last reported own requests."""
        return self._busy is True

    def dial(self) -> Link:
        """Return a new link, over which the peer can be led. Raises one of ``LINK_ERRORS`` if it does not answer."""
        return connect(self.address, self._secret, self._timeout_s)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._over.set()
        if self._link is not None:
            self._link.end()

    def _listen(self) -> None:
        pause_s = _REDIAL_S
        while not self._over.is_set():
            try:
                self._link = self.dial()
                if not self._over.is_set():  # otherwise `close` was called before the link existed
                    self._hear(self._link)
            except LINK_ERRORS as error:
                if self.present and not self._over.is_set():
                    logger.warning("lost the replica at %s:%d: %s: %s", *self.address, type(error).__name__, error)
            finally:
                if self._link is not None:
                    self._link.close()
            pause_s = _REDIAL_S if self.present else min(2.0 * pause_s, _LONGEST_REDIAL_S)
            self._set(None)
            self._over.wait(pause_s)

    def _hear(self, link: Link) -> None:
        while (message := link.receive(self._timeout_s)) is not None:
            if isinstance(message, Heartbeat):
                self._set(message.busy)
        raise TimeoutError(f"nothing received for {self._timeout_s:g} s")

    def _set(self, busy: bool | None) -> None:
        if busy is not self._busy:
            self._busy = busy
            self._changed()


@dataclass(slots=True)
class Member:
    """Peer, and whether this replica leads it. Used by the supervisor's thread of ``ElasticGroup`` only."""

    peer: Peer
    number: int  # the executor's number for it; its first rank, if that was free
    link: Link | None = None  # set while this replica leads it
    leaving: bool = False  # removal requested; a step may still include it
    not_before_s: float = 0.0  # earliest time of the next attempt
