"""Where the rows of one forward lie, as tensors of a fixed shape on the device: what a captured graph reads anew each step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
