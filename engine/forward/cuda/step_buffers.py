"""The inputs of a forward of a fixed shape: filled on the host, copied to the device at once, read there at fixed addresses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from decoding.jit import compiled
from decoding.tree import BoolArray, Int32Array
from engine.accelerator import Event, accelerator
from engine.forward.batch import Batch, Segment

_TURNS = 4  # copies that may be on their way while the next is filled


@dataclass(frozen=True, slots=True)
class StepRows:
    """R rows, some of which compute nothing: R stays the same from step to step, how many are used does not.

    A row sees the tokens at the logical positions ``0 .. position`` of its sequence. Those before ``start`` lie at the entry of
    the same number in the slot; that at ``start + j`` lies at the entry ``path[row, j]``, and the last of these is the row's own.
    So a row of a tree knows its ancestors in the order of the text, wherever in the slot they lie.
    """

    slot: torch.Tensor  # [R] int32
    start: torch.Tensor  # [R] int32: entries that lie where their positions say
    position: torch.Tensor  # [R] int32: of the row's own token; -1 for a row that computes nothing
    entry: torch.Tensor  # [R] int32: where the row's own key and value go; path[row, position - start]
    path: torch.Tensor  # [R, P] int32: the first position - start + 1 count
    tiles: torch.Tensor  # [T, 2] int32: first row and rows of each tile, all of one slot and start; 0 rows: none


@compiled
def fill_paths(mask: BoolArray, start: int, path: Int32Array) -> None:
    """Fills the first places of [rows, P] ``path`` with the entries that each row sees behind ``start``, in their order.

    ``mask`` says it, [rows, n], an ancestor before what is below it.
    """
    for row in range(len(mask)):
        count = 0
        for column in range(mask.shape[1]):
            if mask[row, column]:
                path[row, count] = start + column
                count += 1


def longest_path(batch: Batch) -> int:
    """The most entries behind its ``start`` that a row of a batch sees, its own included."""
    return max(
        int(batch.positions[one.offset : one.offset + one.rows].max()) - one.start + 1 for one in batch.segments
    )  # fmt: skip


def buffer_sizes(rows: int, rows_per_tile: int, segments: int, path: int) -> tuple[int, ...]:
    """Return the int32 numbers of each input of a forward: ids, positions, slots, starts, entries, tiles and paths."""
    tiles = rows // rows_per_tile + min(segments, rows)
    return rows, rows, rows, rows, rows, 2 * tiles, rows * path


class StepBuffers:
    """Token ids, positions and ``StepRows`` of R rows."""

    def __init__(self, rows: int, rows_per_tile: int, segments: int, path: int, device: torch.device) -> None:
        """R rows, and at most so many of a tile, segments of a batch and entries of a path."""
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
        """Copies a batch to the device, in the current stream; rows behind those of the batch compute nothing.

        Args:
            batch: of at most R rows, with no path longer than P.
        """
        count = len(batch.token_ids)
        assert count <= self.rows and longest_path(batch) <= self.path, (count, self.rows, longest_path(batch), self.path)
        self._turn = (self._turn + 1) % len(self._hosts)
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        ids, position, slot, start, entry, tiles, paths = (host[first:last].numpy() for first, last in self._cuts)
        ids[:count], position[:count] = batch.token_ids, batch.positions
        ids[count:], position[count:] = 0, -1
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

    def _lay_tiles(self, segment: Segment, tiles: Int32Array, laid: int) -> int:
        for first in range(segment.offset, segment.offset + segment.rows, self._per_tile):
            tiles[laid] = first, min(self._per_tile, segment.offset + segment.rows - first)
            laid += 1
        return laid


def _lay_path(segment: Segment, paths: npt.NDArray[np.int32]) -> None:
    if segment.mask is None:
        paths[:] = segment.start + np.arange(paths.shape[1])  # each sees all before it; what lies behind it is not read
    else:
        fill_paths(segment.mask, segment.start, paths)
