"""Attention written out in float64, and what ``slot_attention`` computes by it, for devices and types that it is not for."""

from __future__ import annotations

import numpy as np
import torch

from outrider.engine.cuda.slot_attention import SlotAttention
from outrider.engine.cuda.step_buffers import StepRows
from outrider.engine.forward.batch import AttentionCall
from outrider.engine.kv.kv_cache import KVShape
from outrider.experiments.device_double.attention import attend_slots


def reference_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """[rows, heads, head_dim] float64 on the CPU: each row over the keys that it sees.

    Args:
        query: [heads, rows, head_dim].
        keys: [kv_heads, entries, head_dim].
        values: as keys.
        visible: [rows, entries] bool.
        scale: of the scores.
        softcap: their bound.
    """
    group = query.shape[0] // keys.shape[0]
    keys, values = (each.double().cpu().repeat_interleave(group, 0) for each in (keys, values))
    scores = torch.matmul(query.double().cpu(), keys.transpose(1, 2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.matmul(scores.masked_fill(~visible, float("-inf")).softmax(-1), values).transpose(0, 1)


def tree_mask(rng: np.random.Generator, rows: int, before: int = 0) -> np.ndarray:
    """[rows, before + rows] bool of a random tree, of which an earlier forward computed the first rows: who sees whom."""
    mask = np.eye(before + rows, dtype=np.bool_)
    for row in range(1, before + rows):
        mask[row] |= mask[int(rng.integers(0, row))]
    return mask[before:]


class ReferenceAttention(SlotAttention):
    """See ``SlotAttention``, of which it shares the interface alone."""

    def __init__(self, shape: KVShape, heads: int, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.rows_of_tile = 3

    def attend(self, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, rows: StepRows, output: torch.Tensor) -> None:
        """See ``SlotAttention.attend``."""
        assert call.query.shape[2] <= self.rows and keys.shape[2] == self.capacity
        attend_slots(
            call.query, call.key, call.value, keys, values, None, output,
            rows.slot, rows.start, rows.position, rows.entry, rows.path, rows.tiles,
            call.scale, call.window or 0, call.softcap or 0.0, self.rows_of_tile,
        )  # fmt: skip
