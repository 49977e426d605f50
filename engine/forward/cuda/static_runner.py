"""Forwards of a few fixed numbers of rows, captured as CUDA graphs: one launch computes a step of the stock model.

A decoding step of a GPU is over in the time that Python takes to launch its thousand kernels one by one. A graph launches them at
once, but for shapes and addresses that do not change: rows are filled up to the next of ``ROWS``, and what differs from step to
step, where each row lies and what it sees, is read from tensors (``engine.forward.cuda.step_buffers``). Steps with more rows,
prefills, run as in ``ModelRunner``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.errors import ModelLoadError, one_line
from engine.forward.batch import AttentionCall, Batch
from engine.forward.cuda.slot_attention import SlotAttention, available, best_block_rows
from engine.forward.cuda.slot_kernels import kernel_errors
from engine.forward.cuda.step_buffers import StepBuffers, longest_path
from engine.forward.rope import length_rope
from engine.forward.runner import ModelRunner, kv_shape, wanted_rows
from engine.kv.kv_cache import KVShape, SlotCache
from engine.loading.outline import outline

logger = logging.getLogger(__name__)

_MEND = "Triton needs a C compiler and Python's headers (apt-get install gcc libc6-dev); without triton steps run without graphs"
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_WARM_UPS = 2  # forwards before a capture: kernels are compiled and libraries take their workspaces


MakeAttention = Callable[[KVShape, int, int, int], SlotAttention]  # of a shape, heads, rows and the capacity of a slot


def has_graphs(model: PreTrainedModel) -> bool:
    """Whether steps of a model can be captured: where ``SlotAttention`` is ``available``, for few query heads to a KV head."""
    shape = kv_shape(model)
    group = model.config.get_text_config().num_attention_heads // shape.kv_heads
    plain = outline(model.config).is_plain and not getattr(model.config.get_text_config(), "attn_temperature_tuning", None)
    alike = length_rope(model.config) is None  # a graph has the same frequencies for all rows
    return available(shape) and plain and alike and group <= best_block_rows(shape)


def slot_attention(shape: KVShape, heads: int, rows: int, capacity: int) -> SlotAttention:
    """``SlotAttention`` in blocks for the device."""
    return SlotAttention(shape, heads, rows, capacity, best_block_rows(shape))


class StaticStep:
    """The forward of one number of rows: as ``Attending`` what its layers see of the step, and its graph."""

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, buffers: StepBuffers, attention: SlotAttention, logits: bool
    ) -> None:
        """Logits are computed of all rows, or of none."""
        self.buffers, self.windows = buffers, dict[int, int | None]()
        self._model, self._cache, self._attention = model, cache, attention
        device = model.device
        # Of all rows, also of those behind a batch's: what is not computed cannot be skipped in a graph.
        self._kept = torch.arange(buffers.rows if logits else 0, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See ``engine.forward.attention.Attending``."""
        assert call.sinks is None and call.chunk is None, call.layer
        self.windows[call.layer], query = call.window, call.query
        output = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
        self._attention.attend(call, *self._cache.layer(call.layer), self.buffers.step_rows, output)
        return output

    def run(self, batch: Batch) -> torch.Tensor:
        """[len(batch.logit_rows), vocab], which the next call overwrites."""
        self.buffers.fill(batch)
        if self._graph is None:
            self._logits = self._forward()
        else:
            self._graph.replay()
        return wanted_rows(self._logits, batch.logit_rows)

    def warm_up(self) -> None:
        """Forwards beside the current stream, as torch wants them before a capture; no row of them stores anything."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._forward()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, pool: Any) -> None:
        """Captures the forward as a graph.

        Args:
            pool: torch's handle of memory that graphs share, which are never replayed at once.

        Raises:
            RuntimeError: the model does what a graph cannot hold, such as waiting for the device.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._forward()
        self._graph, self._logits = graph, logits

    def _forward(self) -> torch.Tensor:
        ids, position = self.buffers.ids, self.buffers.step_rows.position
        output = self._model(
            input_ids=ids.long()[None],
            position_ids=position.clamp(min=0).long()[None],
            use_cache=False,
            logits_to_keep=self._kept,
            tree_step=self,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class StaticRunner(ModelRunner):
    """A runner whose small steps are graphs. The logits of a forward are there until the next one."""

    _by_rows = False

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        capacity: int,
        fixed_rows: int | None = None,
        sizes: Sequence[int] = ROWS,
        attention: MakeAttention = slot_attention,
        kept: int | None = 0,
    ) -> None:
        """
        Args:
            model: see ``ModelRunner``; where it is on a GPU, its forwards are captured.
            slots: sequences held at once.
            capacity: entries of one slot.
            fixed_rows: see ``ModelRunner``.
            sizes: numbers of rows that steps are filled up to, increasing; with ``fixed_rows``, that is the only one.
            attention: makes the attention of one of them.
            kept: see ``ModelRunner``.

        Raises:
            ModelLoadError: see ``ModelRunner``; here and wherever a step is made, the kernels do not run.
        """
        self.sizes = tuple(sizes) if fixed_rows is None else (fixed_rows,)
        self._attention = attention
        self._steps: dict[tuple[int, bool], StaticStep] = {}
        self._attentions: dict[int, SlotAttention] = {}
        self._pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        super().__init__(model, slots, capacity, fixed_rows=fixed_rows, kept=kept)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures the steps of all sizes now, so that no request waits for it."""
        for size in reversed(self.sizes):  # the largest first: it takes the memory that the others share
            self._step(size, True, size)
            if self.fixed_rows is not None:  # pieces of prompts come in such steps, too
                self._step(size, False, size)
        logger.info("steps of %s rows are ready", ", ".join(map(str, self.sizes)))

    def form(self) -> dict[str, Any]:
        """See ``ModelRunner``."""
        return super().form() | {"graphs": list(self.sizes)}

    def _compute(self, batch: Batch) -> torch.Tensor:
        """See ``ModelRunner``."""
        size = next((size for size in self.sizes if size >= len(batch.token_ids)), None)
        if size is None:
            return super()._compute(batch)
        return self._step(size, len(batch.logit_rows) > 0, longest_path(batch)).run(batch)

    def _step(self, size: int, logits: bool, path: int) -> StaticStep:
        step = self._steps.get((size, logits))
        if step is None or step.buffers.path < path:
            step = self._steps[size, logits] = self._made(size, logits, max(size, 1 << (path - 1).bit_length()))
        return step

    def _made(self, size: int, logits: bool, path: int) -> StaticStep:
        shape, device = kv_shape(self.model), self.model.device
        heads = self.model.config.get_text_config().num_attention_heads
        if size not in self._attentions:
            self._attentions[size] = self._attention(shape, heads, size, self.cache.capacity)
        attention = self._attentions[size]
        buffers = StepBuffers(size, attention.rows_of_tile, self.cache.slots, path, device)
        step = StaticStep(self.model, self.cache, buffers, attention, logits)
        if self._pool is not None:
            try:
                step.warm_up()
            except torch.OutOfMemoryError as error:
                need = f"a step of {size} rows does not fit on {device}"
                raise ModelLoadError(f"{need}: lower model.max_model_len or engine.max_running") from error
            except kernel_errors() as error:
                raise ModelLoadError(f"tree attention's kernels do not run on {device}: {one_line(error)}. {_MEND}") from error
            try:
                step.capture(self._pool)
            except RuntimeError as error:  # it goes on kernel by kernel
                logger.warning("a step of %d rows of %s could not be captured: %s", size, type(self.model).__name__, error)
        return step
