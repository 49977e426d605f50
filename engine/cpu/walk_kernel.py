"""Order in which a forward pass visits a request's rows in recurrent layers, and the state that each row begins from.

A row's state is its parent's, advanced by one step: its result depends bit for bit on its preceding tokens alone.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from outrider.decoding.jit import compiled

ADVANCE, COMPUTE, SAVE = 0, 1, 2  # kinds of steps: over a kept row, over a batch row, copy to another place


class NativeWalk(ctypes.Structure):
    """Visits to the state of one slot; addresses are of the first element."""

    _fields_ = (
        ("slot", ctypes.c_int64),
        ("fresh", ctypes.c_int64),  # whether the state begins with zeros
        ("offset", ctypes.c_int64),  # first row in the batch
        ("rows", ctypes.c_int64),
        ("steps", ctypes.c_int64),  # [num_steps, 4] int64: kind, row or place, source buffer, target buffer (-1: none)
        ("num_steps", ctypes.c_int64),
        ("buffers", ctypes.c_int64),  # number of buffers, including the slot's own, number 0
        ("taps", ctypes.c_int64),  # [rows, most_taps] int64: the rows before each, nearest first; see ``_column``
        ("most_taps", ctypes.c_int64),
        ("windows", ctypes.c_int64),  # [num_windows, 1 + most_taps] int64: a place, and its new window as in ``taps``
        ("num_windows", ctypes.c_int64),
        ("keep_first", ctypes.c_int64),  # first row whose inputs are kept
        ("keep_count", ctypes.c_int64),
    )


WALK = np.dtype(NativeWalk)


@compiled
def walk_steps(parents: Any, spine: int, path: Any, saves: Any, steps: Any) -> tuple[int, int]:
    """Fill the steps over kept rows, spine (committed rows) and tree; return the numbers of steps and of buffers.

    Args:
        parents: [n] int32 of the tree's rows, parents first; -1: below the spine.
        spine: number of committed rows before the tree.
        path: [m] int64, kept rows to begin with.
        saves: [s, 2] int64 in order: number of spine rows after which the state is copied, and destination place.
        steps: [m + spine + s + n, 4] int64.
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
    # The draft tree follows the committed rows, depth first, with a copy of the state for each pending branch.
    nodes = len(parents)
    below, waiting = np.zeros(nodes, np.int64), np.empty(nodes, np.int64)
    for node in range(nodes):
        if parents[node] >= 0:
            below[parents[node]] += 1
    left, held, free = below.copy(), np.zeros(nodes, np.int64), np.empty(nodes + 1, np.int64)
    # Children of each row as linked lists.
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
        # The last branch below a row reuses that row's buffer; a leaf stores no state.
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
        # Children are popped from the end: reversed, so that the first one comes first.
        waiting[begin:num_waiting] = waiting[begin:num_waiting][::-1].copy()
    return count, buffers


@compiled
def walk_taps(parents: Any, spine: int, path: Any, taps: Any, saves: Any, windows: Any) -> None:
    """Fill the rows before each row, and the new windows of the slot and of other places.

    Args:
        parents: see ``walk_steps``; also for ``spine``, ``path`` and ``saves``.
        taps: [rows, k] int64 output, nearest first: a row of this forward pass, or a negative code of ``_column``.
        windows: [s + 1, 1 + k] int64 output; the last place is already set.
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
    """Return the code of the row ``back`` rows before the last one committed before this forward pass."""
    if back < len(path):
        return -1 - (reach + path[len(path) - 1 - back])
    return -1 - (back - len(path))
