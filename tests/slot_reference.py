"""What ``slot_attention`` computes, row by row with torch's operations: for devices and types that it is not for."""

from __future__ import annotations

import torch

from engine.forward.cuda.step_rows import StepRows
from engine.kv.kv_cache import KVShape


class ReferenceAttention:
    """See ``engine.forward.cuda.slot_attention.SlotAttention``."""

    def __init__(self, shape: KVShape, heads: int, rows: int, capacity: int) -> None:
        self.group, self.rows, self.capacity = heads // shape.kv_heads, rows, capacity
        self.rows_of_tile = 3

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: StepRows,
        output: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        """See ``SlotAttention.attend``."""
        assert query.shape[2] == self.rows and keys.shape[2] == self.capacity
        tiled = [row for first, count in rows.tiles.tolist() for row in range(first, first + count)]
        assert tiled == (rows.position >= 0).nonzero()[:, 0].tolist()  # each row that computes something is in one tile
        for row in tiled:
            slot, entry = int(rows.slot[row]), int(rows.entry[row])
            keys[slot, :, entry], values[slot, :, entry] = key[0, :, row], value[0, :, row]
        output.zero_()
        for row in tiled:
            slot, start, position = int(rows.slot[row]), int(rows.start[row]), int(rows.position[row])
            seen = torch.cat([torch.arange(start), rows.path[row, : position - start + 1].cpu().long()])
            assert seen[-1] == rows.entry[row] and len(set(seen.tolist())) == position + 1
            if window is not None:
                seen = seen[-window:]
            own_keys, own_values = (entries[slot][:, seen].repeat_interleave(self.group, 0) for entries in (keys, values))
            scores = torch.einsum("hd,hnd->hn", query[0, :, row], own_keys) * (query.shape[3] ** -0.5 if scale is None else scale)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            output[0, row] = torch.einsum("hn,hnd->hd", scores.softmax(-1), own_values)
