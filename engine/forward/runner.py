"""Runner of a stock model: one forward pass over the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from outrider.decoding.arrays import SignedArray
from outrider.engine.accelerator import accelerator
from outrider.engine.cpu.attention import RowAttention, laid_out
from outrider.engine.cpu.fused_forward import FusedForward
from outrider.engine.cpu.linear import has_kernels, row_linears
from outrider.engine.cpu.lora import Adapters
from outrider.engine.cpu.mixers import bind_mixers, round_expert_rows_apart
from outrider.engine.cpu.packed_weight import PackedWeight
from outrider.engine.cpu.state_step import States
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.attention import StepContext
from outrider.engine.forward.batch import Batch, SequenceRows, adapters_of, cut
from outrider.engine.forward.patches import patch_modules
from outrider.engine.forward.rope import LengthRope, ropes_by_row
from outrider.engine.kv.kv_cache import KVShape, SlotCache
from outrider.engine.kv.state_cache import StateCache
from outrider.engine.loading.memory import default_slots, free_bytes, left_bytes, release_memory
from outrider.engine.loading.outline import outline
from outrider.engine.loading.weights.adapters import Adapter
from outrider.engine.text.grammar import Grammars

if TYPE_CHECKING:
    from outrider.engine.emulation.device import EmulatedDevice

_PROBE_ROWS = 5  # rows of the first forward pass with an adapter


def kv_shape(model: PreTrainedModel) -> KVShape:
    """Return the KV shape of a token by the model's configuration."""
    return outline(model.config).kv_shape(model.dtype, model.device)


def _refuse_states(model: PreTrainedModel) -> None:
    if not has_kernels(model.device, model.dtype):
        where = f"in {str(model.dtype).removeprefix('torch.')} on {model.device}"
        kinds = "states, which are computed on CPUs with numba, in bfloat16, float16 or float32"
        raise ModelLoadError(f"{type(model).__name__} cannot be served {where}: its layers have {kinds}")


