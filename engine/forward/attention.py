"""Tree attention over KV slots, as an attention function for stock transformers models (``attn_implementation=TREE_ATTENTION``).

It stores the new rows' keys and values in the slots and lets each row see its own sequence and its ancestors in the draft tree.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from outrider.engine.cpu.attention import RowAttention, RowStep
from outrider.engine.cpu.state_step import StateStep
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.attention_parts import MOST_BLOCK_ROWS, attend_causal, attend_parts, fits
from outrider.engine.forward.batch import AttentionCall, Batch, SequenceRows
from outrider.engine.kv.kv_cache import SlotCache

TREE_ATTENTION = "outrider_tree"
# Arguments for kinds of attention that are not supported here: learned biases, chosen keys.
_UNSUPPORTED = ("position_bias", "indices", "block_indices")
Range = tuple[int | None, int | None]  # the window and the chunk of a layer


class Attending(Protocol):
    """Interface of a running step for the model's layers."""

    windows: dict[int, int | None]  # per layer that called, by layer index

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store a layer's new keys and values and return the attention output, [1, rows, heads, value_dim]."""
        ...


class StepContext:
    """State of one forward pass for its attention layers; masks are built once and shared by the layers."""

    def __init__(
        self,
        batch: Batch,
        cache: SlotCache,
        positions: torch.Tensor,
        dtype: torch.dtype,
        compiled: RowAttention | None = None,
        by_row: bool = True,
        states: StateStep | None = None,
    ) -> None:
        """Create the context of one forward pass.

        Args:
            positions: [rows] int64 on the model's device; rows beyond the batch's are padding and see nothing.
            compiled: CPU attention over the slots, if available.
            by_row: compute what ``compiled`` cannot row by row with torch, not all rows of a request at once.
            states: of a model with recurrent layers; its attention layers are then numbered in calling order.
        """
        self.segments, self.cache, self.states = batch.segments, cache, states
        self._compiled, self._by_row = compiled, by_row
        self._step: RowStep | None = None
        self.positions, self._dtype = positions, dtype
        self.rows = len(batch.token_ids)
        self._masks: dict[tuple[int, Range, int, bool], torch.Tensor | None] = {}
        self._seen: dict[tuple[int, int, Range], torch.Tensor] = {}
        self.windows: dict[int, int | None] = {}  # per layer that called, by layer index

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See ``Attending``."""
        if self.states is not None:
            call.layer = len(self.windows)
        self.windows[call.layer] = call.window
        if self._compiled is not None and self._compiled.fits(call):
            if self._step is None:
                self._step = RowStep(self._compiled, self.segments, self.positions)
            return self._step.attend(call)
        query = call.query
        output = query.new_empty(1, query.shape[2], query.shape[1], call.value.shape[3])
        if query.shape[2] > self.rows:
            output[:, self.rows :] = 0
        plain = call.softcap is None and call.sinks is None
        # By row, a result depends on the preceding tokens alone. By segment it does not: torch's kernels choose the order of
        # additions by the shape of the whole input.
        attend = _attend_by_row if self._by_row else _attend if plain else _attend_written_out
        for segment in self.segments:
            rows, at = slice(segment.offset, segment.offset + segment.rows), segment.end - segment.rows
            kept = self.cache.write(call.layer, segment.slot, at, call.key[0, :, rows], call.value[0, :, rows])
            output[:, rows] = attend(self, segment, call, query[:, :, rows], kept[0][None], kept[1][None])
        return output

    def seen(self, segment: SequenceRows, row: int, within: Range) -> torch.Tensor:
        """Return the slot entries that a row of a segment sees, in text order, int64 on the device."""
        key = segment.offset, row, within
        if key not in self._seen:
            own = torch.arange(len(segment.before) + row + 1)
            if segment.mask is not None:
                own = torch.from_numpy(segment.mask[row].nonzero()[0])
            entries = torch.cat([torch.arange(segment.start), segment.start + own])
            window, chunk = within  # positions rise by one from entry to entry: each row sees one path
            if chunk is not None:
                entries = entries[(len(entries) - 1) // chunk * chunk :]
            if window is not None:
                entries = entries[-window:]
            self._seen[key] = entries.to(self.positions.device)
        return self._seen[key]

    def mask(self, segment: SequenceRows, within: Range, repeats: int = 1, explicit: bool = False) -> torch.Tensor | None:
        """Return a segment's additive mask, [repeats * rows, end]; None if all is visible, or for causality alone."""
        # ``explicit``: causality of several rows is a mask, too
        window, chunk = (None if size is None or segment.end <= size else size for size in within)
        key = (segment.offset, (window, chunk), repeats, explicit)
        if key not in self._masks:
            if repeats == 1:
                self._masks[key] = self._build(segment, window, chunk, explicit)
            else:
                once = self.mask(segment, (window, chunk), 1, explicit)
                self._masks[key] = None if once is None else once.repeat(repeats, 1)
        return self._masks[key]

    def _build(self, segment: SequenceRows, window: int | None, chunk: int | None, explicit: bool) -> torch.Tensor | None:
        start, rows = segment.start, segment.rows
        whole = segment.mask is None and window is None and chunk is None
        if whole and (rows == 1 or (start == 0 and not explicit)):
            return None
        device = self.positions.device
        visible = torch.ones(rows, segment.end, dtype=torch.bool, device=device)
        if segment.mask is None:
            visible[:, start:] = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
        else:
            visible[:, start:] = torch.from_numpy(segment.mask).to(device)
        if window is not None or chunk is not None:
            own = self.positions[segment.offset : segment.offset + rows]
            before = torch.tensor(segment.before, dtype=torch.int64).to(device)
            keys = torch.cat([torch.arange(start, device=device), before, own])
            if window is not None:
                visible &= own[:, None] - keys[None, :] < window
            if chunk is not None:
                visible &= own[:, None] // chunk == keys[None, :] // chunk
        return torch.zeros(visible.shape, dtype=self._dtype, device=device).masked_fill_(~visible, float("-inf"))


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree_step: Attending | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention for transformers; return [1, rows, heads, value_dim], and None for the weights.

    Args:
        attention_mask: must be None; visibility comes from ``tree_step``.
        s_aux: [heads] attention sinks.

    Raises:
        ModelLoadError: the model does not pass ``tree_step`` on, or needs an unsupported kind of attention.
    """
    if tree_step is None:
        raise ModelLoadError(
            f"{type(module).__name__} does not pass arguments on to its attention function: the model cannot be served"
        )
    if attention_mask is not None:
        raise ModelLoadError(f"{type(module).__name__} applies its own attention mask, which tree attention does not support")
    if getattr(module, "is_causal", True) is False:
        raise ModelLoadError(f"{type(module).__name__} attends to later tokens (an encoder) and cannot be served")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelLoadError(f"{type(module).__name__} needs attention with {name!r}, which tree attention does not support")
    layer = -1 if module.layer_idx is None else int(module.layer_idx)  # type: ignore[arg-type]
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise ModelLoadError(
            f"{type(module).__name__} has {len(s_aux)} attention sinks for {query.shape[1]} heads and cannot be sharded"
        )
    window, chunk = _limits(getattr(module, "config", None), layer, sliding_window)
    return tree_step.attend(AttentionCall(layer, query, key, value, scaling, window, softcap, chunk, s_aux)), None


def _limits(config: Any, layer: int, window: int | None) -> Range:
    """Return window and chunk of a layer; some models apply them only in their own masks, which are not built here."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds and 0 <= layer < len(kinds) else None
    if kind == "sliding_attention" and window is None:
        window = getattr(config, "sliding_window", None)
    return window, getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None


