"""Prefix cache: KV of live and ended requests in the slots, reused by requests with a common prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.decoding.arrays import Int32Array
from outrider.engine.kv.state_cache import StateCache

WORTH_COPYING = 16  # tokens; computing fewer is about as fast as copying their entries


@dataclass(frozen=True, slots=True)
class Placement:
    """Slot of a request, and the KV that it can reuse."""

    slot: int
    length: int  # number of its first tokens with KV in the slot, after copying
    source: int | None = None  # slot to copy from; None if nothing is copied
    start: int = 0  # first entry to copy
    state: int = 0  # place of the recurrent state behind them, see ``StateCache``


class PrefixCache:
    """Tokens whose KV the slots of one ``SlotCache`` hold.

    A request takes over, or copies, the entries of the longest common prefix within its *scope*, a name for the requests that may
    share KV, because the time of a first step reveals whether its prompt was cached.

    Example: slot 0 holds 100 tokens of a live request, and slot 1, free, 8 tokens. A request of the same scope begins as both,
    for 60 tokens as slot 0 and for 8 as slot 1: it is placed in slot 1, where 52 entries are copied from slot 0, and 60 of its
    tokens count as computed. Were it 20 and 8 tokens, 12 entries would not be worth copying, and 8 would count.
    """

    def __init__(self, slots: int) -> None:
        self._held: list[tuple[str, Int32Array] | None] = [None] * slots  # scope and tokens of the first entries
        self.states: StateCache | None = None  # recurrent states of the same slots

    def keep(self, slot: int, scope: str | None, tokens: Int32Array) -> None:
        """Record the tokens of the first entries of a slot, which are not written to any more."""
        # Nothing is kept of a request without a scope.
        self._held[slot] = None if scope is None else (scope, tokens)

    def cut(self, slot: int, length: int) -> None:
        """Record that the entries of a slot from ``length`` on will be overwritten."""
        held = self._held[slot]
        if held is not None and len(held[1]) > length:
            self._held[slot] = (held[0], held[1][:length]) if length else None
        if self.states is not None and not length:
            self.states.forget(slot)

    def clear(self) -> None:
        """Forget the contents of all slots."""
        self._held = [None] * len(self._held)
        if self.states is not None:
            self.states.clear()

    def tokens(self, slot: int) -> Int32Array:
        """Return the known tokens of the first entries of a slot, [n]."""
        held = self._held[slot]
        return np.zeros(0, np.int32) if held is None else held[1]

    def place(self, tokens: Int32Array, scope: str | None, free: Sequence[int]) -> Placement:
        """Choose one of the ``free`` slots (in order of release) for a request and record it; the caller copies the entries."""
        # The last token is always left to compute.
        common, states = ({}, {}) if scope is None else self._common(tokens[:-1], scope)
        # The slot released longest ago, empty ones first, is overwritten, unless a slot can be reused in place: then the common
        # prefix is at least half of its tokens.
        slot = min(free, key=lambda one: self._held[one] is not None)  # the first of equal ones
        best = max(free, key=lambda one: common.get(one, 0))
        if common.get(best, 0) >= WORTH_COPYING and 2 * common[best] >= len(self.tokens(best)):
            slot = best
        length = start = common.get(slot, 0)
        # A longer common prefix is copied from another slot.
        source = max(common, key=lambda one: common[one], default=None)
        if source is not None and common[source] >= start + WORTH_COPYING:
            length = common[source]
        else:
            source = None
        self.keep(slot, scope, tokens[:length])
        state = 0 if self.states is None else states.get(slot if source is None else source, slot)
        return Placement(slot, length, source, start, state)

    def _common(self, tokens: Int32Array, scope: str) -> tuple[dict[int, int], dict[int, int]]:
        """Return, by slot of a scope, the length of the common prefix and the place of its state; omit slots without one."""
        common, states = {}, {}
        for slot, held in enumerate(self._held):
            if held is None or held[0] != scope:
                continue
            # Comparing some thousand tokens takes microseconds, and there are few slots.
            length, state = common_prefix(held[1], tokens), slot
            if length and self.states is not None:
                # With recurrent states, a prefix ends at the last token with an available state.
                length, state = self.states.usable(slot, scope, tokens, length)
            if length:
                common[slot], states[slot] = length, state
        return common, states

    def check_integrity(self, capacity: int) -> None:
        """Assert that no slot is recorded with more tokens than it has entries."""
        for slot, held in enumerate(self._held):
            assert held is None or len(held[1]) <= capacity, (slot, len(held[1]), capacity)


def common_prefix(one: Int32Array, other: Int32Array) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(one), len(other))
    if not length or one[0] != other[0]:
        return 0
    differ = one[:length] != other[:length]
    first = int(differ.argmax())
    return first if differ[first] else length
