"""How a forward goes through a request's rows in layers that keep a state: which state each row begins from.

A row's state is that of its parent, advanced by one step. So a head walks the rows of a request one after another, wherever a
text is cut: over committed rows in the slot itself, then down the tree, depth first, with a copy of the state for each branch
that is still to be gone down. A chunk form would read the weights of many rows at once, and would add up in an order that follows
the cut. What a row is given depends on the tokens before it alone, to the last bit.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from decoding.jit import compiled

ADVANCE, COMPUTE, SAVE = 0, 1, 2  # kinds of steps: over a kept row, over a row of the batch, to another place


class NativeWalk(ctypes.Structure):
    """What is done with the state of one slot. Addresses are those of the first element."""

    _fields_ = (
        ("slot", ctypes.c_int64),
        ("fresh", ctypes.c_int64),  # whether it begins from zeros
        ("offset", ctypes.c_int64),  # first row in the batch
        ("rows", ctypes.c_int64),
        ("steps", ctypes.c_int64),  # [num_steps, 4] int64: kind, row or place, buffer from which, buffer to which; -1: to none
        ("num_steps", ctypes.c_int64),
        ("buffers", ctypes.c_int64),  # the slot's own, number 0, counts
        ("taps", ctypes.c_int64),  # [rows, most_taps] int64: the rows before each, the nearest first; see ``_column``
        ("most_taps", ctypes.c_int64),
        ("windows", ctypes.c_int64),  # [num_windows, 1 + most_taps] int64: a place, and what its window will hold, as ``taps``
        ("num_windows", ctypes.c_int64),
        ("keep_first", ctypes.c_int64),  # of the rows whose inputs are kept
        ("keep_count", ctypes.c_int64),
    )


WALK = np.dtype(NativeWalk)


@compiled
def walk_steps(parents: Any, spine: int, path: Any, saves: Any, steps: Any) -> tuple[int, int]:
    """Fills the steps of a walk: over kept rows, over the spine, and down the tree.

    A branch that is the last one below its row takes over the state of that row; a row without branches leaves none behind.

    Args:
        parents: [n] int32 of the tree's rows, parents first; -1: below the spine.
        spine: rows before the tree.
        path: [m] int64, kept rows to begin with.
        saves: [s, 2] int64: after how many rows of the spine the state is copied, and to which place; in order.
        steps: [m + spine + s + n, 4] int64.

    Returns:
        The number of steps and of buffers.
    """
    count = 0
    for row in path:
        steps[count] = (ADVANCE, row, 0, 0)
        count += 1
    save = 0
    for row in range(spine):
        steps[count] = (COMPUTE, row, 0, 0)
        count += 1
        while save < len(saves) and saves[save, 0] == row + 1:
            steps[count] = (SAVE, saves[save, 1], 0, 0)
            count, save = count + 1, save + 1
    nodes = len(parents)
    below, waiting = np.zeros(nodes, np.int64), np.empty(nodes, np.int64)
    for node in range(nodes):
        if parents[node] >= 0:
            below[parents[node]] += 1
    left, held, free = below.copy(), np.zeros(nodes, np.int64), np.empty(nodes + 1, np.int64)
    # The rows below each, linked.
    first, following = np.full(nodes, -1, np.int64), np.full(nodes, -1, np.int64)
    num_waiting = num_free = 0
    for node in range(nodes - 1, -1, -1):
        parent = parents[node]
        if parent < 0:
            waiting[num_waiting] = node
            num_waiting += 1
        else:
            following[node], first[parent] = first[parent], node
    buffers = 1
    while num_waiting:
        num_waiting -= 1
        node = waiting[num_waiting]
        parent = parents[node]
        source, last = 0, False
        if parent >= 0:
            left[parent] -= 1
            source, last = held[parent], left[parent] == 0
        target = -1
        if below[node]:
            if last:
                target = source
            elif num_free:
                num_free -= 1
                target = free[num_free]
            else:
                target = buffers
                buffers += 1
            held[node] = target
        elif last:
            free[num_free] = source
            num_free += 1
        steps[count] = (COMPUTE, spine + node, source, target)
        count += 1
        begin, child = num_waiting, first[node]
        while child >= 0:
            waiting[num_waiting] = child
            num_waiting, child = num_waiting + 1, following[child]
        waiting[begin:num_waiting] = waiting[begin:num_waiting][::-1].copy()
    return count, buffers


@compiled
def walk_taps(parents: Any, spine: int, path: Any, taps: Any, saves: Any, windows: Any) -> None:
    """Fills the rows before each row, and what the windows of the slot and of other places will hold.

    Codes: a row of the request in this forward, or below 0: -1 and what ``_column`` says.

    Args:
        parents: as in ``walk_steps``; so are ``spine``, ``path`` and ``saves``.
        taps: [rows, k] int64 to be filled, the nearest row first.
        windows: [s + 1, 1 + k] int64 to be filled but for the last place, which is set.
    """
    rows, reach = taps.shape
    for row in range(rows):
        before = row - 1
        if row >= spine:
            parent = parents[row - spine]
            before = spine - 1 if parent < 0 else spine + parent
        if reach:
            taps[row, 0] = before if before >= 0 else _past(0, path, reach)
            for tap in range(1, reach):
                taps[row, tap] = taps[before, tap - 1] if before >= 0 else _past(tap, path, reach)
    for at in range(len(windows)):
        end = spine
        if at < len(saves):
            end = saves[at, 0]
            windows[at, 0] = saves[at, 1]
        for tap in range(reach):
            row = end - 1 - tap
            windows[at, 1 + tap] = row if row >= 0 else _past(-1 - row, path, reach)


@compiled
def _past(back: int, path: Any, reach: int) -> int:
    """The code of what is so many rows before the last one that was committed before this forward."""
    if back < len(path):
        return -1 - (reach + path[len(path) - 1 - back])
    return -1 - (back - len(path))
