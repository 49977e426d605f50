"""Probe of a GPU for the attention kernels and for CUDA graphs that capture them."""

from __future__ import annotations

import numpy as np
import torch

from outrider.engine.accelerator import accelerator
from outrider.engine.cuda.slot_attention import SlotAttention, available, best_block_rows
from outrider.engine.cuda.slot_kernels import kernel_errors
from outrider.engine.cuda.step_buffers import StepBuffers
from outrider.engine.errors import one_line
from outrider.engine.forward.batch import AttentionCall, DummySequence, ScheduledDummy, pack
from outrider.engine.kv.kv_cache import KVShape, SlotCache

_ROWS, _HEADS, _HEAD_DIM = 16, 4, 64


@torch.inference_mode()
def graph_fault(device: torch.device) -> str | None:
    """Capture attention over a few rows as a CUDA graph, replay it and return the failure in one line, or None."""
    shape = KVShape(1, _HEADS, _HEAD_DIM, torch.float32, device)
    if not available(shape):
        return "the attention kernels need Triton"
    with accelerator().current(device):
        try:
            cache, attention = SlotCache(shape, 1, _ROWS), SlotAttention(shape, _HEADS, _ROWS, _ROWS, best_block_rows(shape))
            buffers = StepBuffers(_ROWS, attention.rows_of_tile, 1, _ROWS, device)
            buffers.fill(pack([ScheduledDummy(DummySequence(0, np.arange(_ROWS, dtype=np.int32)), 0, _ROWS, None)]))
            numbers = torch.arange(_HEADS * _ROWS * _HEAD_DIM, dtype=torch.float32, device=device).sin()
            numbers = numbers.view(1, _HEADS, _ROWS, _HEAD_DIM)

            def attend() -> torch.Tensor:
                output = numbers.new_empty(1, _ROWS, _HEADS, _HEAD_DIM)
                attention.attend(AttentionCall(0, numbers, numbers, numbers), *cache.layer(0), buffers.step_rows, output)
                return output

            expected = attend().cpu()
            graph, output = accelerator().capture(device, accelerator().graph_pool(), attend)
            graph.replay()
            return None if torch.equal(output.cpu(), expected) else "the replay of a CUDA graph differs from the captured run"
        except kernel_errors() as error:
            return one_line(error)
