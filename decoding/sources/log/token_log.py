"""An implicit trie of past texts: a log of tokens and chains of where each n-gram occurred.

An explicit trie stores each text once per start, ``branch_length`` deep. The log stores it once; the branches below an n-gram are
what follows its occurrences, and the frequency of a node is the number of occurrences that go through it. Insertion is a few
writes a token, and a retrieval reads a bounded number of occurrences, the latest ones, whatever the log holds.

Texts live in blocks of 64 tokens in a ring, so that several can grow at once. When the ring is full the oldest block leaves;
what was frequent in it survives with half its frequency, as under the pruning of the published trie (Lookahead, arXiv 2312.12728,
section 4.2; there, nodes are halved and those at 1 or below are dropped).

A log starts small and doubles until it has its capacity, so that many can be kept of which few are full; no step pays for the
whole of a large one (``decoding.sources.log.arrays``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from decoding.sources.log.arrays import LARGE, copied, empty_log, enlarged, memory_for
from decoding.sources.log.chains import BLOCK, COPIED, MOVED, Log, LogArrays, UInt8Array, append
from decoding.sources.log.survivors import append_counted, survivors
from decoding.tree import Int32Array

OVERLAP = 20  # last tokens of a text that go with it to blocks elsewhere
_CONTEXT = 4  # of these are only there for matching backwards
_RESCUED = -2  # number of what survived
_NOTHING = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Text:
    """A text that may grow: its number, where its next token goes, and the end of its block."""

    number: int
    position: int = 0
    block_end: int = 0


class TokenLog:
    """Token sequences in a ring, with chains of the occurrences of their 1-, 2- and 4-grams.

    Memory: ``nbytes``, 33 to 49 bytes for each token of the ring as it is. ``arrays``, ``plain`` (the same; a plain tuple is
    passed to compiled code in half the time) and the ring's size change while it grows: read them anew at each use. Positions
    stay what they are.
    """

    def __init__(self, capacity: int, initial: int = 1 << 14) -> None:
        """
        Args:
            capacity: tokens to hold, at least one block; rounded up to a power of two.
            initial: tokens to have room for at the start; rounded likewise.

        Raises:
            ValueError: a capacity or a start below one token.
        """
        for name, value in (("capacity", capacity), ("initial", initial)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1 token, got {value}")
        self._capacity = _round_up(capacity)
        self._initial = min(_round_up(initial), self._capacity)
        self._next_number = 0
        self.clear()

    def clear(self) -> None:
        """Forgets everything, open texts too, and becomes as small as at the start. Numbers are not used again."""
        self._memory, self._split = memory_for(self._initial), self._initial
        self._use(empty_log(self._memory, self._initial))
        self.end = 0  # the first position behind all blocks
        self._open: dict[Hashable, _Text] = {}
        self._rescued = _Text(_RESCUED)

    def _use(self, arrays: LogArrays) -> None:
        self.arrays = arrays
        self.plain = arrays[:]

    @property
    def oldest(self) -> int:
        """The first position that is still there."""
        return max(0, self.end - len(self.arrays.tokens))

    def without(self, owner: int) -> Log:
        """As it is read by one who passes over the text of a number; -1 for none."""
        return self.plain, self.oldest if self.end else -1, owner

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def num_tokens(self) -> int:
        """Tokens of texts that are still there, and of runs that survived."""
        return int(np.count_nonzero((self.arrays.tokens >= 0) & (self.arrays.back[:, 0] != COPIED)))

    def extend(self, text: Hashable, new: Sequence[int] | Int32Array) -> int:
        """Appends tokens to a text, which is created when it is not open; returns its owner number, -1 for no tokens.

        What follows an n-gram can be drafted as soon as it is here. Negative tokens are not allowed.
        """
        if not len(new):
            return -1
        entry = self._open.get(text)
        if entry is None:
            entry = self._open[text] = _Text(self._next_number)
            self._next_number += 1
        self._write(entry, np.asarray(new, np.int32))
        return entry.number

    def close(self, text: Hashable) -> None:
        """Says that a text is complete. One that is not open is no error."""
        self._open.pop(text, None)

    def add(self, tokens: Sequence[int] | Int32Array) -> None:
        """A complete text."""
        if len(tokens):
            self._write(_Text(self._next_number), np.asarray(tokens, np.int32))
            self._next_number += 1

    def number(self, text: Hashable) -> int:
        """The owner number of an open text; -1 for another."""
        entry = self._open.get(text)
        return -1 if entry is None else entry.number

    def tokens_of(self, number: int) -> Int32Array:
        """The tokens of a text that are still there, in its order."""
        arrays, size = self.arrays, len(self.arrays.tokens)
        blocks = np.flatnonzero(arrays.owners == number)
        blocks = blocks[np.argsort((blocks * BLOCK - self.oldest) % size)]
        tokens = arrays.tokens.reshape(-1, BLOCK)[blocks]
        there: Int32Array = tokens[(tokens >= 0) & (arrays.back[:, 0].reshape(-1, BLOCK)[blocks] != COPIED)]
        return there

    def remove(self, number: int, rescued: bool) -> None:
        """Takes a text out: it is never found or followed again, and is not open any more.

        Args:
            number: of the text; one that has no blocks is no error.
            rescued: every run that survived the leaving of its block goes too, as it may be of that text.
        """
        arrays = self.arrays
        gone = arrays.owners == number
        if rescued:
            gone |= arrays.owners == _RESCUED
            self._rescued = _Text(_RESCUED)
        arrays.tokens.reshape(-1, BLOCK)[gone] = -1
        arrays.counts.reshape(-1, BLOCK)[gone] = 0
        arrays.owners[gone] = -1
        self._open = {text: entry for text, entry in self._open.items() if entry.number != number}

    def _write(self, entry: _Text, new: Int32Array) -> None:
        at, size = 0, len(new)
        while at < size:
            oldest = self.oldest
            if entry.position == entry.block_end or entry.position < oldest:  # full, or gone while it paused
                self._grow(entry, size - at)
                oldest = self.oldest
            part = new[at : at + entry.block_end - entry.position]
            append(self.plain, oldest, entry.position, part, 1)
            entry.position += len(part)
            at += len(part)

    def _grow(self, entry: _Text, wanted: int) -> None:
        """Takes as many blocks as ``wanted`` tokens need, beside the text's last one where that is free.

        Where it is not, the text's last tokens move to the new blocks: there they are found, in the old block they only follow.
        """
        neighbour = entry.block_end == self.end and entry.position > 0
        tail = self._tail(entry.position) if not neighbour else _NOTHING
        head = 0 if neighbour else 1 + len(tail)  # the first place of a run stays empty: matching backwards ends there
        blocks = max(-(-(wanted + head) // BLOCK), 2 if len(tail) else 1)  # a text that moves takes room to stay for a while
        self._make_room(self.end + blocks * BLOCK)
        blocks = min(blocks, len(self.arrays.owners) // 2)  # a text longer than the ring is written in parts, each of which fits
        start = self._take(blocks, entry.number)
        left, entry.position, entry.block_end = entry.position, start + head, start + blocks * BLOCK
        if not len(tail):
            return
        tokens, mask = self.arrays.tokens, len(self.arrays.tokens) - 1
        context, moved = tail[:_CONTEXT], tail[_CONTEXT:]
        begin = (start + 1) & mask
        tokens[begin : begin + len(context)] = context
        self.arrays.back[begin : begin + len(context), 0] = COPIED
        there = np.arange(max(left - len(moved), self.oldest), left)
        tokens[there & mask] = MOVED - moved[len(moved) - len(there) :]
        self.arrays.counts[there & mask] = 0
        append(self.plain, self.oldest, start + 1 + len(context), moved, 1)

    def _make_room(self, end: int) -> None:
        """Doubles the ring until it holds all positions before ``end``, or as many as it may, with buckets for twice as many."""
        size = len(self.arrays.tokens)
        while size < min(end, self._capacity):
            size *= 2
        if size > len(self._memory.tokens):
            memory = memory_for(size if size < LARGE else self._capacity)
            self.arrays, self._memory = copied(self.arrays, memory), memory
        split = min(max(2 * end, self._split), len(self._memory.tokens))
        if split > self._split or size > len(self.arrays.tokens):
            self._use(enlarged(self.arrays, self._memory, size, split))
            self._split = split

    def _tail(self, end: int) -> Int32Array:
        """Up to ``OVERLAP`` tokens that stand before a position in its run; none where they are gone."""
        positions = np.arange(max(end - OVERLAP, self.oldest), end)
        tail: Int32Array = self.arrays.tokens[positions & (len(self.arrays.tokens) - 1)]
        breaks = np.flatnonzero(tail < 0)
        return tail[breaks[-1] + 1 :] if len(breaks) else tail

    def _take(self, blocks: int, number: int) -> int:
        """Empties the next blocks of the ring; what was frequent in them is written again behind them."""
        size = len(self.arrays.tokens)
        rescued: list[tuple[Int32Array, UInt8Array]] = []
        start = self.end
        for block in range(start // BLOCK, start // BLOCK + blocks):
            leaving = block * BLOCK - size
            if leaving >= 0 and number >= 0:
                out, counts = np.empty(BLOCK // 2, np.int32), np.empty(BLOCK // 2, np.uint8)
                used = survivors(self.arrays.tokens, self.arrays.counts, leaving, leaving, out, counts)
                if used:
                    rescued.append((out[:used], counts[:used]))
            slot = (block * BLOCK) % size
            self.arrays.tokens[slot : slot + BLOCK] = -1
            self.arrays.counts[slot : slot + BLOCK] = 0
            self.arrays.owners[slot // BLOCK] = number
        self.end = start + blocks * BLOCK
        for out, counts in rescued:
            self._rescue(out, counts)
        return start

    def _rescue(self, tokens: Int32Array, counts: UInt8Array) -> None:
        """Writes surviving runs into blocks of their own; a -1 stands between runs."""
        entry, at = self._rescued, 0
        while at < len(tokens):
            if entry.position == entry.block_end or entry.position < self.oldest:
                entry.position = self._take(1, _RESCUED)
                entry.block_end = entry.position + BLOCK
                entry.position += 1
            room = entry.block_end - entry.position
            append_counted(self.plain, self.oldest, entry.position, tokens[at : at + room], counts[at : at + room])
            entry.position += min(room, len(tokens) - at)
            at += room
        entry.position = min(entry.position + 1, entry.block_end)


def _round_up(tokens: int) -> int:
    """The least size of a ring with room for so many tokens."""
    return max(2 * BLOCK, 1 << (tokens - 1).bit_length())


def compile_log() -> None:
    """Calls what is compiled at its first call, so that no request waits for it."""
    TokenLog(1).add([0] * (4 * BLOCK))  # more than it holds: the oldest block leaves, and what was frequent in it is kept