class ModelRunner:
    """Causal language model with the KV slots of the sequences that it computes."""

    ranks = 1  # processes that take part in a forward pass
    capture_failures: Mapping[int, str] = MappingProxyType({})  # rows of a step: why no CUDA graph was captured for them
    exact = False  # whether the self-check found each row bit-identical in every batch, see ``engine.forward.exactness``
    emulated: EmulatedDevice | None = None  # whose time forwards take, see ``engine.emulation``
    _adapters: Adapters | None = None
    # [>= rows, hidden size] bits of the last forward pass's final hidden states, row by row, valid until the next one; None if
    # the model was not computed by ``FusedForward``.
    hidden: SignedArray | None = None
    _by_rows = True  # lay out KV for the compiled CPU attention, if it supports this shape

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        capacity: int,
        shape: KVShape | None = None,
        cache: type[SlotCache] = SlotCache,
        fixed_rows: int | None = None,
        kept: int | None = 0,
    ) -> None:
        """Prepare a model for tree attention, replacing some of its modules in place, and allocate its KV slots.

        Args:
            model: loaded with ``attn_implementation=TREE_ATTENTION``, in evaluation mode.
            slots: sequences held at once.
            capacity: entries of one slot: longest sequence plus draft rows.
            shape: of the local heads and layers; None: of the whole model.
            fixed_rows: rows of every forward pass, padded or split (see ``engine.forward.exactness``); None: any number.
            kept: additional slots for the prefixes of ended sequences; None: see ``engine.loading.memory.default_slots``.

        Raises:
            ModelLoadError: the KV slots do not fit, or the model's layers do not use the attention function.
        """
        self.model = model
        self.grammars: Grammars | None = None  # for the model's tokenizer, if it is of a known kind
        if model.device.type == "cpu":
            model.set_experts_implementation("eager")  # each expert's rows are rows of a linear layer
        states = outline(model.config).states if bind_mixers(model) else {}
        if states:
            _refuse_states(model)
        sites = outline(model.config).sites(model.dtype) if states else []
        if shape is None:
            shape = kv_shape(model)
        if self._by_rows:
            shape = laid_out(shape)
        self.sequences = slots  # per forward pass; slots for kept prefixes come on top
        if kept is None:
            slot_bytes = shape.bytes_per_token() * capacity + (StateCache.bytes_of(sites, slots) // slots if sites else 0)
            kept = default_slots(slots, slot_bytes, left_bytes(model.device))
        slots += kept
        size = shape.bytes_per_token() * slots * capacity + (StateCache.bytes_of(sites, slots) if sites else 0)
        try:
            if model.device.type == "cpu" and size > free_bytes():  # allocation would succeed; writing would kill the process
                raise MemoryError
            self.cache = cache(shape, slots, capacity)
            if sites:
                self.cache.add_states(StateCache(sites, slots))
        except (MemoryError, RuntimeError) as error:  # torch's out-of-memory errors are RuntimeErrors on CPU and CUDA
            what = "the KV slots and states" if sites else "the KV slots"
            option = "engine.kv_slots" if slots > self.sequences else "engine.max_running"
            need = f"{what} need {size / 2**30:.1f} GiB, which {model.device} does not have"
            raise ModelLoadError(f"{need}: lower model.max_model_len or {option}") from error
        self._ropes = ropes_by_row(model)
        if row_linears(model):  # the weights of a model that another runner uses must not move
            release_memory(model)
        patch_modules(model)
        if states:
            round_expert_rows_apart(model, {number: shape.heads for number, shape in states.items() if shape.delta})
        self._device, self._dtype = model.device, model.dtype  # the model's properties search its parameters
        self._compiled = RowAttention.over(self.cache)
        self.fixed_rows = fixed_rows
        self._states = None
        if states:
            assert self.cache.states is not None and fixed_rows is None, "see ``make_runner``"
            self._states = States(states, self.cache.states, model.dtype)
        self._asked: tuple[int, list[int]] | None = None  # attention layers and state sites of the last forward pass
        windows = self._probe()
        self._whole = FusedForward.over(model, self.cache, windows, self._states) if fixed_rows is None else None

    def _probe(self) -> dict[int, int | None]:
        """Compute one row, so that an unsupported model fails at start; return the layers' attention windows."""
        zero = np.zeros(1, np.int64)
        batch = Batch(zero, zero, (SequenceRows(0, 0, 0, 1, None),), zero, (0,))
        try:
            context = self._context(batch)
            self._forward(context, zero, zero)
        except (RuntimeError, TypeError) as error:
            if isinstance(error, ModelLoadError):
                raise
            raise ModelLoadError(f"{type(self.model).__name__} cannot be served: a first forward failed: {error}") from error
        return context.windows

    @torch.inference_mode()
    def adapt(self, adapters: Sequence[Adapter]) -> None:
        """Add LoRA adapters that segments may name, at most once. Raises ``ModelLoadError`` if an adapter does not fit."""
        if not adapters:
            return
        self._adapters = Adapters(self.model, adapters)
        if self._whole is not None:
            self._whole.adapt(self._adapters)
        rows = np.arange(min(_PROBE_ROWS, self.fixed_rows or _PROBE_ROWS, self.cache.capacity))
        for adapter in adapters:
            segment = SequenceRows(0, 0, 0, len(rows), None, adapter=adapter.name)
            self._modules(Batch(rows, rows, (segment,), rows[:1], (0,)))  # records in ``called`` which layers run as modules
        missed = sorted(self._adapters.layers - self._adapters.called)
        if missed:
            name = type(self.model).__name__
            raise ModelLoadError(f"{name} does not compute {missed[0]} as a module: no adapter can change it")
        self.cache.prefixes.clear()

    def calibration_key(self) -> dict[str, Any]:
        """Return the properties that step times depend on, as JSON values."""
        compiled = any(module._compiled_call_impl is not None for module in self.model.modules())
        kinds = sorted({weight.kind for weight in self.model.parameters() if type(weight) is PackedWeight})
        return {"rows": self.fixed_rows, "graphs": None, "compiled": compiled} | ({"packed": kinds} if kinds else {})

    @property
    def full_rows(self) -> tuple[int, ...]:
        """Return the step sizes, in rows, beyond which one more row needs another or a slower forward pass."""
        return () if self.fixed_rows is None else tuple(self.fixed_rows * count for count in (1, 2, 3))

    @property
    def rope(self) -> LengthRope | None:
        """Return how the model's RoPE depends on the sequence length; None if it does not."""
        return self._ropes[0].rope if self._ropes else None

    def _position_kwargs(self, positions: torch.Tensor) -> dict[str, Any]:
        """Return extra model arguments: Llama 4 scales queries by position and takes the positions from its cache."""
        scales = getattr(self.model.config.get_text_config(), "attn_temperature_tuning", None)
        return {"past_key_values": PositionOnlyCache(positions)} if scales else {}

    def entries(self, slot: int, length: int, layers: int) -> torch.Tensor:
        """Return a copy of the first attention layers' keys and values, [length, layers, kv_heads, head_dim + value_dim]."""
        # With recurrent states: the attention layers of the last forward pass.
        layers = layers if self._asked is None else self._asked[0]
        return torch.cat([entries[:layers] for entries in self.cache.entries(slot, length)], -1).movedim(2, 0)

    def state(self, slot: int) -> torch.Tensor:
        """Return a copy of the slot's state in the layers of the last forward pass, [n] bytes; empty without states."""
        found = [torch.empty(0, dtype=torch.uint8)]
        if self.cache.states is not None and self._asked is not None:
            found += [self.cache.states.state(slot, site) for site in self._asked[1]]
        return torch.cat(found)

    def _context(self, batch: Batch) -> StepContext:
        positions = torch.from_numpy(self._padded(batch.positions)).to(self._device)
        by_row = self.fixed_rows is not None or self._device.type == "cpu"
        states = None if self._states is None else self._states.begin(batch.segments)
        return StepContext(batch, self.cache, positions, self._dtype, self._compiled, by_row, states)

    def _padded(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return [rows] values, padded with zeros to ``fixed_rows`` if it is set."""
        missing = 0 if self.fixed_rows is None else self.fixed_rows - len(values)
        return np.concatenate((values, np.zeros(missing, np.int64))) if missing else values

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute all rows, store their KV and return the logits of ``logit_rows``, [len(batch.logit_rows), vocab]."""
        with accelerator().current(self._device):  # streams and graphs belong to the thread's current device
            return self._in_parts(batch)

    def _in_parts(self, batch: Batch) -> torch.Tensor:
        if self.fixed_rows is None or len(batch.token_ids) <= self.fixed_rows:
            return self._compute(batch)
        logits = computed = torch.empty(0)
        for part, places in cut(batch, self.fixed_rows):
            computed = self._compute(part)
            if len(places):  # places are adjacent
                if not len(logits):
                    logits = computed.new_empty(len(batch.logit_rows), computed.shape[1])
                logits[places[0] : places[-1] + 1] = computed
        return logits if len(logits) else computed

    def _compute(self, batch: Batch) -> torch.Tensor:
        if self._whole is not None and not (self.model._forward_hooks or self.model._forward_pre_hooks):
            logits, self.hidden = self._whole.forward(batch), self._whole.hidden
            if self._states is not None:
                self._asked = self._whole.asked
            return logits
        self.hidden = None
        return self._modules(batch)

    def _modules(self, batch: Batch) -> torch.Tensor:
        if self._adapters is None:
            return self._forward(self._context(batch), batch.token_ids, batch.logit_rows)
        with self._adapters.rows(adapters_of(batch, self._adapters.numbers)):
            return self._forward(self._context(batch), batch.token_ids, batch.logit_rows)

    @torch.inference_mode()
    def _forward(self, context: StepContext, token_ids: npt.NDArray[np.int64], logit_rows: npt.NDArray[np.int64]) -> torch.Tensor:
        device, keep = self._device, logit_rows
        if self.fixed_rows is not None and len(logit_rows):
            keep = np.arange(self.fixed_rows)
        for rotation in self._ropes:
            rotation.lengths = rotation.rope.lengths(context.segments, context.positions.cpu().numpy())
        try:
            output = self.model(
                input_ids=torch.from_numpy(self._padded(token_ids))[None].to(device),
                position_ids=context.positions[None],
                use_cache=False,
                logits_to_keep=torch.from_numpy(keep).to(device),
                tree_step=context,
                **self._position_kwargs(context.positions),
            )
        finally:
            for rotation in self._ropes:
                rotation.lengths = None
        if context.states is not None:
            context.states.finish()
            self._asked = len(context.windows), context.states.asked
        logits: torch.Tensor = output.logits[0]
        return logits[: len(logit_rows)] if self.fixed_rows is None else wanted_rows(logits, logit_rows)


class PositionOnlyCache:
    """Minimal ``Cache`` replacement that reports per-row positions to models that call ``get_seq_length`` (Llama 4)."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._before = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer: int = 0) -> torch.Tensor:
        """Return each row's position minus its index in the forward pass, [rows]."""
        return self._before

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values; the attention function stores them."""
        return keys, values


def wanted_rows(logits: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return the given rows of [n, vocab] logits, [m, vocab]; a view if they are adjacent."""
    if not len(rows) or (np.diff(rows) == 1).all():
        first = int(rows[0]) if len(rows) else 0
        return logits[first : first + len(rows)]
    return logits[torch.from_numpy(rows).to(logits.device)]
