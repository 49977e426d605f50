"""Inputs of a fixed-shape forward pass: filled on the host, copied in one transfer and read at fixed device addresses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.decoding.arrays import BoolArray, Int32Array
from outrider.decoding.jit import compiled
from outrider.engine.accelerator import Event, accelerator
from outrider.engine.forward.batch import Batch, SequenceRows

_TURNS = 4  # copies in flight while the next one is filled


@dataclass(frozen=True, slots=True)
class StepRows:
    """Layout of R rows for the attention kernels; R is fixed, the number of used rows varies.

    A row sees the logical positions ``0 .. position``. Those before ``start`` are at the entry of the same number in the slot;
    position ``start + j`` is at entry ``path[row, j]``, and the last of these is the row's own: ancestors are in text order,
    wherever stored.
    """

    slot: torch.Tensor  # [R] int32
    start: torch.Tensor  # [R] int32: entries whose index is their position
    position: torch.Tensor  # [R] int32: of the row's own token; -1 for a padding row
    entry: torch.Tensor  # [R] int32: destination of the row's key and value; path[row, position - start]
    path: torch.Tensor  # [R, P] int32: the first position - start + 1 are used
    tiles: torch.Tensor  # [T, 2] int32: first row and number of rows of a tile, all of one slot and start; 0 rows: unused


@compiled
def fill_paths(mask: BoolArray, start: int, path: Int32Array) -> None:
    """Fill ``path``, [rows, P], with the entries behind ``start`` that each row sees by ``mask``, [rows, n], in order."""
    for row in range(len(mask)):
        count = 0
        for column in range(mask.shape[1]):
            if mask[row, column]:
                path[row, count] = start + column
                count += 1


def longest_path(batch: Batch) -> int:
    """Return the greatest number of entries behind its ``start`` that a row sees, its own included."""
    return max(
        int(batch.positions[one.offset : one.offset + one.rows].max()) - one.start + 1 for one in batch.segments
    )  # fmt: skip


def buffer_sizes(rows: int, rows_per_tile: int, segments: int, path: int) -> tuple[int, ...]:
    """Return the int32 counts of the inputs: ids, positions, slots, starts, entries, tiles and paths."""
    tiles = rows // rows_per_tile + min(segments, rows)
    return rows, rows, rows, rows, rows, 2 * tiles, rows * path


class StepBuffers:
    """Host and device buffers for token ids, positions and ``StepRows`` of R rows."""

    def __init__(self, rows: int, rows_per_tile: int, segments: int, path: int, device: torch.device) -> None:
        self.rows, self.path = rows, path
        self._per_tile = rows_per_tile
        sizes = buffer_sizes(rows, rows_per_tile, segments, path)
        self._cuts = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
        size = sum(sizes)
        on_gpu = device.type == "cuda"
        self._hosts = [accelerator().pinned(size) for _ in range(_TURNS)] if on_gpu else [torch.zeros(size, dtype=torch.int32)]
        self._copied: list[Event | None] = [None] * len(self._hosts)
        self._turn = 0
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        ids, position, slot, start, entry, tiles, paths = (self._device[first:last] for first, last in self._cuts)
        position.fill_(-1)
        self.ids = ids  # [R] int32
        self.step_rows = StepRows(slot, start, position, entry, paths.view(rows, path), tiles.view(-1, 2))

    def fill(self, batch: Batch) -> None:
        """Copy a batch of at most R rows and paths of at most P entries to the device, in the current stream."""
        count = len(batch.token_ids)
        assert count <= self.rows and longest_path(batch) <= self.path, (count, self.rows, longest_path(batch), self.path)
        self._turn = (self._turn + 1) % len(self._hosts)
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        # The last copy from this buffer may still be in flight.
        if copied is not None:
            copied.synchronize()
        ids, position, slot, start, entry, tiles, paths = (host[first:last].numpy() for first, last in self._cuts)
        ids[:count], position[:count] = batch.token_ids, batch.positions
        ids[count:], position[count:] = 0, -1  # padding rows compute nothing
        paths = paths.reshape(self.rows, self.path)
        laid = 0
        for segment in batch.segments:
            rows = slice(segment.offset, segment.offset + segment.rows)
            slot[rows], start[rows] = segment.slot, segment.start
            entry[rows] = np.arange(segment.end - segment.rows, segment.end)
            _lay_path(segment, paths[rows])
            laid = self._lay_tiles(segment, tiles.reshape(-1, 2), laid)
        tiles[2 * laid :] = 0
        self._device.copy_(host, non_blocking=True)
        if self._device.device.type == "cuda":
            self._copied[self._turn] = accelerator().current_stream(self._device.device).record_event()

    def _lay_tiles(self, segment: SequenceRows, tiles: Int32Array, laid: int) -> int:
        for first in range(segment.offset, segment.offset + segment.rows, self._per_tile):
            tiles[laid] = first, min(self._per_tile, segment.offset + segment.rows - first)
            laid += 1
        return laid


def _lay_path(segment: SequenceRows, paths: npt.NDArray[np.int32]) -> None:
    if segment.mask is None:
        paths[:] = segment.start + np.arange(paths.shape[1])  # plain causality; entries behind the row's own are not read
    else:
        fill_paths(segment.mask, segment.start, paths)
