"""Forward passes with a few fixed numbers of rows, captured as CUDA graphs of the stock model.

A graph launches a thousand kernels at once, but has fixed shapes and addresses: rows are padded to the next of ``ROWS``, and what
varies from step to step is read from tensors (``engine.cuda.step_buffers``). Larger steps run as in ``ModelRunner``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engine.accelerator import Graph, accelerator
from outrider.engine.cuda.slot_attention import SlotAttention, available, best_block_rows, kernel_errors
from outrider.engine.cuda.step_buffers import StepBuffers
from outrider.engine.errors import ModelLoadError, one_line
from outrider.engine.forward.batch import AttentionCall, Batch
from outrider.engine.forward.rope import length_rope
from outrider.engine.forward.runner import ModelRunner, kv_shape, wanted_rows
from outrider.engine.kv.kv_cache import KVShape, SlotCache
from outrider.engine.loading.outline import outline

logger = logging.getLogger(__name__)

_MEND = "Triton needs a C compiler and Python's headers (apt-get install gcc libc6-dev); without triton steps run without graphs"
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
TREE_ROWS = 65  # root and default maximum of drafted rows per request
_WARM_UPS = 2  # before a capture, to compile kernels and allocate library workspaces


MakeAttention = Callable[[KVShape, int, int, int], SlotAttention]  # arguments: shape, heads, rows, slot capacity


def lacks_graphs(config: PreTrainedConfig, shape: KVShape) -> str | None:
    """Return why a model's steps on a GPU cannot be captured as graphs; None if they can."""
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
        return f"{group} query heads share a KV head; on this GPU at most {best_block_rows(shape)} can"
    return None


def lacks_exactness(config: PreTrainedConfig, shape: KVShape) -> str | None:
    """Return why a model's outputs on a GPU are not exact; None if the exactness self-check has to decide."""
    if outline(config).routed:  # the self-check's few tokens cannot show this
        return "the batch size of its experts depends on the routing"
    return lacks_graphs(config, shape)


def has_graphs(model: PreTrainedModel) -> bool:
    """Return whether the model's steps are captured as graphs on its device."""
    return model.device.type == "cuda" and lacks_graphs(model.config, kv_shape(model)) is None


def step_room(size: int, sequences: int, tree_rows: int) -> tuple[int, int]:
    """Return the maximum numbers of segments and of path entries for the buffers of a step."""
    return max(sequences, 2), max(size, tree_rows)  # the self-check computes two segments even if one sequence may run


def step_kinds(fixed_rows: int | None) -> tuple[bool, ...]:
    """Return, for the steps of each size, whether they compute logits."""
    # With any number of rows, prefill chunks without logits use the steps with logits: such chunks are few and small.
    return (True,) if fixed_rows is None else (True, False)


def slot_attention(shape: KVShape, heads: int, rows: int, capacity: int) -> SlotAttention:
    """Return ``SlotAttention`` with the best block size for the device."""
    return SlotAttention(shape, heads, rows, capacity, best_block_rows(shape))


class StaticStep:
    """Forward pass with a fixed number of rows: its ``Attending`` interface for the layers, and its graph once captured."""

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, buffers: StepBuffers, attention: SlotAttention, logits: bool
    ) -> None:
        self.buffers, self.windows = buffers, dict[int, int | None]()
        self._model, self._cache, self._attention = model, cache, attention
        # Of all rows, padding too: a graph cannot skip rows.
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
        """Return the batch's logits, [len(batch.logit_rows), vocab], overwritten by the next call; ``replay``: use the graph."""
        self.buffers.fill(batch)
        if self._graph is None or not replay:
            return wanted_rows(self._forward(), batch.logit_rows)
        self._graph.replay()
        return wanted_rows(self._logits, batch.logit_rows)

    def warm_up(self) -> None:
        """Run forward passes on a side stream, as torch requires before a capture; no row stores anything."""
        gpu, device = accelerator(), self._model.device
        stream, current = gpu.new_stream(device), gpu.current_stream(device)
        stream.wait_stream(current)
        with gpu.stream(stream):
            for _ in range(_WARM_UPS):
                self._forward()
        current.wait_stream(stream)

    def capture(self, pool: Any) -> None:
        """Capture the forward pass as a graph in the memory ``pool`` of all graphs; see ``Accelerator.graph_pool``.

        Raises:
            RuntimeError: the model does something that a graph cannot contain, such as waiting for the device.
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
    """Runner whose small steps are CUDA graphs; the logits of a forward pass are valid until the next one."""

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
        """Create the runner; see ``ModelRunner`` for the other arguments and the errors.

        Args:
            sizes: numbers of rows that steps are padded to, ascending; ignored with ``fixed_rows``.
            attention: makes the attention for the largest size, shared by all sizes.
            tree_rows: maximum rows of a request's tree, including its root; bounds the paths behind a context.
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
        """Capture the steps of all sizes; failed captures run without graphs. Raises ``ModelLoadError`` if steps fail."""
        device = self.model.device
        if device.type != "cuda":
            return
        with accelerator().current(device):
            pool = accelerator().graph_pool()
            for size in reversed(self.sizes):  # largest first: it allocates the memory that the others share
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
        """Run forward passes by the model's code instead of graphs inside the context."""
        self._replays = False
        try:
            yield
        finally:
            self._replays = True

    @property
    def full_rows(self) -> tuple[int, ...]:
        """See ``ModelRunner``."""
        return super().full_rows or self.sizes[-1:]

    def calibration_key(self) -> dict[str, Any]:
        """See ``ModelRunner``."""
        return super().calibration_key() | {"graphs": [size for size in self.sizes if size not in self.capture_failures]}

    def _compute(self, batch: Batch) -> torch.Tensor:
        size = next((size for size in self.sizes if size >= len(batch.token_ids)), None)
        if size is None:
            return super()._compute(batch)
        # With any number of rows there are only steps with logits, see ``step_kinds``.
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
