"""Implicit trie of past texts: a log of tokens with chains of n-gram occurrences.

Each text is stored once. The branches below an n-gram are the continuations of its occurrences, and the frequency of a node is
the number of occurrences through it. A retrieval reads a bounded number of the latest occurrences.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.decoding.arrays import Int32Array, Int64Array, UInt8Array
from outrider.decoding.jit import compiled
from outrider.decoding.sources.log.chains import BLOCK, COPIED, MOVED, WAYS, Log, LogArrays, PlainArrays, append

OVERLAP = 20  # last tokens of a text that are copied when it continues in a distant block
_CONTEXT = 4  # of these, tokens that only serve backward matching
_RESCUED = -2  # owner number of surviving runs
# A small log is copied when it doubles. From ``LARGE`` positions on, virtual memory is reserved for the full capacity, so that no
# step copies all of it. Buckets grow with the tokens by linear hashing: each block splits a few.
LARGE = 1 << 16  # positions; a copy of fewer takes a millisecond or two
_NOTHING = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Text:
    """Text that may grow: its owner number, the position of its next token, and the end of its block."""

    number: int
    position: int = 0
    block_end: int = 0


class TokenLog:
    """Ring of token sequences with chains of the occurrences of their 1-, 2- and 4-grams.

    It starts with room for ``initial`` tokens and doubles up to ``capacity``, both rounded up to a power of two, at 33 to 49
    bytes per token. ``arrays``, ``plain`` and the size of the ring change when it grows. Positions never change.

    Raises:
        ValueError: an argument is below 1.
    """

    def __init__(self, capacity: int, initial: int = 1 << 14) -> None:
        for name, value in (("capacity", capacity), ("initial", initial)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1 token, got {value}")
        self._capacity = _round_up(capacity)
        self._initial = min(_round_up(initial), self._capacity)
        self._next_number = 0
        self.clear()

    def clear(self) -> None:
        """Remove all texts and shrink to the initial size; owner numbers are not reused."""
        self._memory, self._split = memory_for(self._initial), self._initial
        self._use(empty_log(self._memory, self._initial))
        self.end = 0  # first position behind all blocks
        self._open: dict[Hashable, _Text] = {}
        self._rescued = _Text(_RESCUED)

    def _use(self, arrays: LogArrays) -> None:
        self.arrays = arrays
        # A plain tuple is passed to compiled code in half the time.
        self.plain = arrays[:]

    @property
    def oldest(self) -> int:
        """Return the first position still in the log."""
        return max(0, self.end - len(self.arrays.tokens))

    def without(self, owner: int) -> Log:
        """Return the log for reading, skipping the text with owner number ``owner`` (-1: none)."""
        return self.plain, self.oldest if self.end else -1, owner

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def num_tokens(self) -> int:
        """Return the number of stored tokens, including surviving runs."""
        return int(np.count_nonzero((self.arrays.tokens >= 0) & (self.arrays.back[:, 0] != COPIED)))

    def extend(self, text: Hashable, new: Sequence[int] | Int32Array) -> int:
        """Append non-negative tokens to a text, opening it if necessary; return its owner number, -1 for no tokens."""
        if not len(new):
            return -1
        entry = self._open.get(text)
        if entry is None:
            entry = self._open[text] = _Text(self._next_number)
            self._next_number += 1
        self._write(entry, np.asarray(new, np.int32))
        return entry.number

    def close(self, text: Hashable) -> None:
        """Mark a text as complete; do nothing if it is not open."""
        self._open.pop(text, None)

    def add(self, tokens: Sequence[int] | Int32Array) -> None:
        """Add a complete text."""
        if len(tokens):
            self._write(_Text(self._next_number), np.asarray(tokens, np.int32))
            self._next_number += 1

    def number(self, text: Hashable) -> int:
        """Return the owner number of an open text; -1 for any other."""
        entry = self._open.get(text)
        return -1 if entry is None else entry.number

    def tokens_of(self, number: int) -> Int32Array:
        """Return the stored tokens of a text, in order."""
        arrays, size = self.arrays, len(self.arrays.tokens)
        blocks = np.flatnonzero(arrays.owners == number)
        blocks = blocks[np.argsort((blocks * BLOCK - self.oldest) % size)]
        tokens = arrays.tokens.reshape(-1, BLOCK)[blocks]
        there: Int32Array = tokens[(tokens >= 0) & (arrays.back[:, 0].reshape(-1, BLOCK)[blocks] != COPIED)]
        return there

    def remove(self, number: int, rescued: bool) -> None:
        """Close the text with an owner number and remove its tokens, if any; with ``rescued`` also all surviving runs."""
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
            if entry.position == entry.block_end or entry.position < oldest:  # full, or evicted while the text paused
                self._grow(entry, size - at)
                oldest = self.oldest
            part = new[at : at + entry.block_end - entry.position]
            append(self.plain, oldest, entry.position, part, 1)
            entry.position += len(part)
            at += len(part)

    def _grow(self, entry: _Text, wanted: int) -> None:
        """Allocate blocks for ``wanted`` tokens, next to the text's last block if that space is free."""
        neighbour = entry.block_end == self.end and entry.position > 0
        tail = self._tail(entry.position) if not neighbour else _NOTHING
        head = 0 if neighbour else 1 + len(tail)  # an empty slot before a run ends backward matching
        blocks = max(-(-(wanted + head) // BLOCK), 2 if len(tail) else 1)  # a moved text gets space for further growth
        self._make_room(self.end + blocks * BLOCK)
        blocks = min(blocks, len(self.arrays.owners) // 2)  # a text longer than the ring is written in parts
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
        # In the old block the tail is no longer searchable, only readable as a continuation.
        tokens[there & mask] = MOVED - moved[len(moved) - len(there) :]
        self.arrays.counts[there & mask] = 0
        append(self.plain, self.oldest, start + 1 + len(context), moved, 1)

    def _make_room(self, end: int) -> None:
        """Double the ring until it holds all positions before ``end`` or reaches its capacity; add buckets for twice as many."""
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
        """Return up to ``OVERLAP`` tokens that precede a position in its run, as far as they are still stored."""
        positions = np.arange(max(end - OVERLAP, self.oldest), end)
        tail: Int32Array = self.arrays.tokens[positions & (len(self.arrays.tokens) - 1)]
        breaks = np.flatnonzero(tail < 0)
        return tail[breaks[-1] + 1 :] if len(breaks) else tail

    def _take(self, blocks: int, number: int) -> int:
        """Clear the next blocks of the ring, assign them to an owner, and write their frequent n-grams again behind them."""
        size = len(self.arrays.tokens)
        rescued: list[tuple[Int32Array, UInt8Array]] = []
        start = self.end
        for block in range(start // BLOCK, start // BLOCK + blocks):
            leaving = block * BLOCK - size
            # When the oldest block leaves, its frequent n-grams survive with half their count, similar to the published pruning
            # (Lookahead, arXiv 2312.12728, section 4.2). A block that is taken for survivors saves none: the recursion ends.
            if leaving >= 0 and number >= 0:
                out, counts = np.empty(BLOCK // 2, np.int32), np.empty(BLOCK // 2, np.uint8)
                used = surviving_tokens(self.arrays.tokens, self.arrays.counts, leaving, leaving, out, counts)
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
        """Write surviving runs, separated by -1, into blocks for survivors."""
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


def compile_log() -> None:
    """Compile the functions of the log before the first request."""
    TokenLog(1).add([0] * (4 * BLOCK))  # exceeds the capacity, so that eviction and survivors are compiled too


def _round_up(tokens: int) -> int:
    return max(2 * BLOCK, 1 << (tokens - 1).bit_length())


@compiled
def surviving_tokens(
    tokens: Int32Array, counts: UInt8Array, oldest: int, start: int, out: Int32Array, out_counts: UInt8Array
) -> int:
    """Collect the runs of a leaving block that were seen more than once, each closed by -1; return the used entries."""
    mask = len(tokens) - 1
    used, written = 0, start - 1  # positions up to ``written`` are in ``out``
    for p in range(start, start + BLOCK):
        if counts[p & mask] < 2 or tokens[p & mask] < 0:
            continue
        # The 4-gram that ends here, and up to 16 tokens after it.
        first = p - 3
        if first <= written:
            first = written + 1
        elif used:
            out[used] = -1
            used += 1
        last = p + 16
        for q in range(first, last + 1):
            if used >= len(out) - 1:
                return used
            token = tokens[q & mask]
            if q < oldest or token < 0:
                if q >= p:
                    break
                continue
            out[used] = token
            # Half the count of the 4-gram that ends here, at least 1. Behind the block the count belongs to tokens that stay.
            carried = counts[q & mask] // 2 if q < start + BLOCK else 0
            out_counts[used] = max(1, carried)
            used += 1
            written = q
    return used


@compiled
def append_counted(log: PlainArrays, oldest: int, position: int, new: Int32Array, new_counts: UInt8Array) -> None:
    """Write runs of tokens from ``position`` on, each token with its own count; -1 leaves a slot empty."""
    for index in range(len(new)):
        if new[index] >= 0:
            append(log, oldest, position + index, new[index : index + 1], int(new_counts[index]))


def _buckets(size: int) -> tuple[int, int, int]:
    """Return the numbers of buckets for the 1-, 2- and 4-grams of a log of ``size`` positions."""
    return min(size, 2**17), max(64, size // 4), max(64, size // 2)


def memory_for(size: int) -> LogArrays:
    """Allocate memory for ``size`` positions, a power of two."""
    one, two, four = _buckets(size)
    return LogArrays(
        tokens=np.empty(size, np.int32),
        back=np.zeros((size, 3), np.int32),
        heads1=np.empty(one, np.int64),
        heads2=np.empty((two, WAYS), np.int64),
        heads4=np.empty((four, WAYS), np.int64),
        counts=np.zeros(size, np.uint8),
        owners=np.empty(size // BLOCK, np.int64),
    )


def _beginning(memory: LogArrays, size: int, one: int, two: int, four: int) -> LogArrays:
    """Return views of the first ``size`` positions and of the given numbers of buckets."""
    return LogArrays(
        tokens=memory.tokens[:size],
        back=memory.back[:size],
        heads1=memory.heads1[:one],
        heads2=memory.heads2[:two],
        heads4=memory.heads4[:four],
        counts=memory.counts[:size],
        owners=memory.owners[: size // BLOCK],
    )


def empty_log(memory: LogArrays, size: int) -> LogArrays:
    """Initialise an empty log of ``size`` positions, a power of two, at the beginning of ``memory``."""
    arrays = _beginning(memory, size, *_buckets(size))
    arrays.tokens.fill(-1)
    arrays.owners.fill(-1)
    for heads in arrays[2:5]:
        heads.fill(-1)
    return arrays


def copied(arrays: LogArrays, memory: LogArrays) -> LogArrays:
    """Copy a log to the beginning of larger memory."""
    copy = _beginning(memory, len(arrays.tokens), len(arrays.heads1), len(arrays.heads2), len(arrays.heads4))
    for name in LogArrays._fields:
        getattr(copy, name)[:] = getattr(arrays, name)
    return copy


def enlarged(arrays: LogArrays, memory: LogArrays, size: int, bucket_size: int) -> LogArrays:
    """Grow a log in place to ``size`` positions, with the buckets of ``bucket_size``; its ring must not have wrapped."""
    held, (one, two, four) = len(arrays.tokens), _buckets(bucket_size)
    if size > held:
        memory.tokens[held:size] = -1
        memory.owners[held // BLOCK : size // BLOCK] = -1
    _split(memory.heads1, len(arrays.heads1), one)
    _split(memory.heads2, len(arrays.heads2), two)
    _split(memory.heads4, len(arrays.heads4), four)
    return _beginning(memory, size, one, two, four)


def _split(heads: Int64Array, held: int, count: int) -> None:
    """Grow the buckets from ``held`` to ``count``, initialising each new bucket with the chain of the one it is split from."""
    while held < count:
        half = 1 << (held.bit_length() - 1)
        end = min(count, 2 * half)
        # See ``chains.place``: new tokens use the new buckets, and older tokens stay findable from both.
        heads[held:end] = heads[held - half : end - half]
        held = end
