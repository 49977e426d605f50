"""Client of another replica of the node: whether it answers, whether it has requests of its own, and who leads it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from actors.lookahead.link import LINK_ERRORS, Address, Link, connect
from actors.lookahead.messages import Beat

logger = logging.getLogger(__name__)

_REDIAL_S, _LONGEST_REDIAL_S = 0.5, 4.0  # a replica that is stopped finds the connections of all that time when it goes on


class Peer:
    """Listens to the beats of one replica's ``RankServer``, in a thread of its own, and connects again when they end."""

    def __init__(self, address: Address, secret: bytes, timeout_s: float, changed: Callable[[], None]) -> None:
        """
        Args:
            address: of its ``RankServer``.
            secret: shared by the replicas.
            timeout_s: a peer that gives no sign for so long is not there.
            changed: called when it comes, goes, is busy or is free.
        """
        self.address, self._secret, self._timeout_s, self._changed = address, secret, timeout_s, changed
        self._busy: bool | None = None  # None: it is not there
        self._link: Link | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name=f"peer-{address[1]}", daemon=True)
        self._thread.start()

    @property
    def present(self) -> bool:
        """Whether it gives signs of life."""
        return self._busy is not None

    @property
    def busy(self) -> bool:
        """Whether it has requests of its own, as far as it has said."""
        return self._busy is True

    def dial(self) -> Link:
        """A connection over which it may be led; raises one of ``LINK_ERRORS`` when it does not answer."""
        return connect(self.address, self._secret, self._timeout_s)

    def close(self) -> None:
        """Listens no longer. Harmless when repeated."""
        self._over.set()
        if self._link is not None:
            self._link.end()

    def _listen(self) -> None:
        pause_s = _REDIAL_S
        while not self._over.is_set():
            try:
                self._link = self.dial()
                if not self._over.is_set():  # else closed before there was something to close
                    self._hear(self._link)
            except LINK_ERRORS as error:
                if self.present and not self._over.is_set():
                    logger.warning("the replica at %s:%d is gone: %s: %s", *self.address, type(error).__name__, error)
            finally:
                if self._link is not None:
                    self._link.close()
            pause_s = _REDIAL_S if self.present else min(2.0 * pause_s, _LONGEST_REDIAL_S)
            self._set(None)
            self._over.wait(pause_s)

    def _hear(self, link: Link) -> None:
        while (message := link.receive(self._timeout_s)) is not None:
            if isinstance(message, Beat):
                self._set(message.busy)
        raise TimeoutError(f"no sign of life for {self._timeout_s:g} s")

    def _set(self, busy: bool | None) -> None:
        if busy is not self._busy:
            self._busy = busy
            self._changed()


@dataclass(slots=True)
class Member:
    """A peer, and whether this replica leads it. Touched by the supervisor's thread of ``Elastic`` only."""

    peer: Peer
    number: int  # the executor's; the rank that it had at first, where that was free
    link: Link | None = None  # over which it is led
    leaving: bool = False  # it was told to go, and may be in a step still
    not_before_s: float = 0.0  # when it may be asked again
