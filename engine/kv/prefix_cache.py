"""Prefix cache: the KV of live and ended requests in the slots, reused by a request that begins alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decoding.tree import Int32Array
from engine.kv.state_cache import StateCache

WORTH_COPYING = 16  # tokens: fewer are computed in the time that it takes to copy their entries, or nearly


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes, and what of it is there."""

    slot: int
    length: int  # its first tokens whose KV the slot holds, once it is copied
    source: int | None = None  # slot to copy from; None where nothing is copied
    start: int = 0  # entries that need no copying
    state: int = 0  # where the state behind them is, of a model whose layers have some: see ``StateCache``


class PrefixCache:
    """What the slots of one ``SlotCache`` hold.

    Entry i of a slot depends on the tokens up to i and on nothing else, so a request may take over, or copy, the entries of the
    longest prefix that it has in common with what a slot holds. Prefixes are found by comparing tokens: there are as many slots
    as requests in a step, and a comparison of some thousand tokens takes microseconds.

    What a slot holds belongs to a *scope*: a name for those who may reuse each other's entries. How long a request's first step
    takes tells whether its prompt was seen before, so nothing is reused across scopes, and of a request without one nothing is
    kept.

    Example: slot 0 holds 100 tokens of a live request, and slot 1, free, 8 tokens. A request of the same scope begins as both,
    for 60 tokens as slot 0 and for 8 as slot 1: it is placed in slot 1, where 52 entries are copied from slot 0, and 60 of its
    tokens count as computed. Were it 20 and 8 tokens, 12 entries would not be worth copying, and 8 would count.

    Of a model whose layers have states a prefix counts up to the last token behind which a state is at hand.
    """

    def __init__(self, slots: int) -> None:
        self._held: list[tuple[str, Int32Array] | None] = [None] * slots  # scope, and the tokens of the first entries
        self.states: StateCache | None = None  # of the same slots

    def keep(self, slot: int, scope: str | None, tokens: Int32Array) -> None:
        """Says that the first entries of a slot are those of some tokens, which nobody writes to any more."""
        self._held[slot] = None if scope is None else (scope, tokens)

    def cut(self, slot: int, length: int) -> None:
        """Says that the entries of a slot from ``length`` on are going to be overwritten."""
        held = self._held[slot]
        if held is not None and len(held[1]) > length:
            self._held[slot] = (held[0], held[1][:length]) if length else None
        if self.states is not None and not length:
            self.states.forget(slot)

    def clear(self) -> None:
        """Forgets what all slots hold."""
        self._held = [None] * len(self._held)
        if self.states is not None:
            self.states.clear()

    def tokens(self, slot: int) -> Int32Array:
        """[n] tokens of the first entries of a slot; empty where nothing is known of it."""
        held = self._held[slot]
        return np.zeros(0, np.int32) if held is None else held[1]

    def place(self, tokens: Int32Array, scope: str | None, free: Sequence[int]) -> Placement:
        """The slot for a request, which counts as its own from now on; the caller copies what is to be copied.

        A free slot at least half of which is the request's own prefix is taken in place: a conversation that goes on. Otherwise
        the slot that was released longest ago is overwritten, an empty one before all others, and what another slot, live or
        free, has more of the prefix is copied: a system prompt survives in the slot of the conversation that it began.

        Args:
            tokens: [n] of the request, at least one. The last one is always left to compute.
            scope: of the request; None reuses nothing.
            free: slots to choose from, at least one, the one that was released longest ago first.
        """
        common, states = ({}, {}) if scope is None else self._common(tokens[:-1], scope)
        slot = min(free, key=lambda one: self._held[one] is not None)  # of equals the first
        best = max(free, key=lambda one: common.get(one, 0))
        if common.get(best, 0) >= WORTH_COPYING and 2 * common[best] >= len(self.tokens(best)):
            slot = best
        length = start = common.get(slot, 0)
        source = max(common, key=lambda one: common[one], default=None)
        if source is not None and common[source] >= start + WORTH_COPYING:
            length = common[source]
        else:
            source = None
        self.keep(slot, scope, tokens[:length])
        state = 0 if self.states is None else states.get(slot if source is None else source, slot)
        return Placement(slot, length, source, start, state)

    def _common(self, tokens: Int32Array, scope: str) -> tuple[dict[int, int], dict[int, int]]:
        """Tokens that slots of a scope have in common with a sequence, and where the states behind them are, by slot; those with
        none are left out."""
        common, states = {}, {}
        for slot, held in enumerate(self._held):
            if held is None or held[0] != scope:
                continue
            length, state = common_prefix(held[1], tokens), slot
            if length and self.states is not None:
                length, state = self.states.usable(slot, scope, tokens, length)
            if length:
                common[slot], states[slot] = length, state
        return common, states

    def check_integrity(self, capacity: int) -> None:
        """Asserts that no slot is said to hold more entries than it has."""
        for slot, held in enumerate(self._held):
            assert held is None or len(held[1]) <= capacity, (slot, len(held[1]), capacity)


def common_prefix(one: Int32Array, other: Int32Array) -> int:
    """Tokens that two sequences have in common at their beginning."""
    length = min(len(one), len(other))
    if not length or one[0] != other[0]:
        return 0
    differ = one[:length] != other[:length]
    first = int(differ.argmax())
    return first if differ[first] else length
