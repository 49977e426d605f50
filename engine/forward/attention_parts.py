"""Attention of one request's rows in two parts: flash kernels for the shared context, plain matrix products for the draft tree.

The parts are merged by their log-sum-exps, as in FlashDecoding: a part counts as one more key whose score is the log-sum-exp of
its scores and whose value is its output. Example: a context with scores log 1 and log 2 and the values 3 and 6 gives 5, with
log-sum-exp log 3. Beside one key with score log 1 and value 1 the result is 4: (1 * 3 + 2 * 6 + 1 * 1) / 4.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch.nn.attention.bias import causal_lower_right

from outrider.engine.accelerator import accelerator
from outrider.engine.errors import one_line

logger = logging.getLogger(__name__)

Library = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]  # output, log-sum-exps, dropout mask

MOST_BLOCK_ROWS = 256  # rows of a tree whose block scores are held in memory at once
_HALF = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM, _HEAD_DIM_STEP = 256, 8  # of the flash kernels
_LEAST_CAPABILITY = (8, 0)


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether a flash kernel of the GPU takes these inputs, see ``attend_causal`` for their shapes."""
    if not (query.is_cuda and query.dtype == keys.dtype and query.dtype in _HALF):
        return False
    size = query.shape[3]
    return (
        size % _HEAD_DIM_STEP == 0
        and size <= _MOST_HEAD_DIM
        and keys.shape[3] == values.shape[3] == size
        and _has_flash(query.device)
    )


def attend_causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None = None) -> torch.Tensor:
    """Return causal attention of the last rows of a text, [1, heads, rows, head_dim], without a mask in memory.

    Args:
        query: [1, heads, rows, head_dim].
        keys: [1, kv_heads, entries, head_dim]; the last ``rows`` entries belong to the rows themselves; ``values`` likewise.
    """
    bias = causal_lower_right(query.shape[2], keys.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=bias, scale=scaling, enable_gqa=query.shape[1] != keys.shape[1]
    )


def attend_parts(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    mask: torch.Tensor | None = None,
    scaling: float | None = None,
) -> torch.Tensor:
    """Return attention of rows that all see a context of ``start`` entries, at least one; see ``attend_causal`` for shapes.

    Args:
        mask: [rows, entries - start], added to the scores: 0 for a visible entry behind the context, else minus infinity; each
            row sees at least one. None for plain causality of ``start + rows`` entries.
    """
    _, heads, rows, size = query.shape
    kv_heads, entries = keys.shape[1:3]
    seen = (rows, rows) if mask is None else mask.shape
    assert start > 0 and seen == (rows, entries - start), (seen, rows, entries, start)
    scale = size**-0.5 if scaling is None else scaling
    folded = query.reshape(1, kv_heads, -1, size)  # [1, kv_heads, group * rows, head_dim]
    # All rows see the whole context: that part needs no mask, which flash kernels do not take. Only the small block of rows among
    # themselves needs one.
    shared = entries if rows == 1 and mask is None else start
    output, sums = _attend_context(folded, keys[:, :, :shared], values[:, :, :shared], scale)
    if shared < entries:  # a single row sees all entries: no block
        exact = torch.promote_types(query.dtype, torch.float32)
        scores = torch.matmul(folded[0].to(exact), keys[0, :, shared:].to(exact).transpose(1, 2))
        bias = scores.new_full((rows, rows), float("-inf")).triu_(1) if mask is None else mask
        scores = torch.add(bias, scores.unflatten(1, (heads // kv_heads, rows)), alpha=scale).flatten(1, 2)
        output = _merge(scores, values[0, :, shared:].to(exact), output[0], sums[0])
    return output.reshape(1, heads, rows, size).to(query.dtype)


def _merge(scores: torch.Tensor, values: torch.Tensor, output: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Merge the attention over a block of keys into a part, [kv_heads, rows, head_dim] with log-sum-exps [kv_heads, rows]."""
    # ``scores``, [kv_heads, rows, columns], and ``values``, [kv_heads, columns, head_dim], have the dtype to compute in.
    columns = scores.shape[2]
    weights = torch.softmax(torch.cat([scores, sums[..., None].to(scores.dtype)], 2), 2)
    return torch.addcmul(torch.matmul(weights[..., :columns], values), weights[..., columns:], output)


def _attend_context(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [1, kv_heads, rows, head_dim] and log-sum-exps [1, kv_heads, rows] of rows that see all keys of a part."""
    if not query.is_cuda:
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, scale=scale)
        return on_cpu[0], on_cpu[1]
    library = _library(query.device)
    if library is not None:
        return _by_library(library, query, keys, values, scale)
    output, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, scale=scale)
    return output, sums


def _by_library(
    library: Library, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``_attend_context`` with flash-attn, which has rows before heads in all but the log-sum-exps."""
    by_row = [part.transpose(1, 2) for part in (query, keys, values)]
    output, sums, _ = library(*by_row, softmax_scale=scale, return_attn_probs=True)
    return output.transpose(1, 2), sums


@cache
def _library(device: torch.device) -> Library | None:
    """Return flash-attn's function; None if it is not installed or does not support this torch or GPU."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    return usable(flash_attn_func, device)


def usable(library: Library, device: torch.device) -> Library | None:
    """Return a flash-attn function if a small call with it succeeds on the GPU; otherwise log a warning and return None."""
    probe = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    try:
        # A build has code only for the architectures it was made for (FLASH_ATTN_CUDA_ARCHS).
        library(probe, probe, probe, softmax_scale=1.0, return_attn_probs=True)
        accelerator().synchronize(device)
    except RuntimeError as error:
        major, minor = accelerator().capability(device)
        logger.warning(
            "flash-attn does not run on %s (%s): torch's flash attention is used instead. Install a build with code for sm_%d%d",
            device, one_line(error), major, minor,
        )  # fmt: skip
        return None
    return library


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and accelerator().capability(device) >= _LEAST_CAPABILITY