def _attend_by_row(
    step: StepContext, segment: SequenceRows, call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Compute the rows of a request one at a time, so that each depends only on the entries it sees; slow, for any input."""
    _, heads, rows, size = query.shape
    group, found = heads // keys.shape[1], []
    sinks = None if call.sinks is None else call.sinks.view(-1, group, 1)
    for row in range(rows):
        entries = step.seen(segment, row, call.within)
        own = query[0, :, row].reshape(-1, group, size)
        found.append(_eager(call, own, keys[0][:, entries], values[0][:, entries], sinks=sinks).reshape(heads, -1))
    return torch.stack(found)[None]


def _eager(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,  # [kv_heads, rows, 1]
) -> torch.Tensor:
    """Compute attention as transformers' eager code does, [..., rows, value_dim], so that half precision rounds alike."""
    scores = torch.matmul(query, keys.transpose(-2, -1)) * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    # Only a float64 model has its softmax in float64.
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return torch.matmul(weights[..., : keys.shape[-2]], values)


def _attend(
    step: StepContext, segment: SequenceRows, call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Compute one request's rows, [1, rows, heads, head_dim], by torch's fused attention."""
    scaling = call.scaling
    _, heads, rows, size = query.shape
    group = heads // keys.shape[1]
    whole = all(limit is None or segment.end <= limit for limit in call.within)
    # On a GPU, flash kernels compute rows behind a context; they take no mask: see ``engine.forward.attention_parts``.
    if segment.start > 0 and whole and fits(query, keys, values):
        if segment.mask is None and rows > 1:
            return attend_causal(query, keys, values, scaling).transpose(1, 2)
        if rows <= MOST_BLOCK_ROWS:
            own = step.mask(segment, (None, None))
            own = None if own is None else own[:, segment.start :]
            return attend_parts(query, keys, values, segment.start, own, scaling).transpose(1, 2)
    mask = step.mask(segment, call.within)
    causal = mask is None and rows > 1
    # Plain causality keeps the kernel that skips masked blocks. Otherwise heads that share keys are folded into rows of one head,
    # so that keys are read once; torch's own grouped attention reads them once per head.
    if group == 1 or causal:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=group > 1
        )
    else:
        mask = step.mask(segment, call.within, group)
        folded = query.reshape(1, -1, group * rows, size)
        attended = torch.nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
        attended = attended.reshape(1, heads, rows, -1)
    return attended.transpose(1, 2)


def _attend_written_out(
    step: StepContext, segment: SequenceRows, call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Compute ``_attend`` with softcap and sinks, which torch's fused attention does not support."""
    _, heads, rows, size = query.shape
    group = heads // keys.shape[1]
    mask = step.mask(segment, call.within, group, explicit=True)
    sinks = None if call.sinks is None else call.sinks.view(-1, group, 1).repeat_interleave(rows, 1)
    attended = _eager(call, query.reshape(1, -1, group * rows, size), keys, values, mask, sinks)
    return attended.reshape(1, heads, rows, -1).transpose(1, 2)


AttentionInterface.register(TREE_ATTENTION, tree_attention)
