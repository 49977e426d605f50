"""Attention of ``engine.cuda.slot_attention`` written out for CPU tensors, row by row."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_slots(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, states: Tensor | None, output: Tensor,
    slot: Tensor, start: Tensor, position: Tensor, entry: Tensor, path: Tensor, tiles: Tensor,
    scale: float, window: int, softcap: float, block_rows: int,
) -> None:  # fmt: skip
    """Compute what the operation ``outrider::slot_attention`` does, with the same arguments, in float64.

    Each row is computed by itself over what it sees in the order of the text: its bits depend on nothing else.

    Raises:
        AssertionError: the rows are not laid out as the kernels need them.
    """
    tiled = [row for first, count in tiles.tolist() for row in range(first, first + count)]
    assert tiled == (position >= 0).nonzero()[:, 0].tolist(), tiled  # each row that computes something is in one tile
    slots, starts, positions, entries = (each.tolist() for each in (slot, start, position, entry))
    for row in tiled:
        keys[slots[row], :, entries[row]], values[slots[row], :, entries[row]] = key[0, :, row], value[0, :, row]
    output.zero_()
    group = query.shape[1] // keys.shape[1]
    for row in tiled:
        first, end = starts[row], positions[row] + 1
        own = path[row, : end - first].long()
        assert len(own) and int(own[-1]) == entries[row] and int(own.min()) >= first, (row, first, end)
        seen = torch.cat([torch.arange(first), own])
        if window:
            seen = seen[-window:]
        of_row = query[0, :, row].double().view(-1, group, query.shape[3])
        scores = torch.matmul(of_row, keys[slots[row]][:, seen].double().transpose(1, 2)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        output[0, row] = torch.matmul(scores.softmax(-1), values[slots[row]][:, seen].double()).flatten(0, 1).to(output.dtype)
