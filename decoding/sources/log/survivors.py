"""Frequent n-grams of a block that leaves the log: reading them and writing them again."""

from __future__ import annotations

from outrider.decoding.jit import compiled
from outrider.decoding.sources.log.chains import BLOCK, PlainArrays, UInt8Array, append
from outrider.decoding.tree import Int32Array


@compiled
def surviving_tokens(
    tokens: Int32Array, counts: UInt8Array, oldest: int, start: int, out: Int32Array, out_counts: UInt8Array
) -> int:
    """Collect the runs of a leaving block that were seen more than once, each closed by -1; return the used entries.

    Args:
        oldest: first position still in the log.
        start: first position of the block.
        out: [m] out: tokens; the excess is dropped.
        out_counts: [m] out: half the count of the 4-gram that ends at each token, at least 1.
    """
    mask = len(tokens) - 1
    used, written = 0, start - 1  # positions up to ``written`` are in ``out``
    for p in range(start, start + BLOCK):
        if counts[p & mask] < 2 or tokens[p & mask] < 0:
            continue
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
