"""Forwards of a few fixed numbers of rows, captured as CUDA graphs: one launch computes a step of the stock model.

A decoding step of a GPU is over in the time that Python takes to launch its thousand kernels one by one. A graph launches them at
once, but for shapes and addresses that do not change: rows are filled up to the next of ``ROWS``, and what differs from step to
step, where each row lies and what it sees, is read from tensors (``engine.forward.cuda.step_buffers``). Steps with more rows,
prefills, run as in ``ModelRunner``.

All graphs are captured by ``prepare``, before the first request. A forward outside of them computes the same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.accelerator import Graph, accelerator
from engine.errors import ModelLoadError, one_line
from engine.forward.batch import AttentionCall, Batch
from engine.forward.cuda.slot_attention import SlotAttention, available, best_block_rows
from engine.forward.cuda.slot_kernels import kernel_errors
from engine.forward.cuda.step_buffers import StepBuffers
from engine.forward.rope import length_rope
from engine.forward.runner import ModelRunner, kv_shape, wanted_rows
from engine.kv.kv_cache import KVShape, SlotCache
from engine.loading.outline import outline

logger = logging.getLogger(__name__)

_MEND = "Triton needs a C compiler and Python's headers (apt-get install gcc libc6-dev); without triton steps run without graphs"
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
TREE_ROWS = 65  # a root and the rows that a request may draft by default
_WARM_UPS = 2  # forwards before a capture: kernels are compiled and libraries take their workspaces


MakeAttention = Callable[[KVShape, int, int, int], SlotAttention]  # of a shape, heads, rows and the capacity of a slot


def lacks_graphs(config: PreTrainedConfig, shape: KVShape) -> str | None:
    """Return why the steps of a model on a GPU cannot be captured, in a few words; None where they can."""
    text = config.get_text_config()
    group = text.num_attention_heads // shape.kv_heads
    if length_rope(config) is not None:  # a graph has the same frequencies for all rows
        return "its rope depends on the length of the text"
    if getattr(text, "attn_temperature_tuning", None):
        return "its queries are scaled by their positions"
    if not outline(config).is_plain:
        return "its attention has sinks, chunks or heads of several sizes"
    if not accelerator().has_kernels(torch.bfloat16):
        return "Triton is not installed (pip install triton)"
    if not available(shape):
        return f"the attention kernels compute in bfloat16, float16 and float32, and the model is in {shape.dtype}"
    if group > best_block_rows(shape):
        return f"{group} query heads share a KV head, and on this GPU {best_block_rows(shape)} may"
    return None


def lacks_exactness(config: PreTrainedConfig, shape: KVShape) -> str | None:
    """Return why the outputs of a model on a GPU are not exact, in a few words; None where the check of exactness decides."""
    if outline(config).routed:  # whatever that check says of its few tokens
        return "its experts compute as many rows at once as are routed to each"
    return lacks_graphs(config, shape)


def has_graphs(model: PreTrainedModel) -> bool:
    """Return whether steps of a model are captured where it is."""
    return model.device.type == "cuda" and lacks_graphs(model.config, kv_shape(model)) is None


def step_room(size: int, sequences: int, tree_rows: int) -> tuple[int, int]:
    """Return the segments and the entries of a path that the buffers of a step have room for."""
    return max(sequences, 2), max(size, tree_rows)  # the check of exactness computes two segments, however many may run


def step_kinds(fixed_rows: int | None) -> tuple[bool, ...]:
    """Return for each step of a size whether it computes logits."""
    # Where steps have any size, pieces of prompts share those with logits: they are few and their rows, too.
    return (True,) if fixed_rows is None else (True, False)


def slot_attention(shape: KVShape, heads: int, rows: int, capacity: int) -> SlotAttention:
    """Return ``SlotAttention`` in blocks for the device."""
    return SlotAttention(shape, heads, rows, capacity, best_block_rows(shape))


class StaticStep:
    """The forward of one number of rows: as ``Attending`` what its layers see of the step, and its graph once captured."""

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, buffers: StepBuffers, attention: SlotAttention, logits: bool
    ) -> None:
        """Logits are computed of all rows, or of none."""
        self.buffers, self.windows = buffers, dict[int, int | None]()
        self._model, self._cache, self._attention = model, cache, attention
        # Of all rows, also of those behind a batch's: what is not computed cannot be skipped in a graph.
        self._kept = torch.arange(buffers.rows if logits else 0, device=model.device)
        self._graph: Graph | None = None
        self._logits = torch.empty(0)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See ``engine.forward.attention.Attending``."""
        assert call.sinks is None and call.chunk is None, call.layer
        self.windows[call.layer], query = call.window, call.query
        output = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
        self._attention.attend(call, *self._cache.layer(call.layer), self.buffers.step_rows, output)
        return output

    def run(self, batch: Batch, replay: bool = True) -> torch.Tensor:
        """Return [len(batch.logit_rows), vocab], which the next call overwrites; by the graph unless ``replay`` is False."""
        self.buffers.fill(batch)
        if self._graph is None or not replay:
            return wanted_rows(self._forward(), batch.logit_rows)
        self._graph.replay()
        return wanted_rows(self._logits, batch.logit_rows)

    def warm_up(self) -> None:
        """Compute forwards beside the current stream, as torch wants them before a capture; no row of them stores anything."""
        gpu, device = accelerator(), self._model.device
        stream, current = gpu.new_stream(device), gpu.current_stream(device)
        stream.wait_stream(current)
        with gpu.stream(stream):
            for _ in range(_WARM_UPS):
                self._forward()
        current.wait_stream(stream)

    def capture(self, pool: Any) -> None:
        """Capture the forward as a graph.

        Args:
            pool: memory that graphs share, see ``Accelerator.graph_pool``.

        Raises:
            RuntimeError: the model does what a graph cannot hold, such as waiting for the device.
        """
        self._graph, self._logits = accelerator().capture(self._model.device, pool, self._forward)

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
        tree_rows: int = TREE_ROWS,
    ) -> None:
        """
        Args:
            model: see ``ModelRunner``; where it is on a GPU, its forwards are captured by ``prepare``.
            slots: sequences held at once.
            capacity: entries of one slot.
            fixed_rows: see ``ModelRunner``.
            sizes: numbers of rows that steps are filled up to, increasing; with ``fixed_rows``, that is the only one.
            attention: makes the attention of the largest of them, which the others use as well.
            kept: see ``ModelRunner``.
            tree_rows: the most rows of a request's tree, its root included. No path behind a context is longer.

        Raises:
            ModelLoadError: see ``ModelRunner``; here and in ``prepare``, the kernels do not run.
        """
        self.sizes = tuple(sizes) if fixed_rows is None else (fixed_rows,)
        self._make_attention, self._tree_rows = attention, tree_rows
        self._attention: SlotAttention | None = None
        self._steps: dict[tuple[int, bool], StaticStep] = {}
        self._replays = True
        self.capture_failures: dict[int, str] = {}
        super().__init__(model, slots, capacity, fixed_rows=fixed_rows, kept=kept)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the steps of all sizes, so that none is captured while requests run.

        A step that cannot be captured is computed kernel by kernel, which one line of the log says.

        Raises:
            ModelLoadError: a step does not fit into memory, or the kernels do not run.
        """
        device = self.model.device
        if device.type != "cuda":
            return
        with accelerator().current(device):
            pool = accelerator().graph_pool()
            for size in reversed(self.sizes):  # the largest first: it takes the memory that the others share
                for logits in step_kinds(self.fixed_rows):
                    self._prepare(self._step(size, logits), size, pool)
        captured = [size for size in self.sizes if size not in self.capture_failures]
        if captured:
            logger.info("CUDA graphs captured for steps of %s rows", ", ".join(map(str, captured)))
        for reason in sorted(set(self.capture_failures.values())):
            sizes = ", ".join(str(size) for size, why in sorted(self.capture_failures.items()) if why == reason)
            logger.warning(
                "%s on %s: steps of %s rows could not be captured as CUDA graphs and are slower: %s",
                type(self.model).__name__, device, sizes, reason,
            )  # fmt: skip

    def _prepare(self, step: StaticStep, size: int, pool: Any) -> None:
        device = self.model.device
        try:
            step.warm_up()
        except torch.OutOfMemoryError as error:
            need = f"a step of {size} rows does not fit on {device}"
            raise ModelLoadError(f"{need}: lower model.max_model_len or engine.max_running") from error
        except kernel_errors() as error:
            raise ModelLoadError(f"tree attention's kernels do not run on {device}: {one_line(error)}. {_MEND}") from error
        try:
            step.capture(pool)
        except RuntimeError as error:
            self.capture_failures[size] = one_line(error)

    @contextlib.contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Compute forwards by the model's code, not by graphs, within a block."""
        self._replays = False
        try:
            yield
        finally:
            self._replays = True

    @property
    def full_rows(self) -> tuple[int, ...]:
        """See ``ModelRunner``."""
        return super().full_rows or self.sizes[-1:]

    def form(self) -> dict[str, Any]:
        """See ``ModelRunner``."""
        return super().form() | {"graphs": [size for size in self.sizes if size not in self.capture_failures]}

    def _compute(self, batch: Batch) -> torch.Tensor:
        """See ``ModelRunner``."""
        size = next((size for size in self.sizes if size >= len(batch.token_ids)), None)
        if size is None:
            return super()._compute(batch)
        return self._step(size, len(batch.logit_rows) > 0 or self.fixed_rows is None).run(batch, self._replays)

    def _step(self, size: int, logits: bool) -> StaticStep:
        step = self._steps.get((size, logits))
        if step is None:
            shape, device = kv_shape(self.model), self.model.device
            if self._attention is None:
                heads = self.model.config.get_text_config().num_attention_heads
                self._attention = self._make_attention(shape, heads, self.sizes[-1], self.cache.capacity)
            segments, path = step_room(size, self.sequences, self._tree_rows)
            buffers = StepBuffers(size, self._attention.rows_of_tile, segments, path, device)
            step = self._steps[size, logits] = StaticStep(self.model, self.cache, buffers, self._attention, logits)
        return step
