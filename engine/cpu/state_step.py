"""Recurrent states of a running step, with the interface of a model's mixers; see ``engine.cpu.walk_kernel``."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.engine.cpu.linear import DTYPES
from outrider.engine.cpu.threads import Kernel
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.batch import AttentionCall, SequenceRows
from outrider.engine.kv.state_cache import StateCache, StatePlan, StateSite

if TYPE_CHECKING:  # it imports numba
    from outrider.engine.cpu.walk_kernel import NativeWalk

_WIDTH = 16  # elements of a vector
_WORTH_THREADS = 1 << 16  # elements to compute: some microseconds, about the cost of waking a thread
_NO_TREE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class StateShape:
    """Dimensions of a site, which is one convolution or rule of a mixer."""

    reach: int = 0  # rows before each that a convolution sees
    channels: int = 0
    key_heads: int = 0
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    delta: bool = False  # whether the rule is the delta rule

    def site(self, dtype: torch.dtype) -> StateSite:
        """Return the bytes that a site keeps for a model of a dtype."""
        wide = dtype.itemsize
        if self.channels:
            return StateSite(self.reach * self.channels * wide, self.channels * wide)
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        return StateSite(values * self.key_dim * 4, (keys + values) * wide + 2 * self.heads * 4)


class Survey:
    """Stand-in for a running step during a first forward pass that records attention calls and state sites."""

    def __init__(self) -> None:
        self.shapes: dict[int, StateShape] = {}
        self.calls: list[AttentionCall] = []  # attention calls, in order
        self.states = self

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Record the call and return zeros, see ``engine.forward.attention.Attending``."""
        self.calls.append(call)
        return torch.zeros_like(call.query).transpose(1, 2)

    def check(self) -> None:
        """Raise ``ModelLoadError`` without any attention call or state site, or if attention heads differ between layers."""
        if not self.calls or not self.shapes:
            raise ModelLoadError("its layers do not pass arguments on to their attention and state functions")
        heads = {(call.key.shape[1], call.key.shape[3], call.value.shape[3]) for call in self.calls}
        if len(heads) != 1:
            raise ModelLoadError(f"its layers have keys and values of {len(heads)} shapes, but KV slots support only one")

    def convolve(
        self, site: int, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        activation: str | None = None, **_: object,
    ) -> torch.Tensor:  # fmt: skip
        """Record a site, see ``StateStep``."""
        if activation not in (None, "silu", "swish"):
            raise ModelLoadError(f"it has a convolution with the activation {activation!r}, which is not supported")
        channels, taps = weight.shape
        self._add(site, StateShape(reach=taps - 1, channels=channels), channels)
        return hidden

    def delta_rule(
        self, site: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, None]:
        """Record a site, see ``StateStep``."""
        self._add_rule(site, key, value, delta=True)
        return torch.zeros_like(value), None

    def space_rule(
        self, site: int, hidden: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """Record a site, see ``StateStep``."""
        self._add_rule(site, B, hidden, delta=False)
        return torch.zeros_like(hidden, dtype=torch.float32, memory_format=torch.contiguous_format)

    def _add_rule(self, site: int, key: torch.Tensor, value: torch.Tensor, delta: bool) -> None:
        (key_heads, key_dim), (heads, value_dim) = key.shape[2:], value.shape[2:]
        self._add(site, StateShape(0, 0, key_heads, heads, key_dim, value_dim, delta), key_dim, value_dim)

    def _add(self, site: int, shape: StateShape, *sizes: int) -> None:
        if any(size % _WIDTH for size in sizes):
            raise ModelLoadError(f"it has layers with a state of sizes {sizes}, which must be multiples of {_WIDTH}")
        self.shapes[site] = shape


class States:
    """State cache and constants of one model's recurrent layers."""

    def __init__(self, shapes: Mapping[int, StateShape], cache: StateCache, dtype: torch.dtype) -> None:
        """Create the states; the cache has one site per shape, in the order of their numbers."""
        self.cache, self.dtype, self.shapes = cache, DTYPES[dtype], shapes
        self.places = {number: at for at, number in enumerate(sorted(shapes))}
        self.reach = max((shape.reach for shape in shapes.values()), default=0)
        self._constants: dict[tuple[int, str], torch.Tensor] = {}
        _kernels(self.dtype)  # compile now, so that no request waits for it
        # A first step compiles the walks, too.
        self.begin([SequenceRows(0, 0, 0, 1, None, (), np.full(1, -1, np.int32))])
        cache.forget(0)

    def begin(self, segments: Sequence[SequenceRows]) -> StateStep:
        """Return a step over some requests' rows."""
        return StateStep(self, segments, self.cache.begin(segments))

    def constant(self, site: int, name: str, value: torch.Tensor | None) -> int:
        """Return the address of a weight's float32 copy, made once; 0 for None."""
        if value is None:
            return 0
        found = self._constants.get((site, name))
        if found is None:
            found = self._constants[site, name] = value.detach().float().clone(memory_format=torch.contiguous_format)
        return found.data_ptr()


@cache
def _kernels(dtype: str) -> tuple[Kernel, Kernel, Kernel]:
    from outrider.engine.cpu.convolution_kernel import convolution_entry  # needs numba
    from outrider.engine.cpu.recurrence_kernel import rule_entry

    entries = convolution_entry(dtype), rule_entry(dtype, dtype), rule_entry(dtype, "float32")
    found = tuple(Kernel(entry.address) for entry in entries)
    return found[0], found[1], found[2]


class StateStep:
    """Recurrent states in one forward pass."""

    def __init__(self, states: States, segments: Sequence[SequenceRows], plans: Sequence[StatePlan]) -> None:
        from outrider.engine.cpu.walk_kernel import NativeWalk

        self._states, self._segments, self._plans = states, segments, plans
        self._rows = sum(segment.rows for segment in segments)
        # The walks refer to these arrays by address.
        self._kept: list[object] = []
        self.asked: list[int] = []  # places of the sites that were called
        self._walks = (NativeWalk * len(segments))()
        for walk, segment, plan in zip(self._walks, segments, plans, strict=True):
            self._fill(walk, segment, plan)

    def _fill(self, walk: NativeWalk, segment: SequenceRows, plan: StatePlan) -> None:
        from outrider.engine.cpu.walk_kernel import walk_steps, walk_taps

        cache, reach = self._states.cache, self._states.reach
        parents = _NO_TREE if segment.parents is None else np.ascontiguousarray(segment.parents)
        assert 0 <= segment.slot < cache.slots and plan.keep <= cache.kept_rows, (segment, cache.kept_rows)
        path, saves = np.array(plan.path, np.int64), np.array(plan.saves, np.int64).reshape(-1, 2)
        steps = np.empty((len(path) + plan.spine + len(saves) + len(parents), 4), np.int64)
        taps, windows = np.empty((segment.rows, reach), np.int64), np.empty((len(saves) + 1, 1 + reach), np.int64)
        windows[-1, 0] = segment.slot
        walk.num_steps, walk.buffers = walk_steps(parents, plan.spine, path, saves, steps)
        walk_taps(parents, plan.spine, path, taps, saves, windows)
        self._kept += [steps, taps, windows]
        walk.slot, walk.fresh, walk.offset, walk.rows = segment.slot, plan.fresh, segment.offset, segment.rows
        walk.steps, walk.taps, walk.windows = steps.ctypes.data, taps.ctypes.data, windows.ctypes.data
        walk.most_taps, walk.num_windows = reach, len(windows)
        walk.keep_first, walk.keep_count = plan.spine, plan.keep

    @property
    def walks(self) -> tuple[int, int]:
        """Return the address and number of all requests' walks, valid as long as this object."""
        return ctypes.addressof(self._walks), len(self._walks)

    def finish(self) -> None:
        """Commit the states after all layers were computed."""
        self._states.cache.finish(self._segments, self._plans)

    def convolve(
        self, site: int, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        activation: str | None = None, **_: object,
    ) -> torch.Tensor:  # fmt: skip
        """Return a short causal convolution per channel, [1, channels, rows]; ``weight`` is [channels, taps]."""
        from outrider.engine.cpu.convolution_kernel import NativeConvolution

        states, cache = self._states, self._states.cache
        rows, place = hidden[0].t(), states.places[site]
        self.asked.append(place)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        (count, channels), wide = rows.shape, rows.element_size()
        output = torch.empty_like(rows, memory_format=torch.contiguous_format)
        if count > self._rows:
            output[self._rows :] = 0
        job = NativeConvolution(
            rows.data_ptr(), rows.stride(0) * wide, states.constant(site, "weight", weight.t()),
            states.constant(site, "bias", bias), output.data_ptr(), channels, weight.shape[1] - 1, activation is not None,
            cache.address(place), cache.place_bytes, cache.kept_address(place), cache.kept_rows,
            ctypes.addressof(self._walks), len(self._walks), 0,
        )  # fmt: skip
        _kernels(states.dtype)[0](job, _threads(self._rows * channels * weight.shape[1]))
        return output.t()[None]

    def delta_rule(
        self, site: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False, **_: object,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Compute transformers' ``torch_chunk_gated_delta_rule``, the gated delta rule: [1, rows, heads, value_dim], and None."""
        output = torch.empty(value.shape, dtype=value.dtype)
        self._rule(
            1, site, query, key, value, g, beta, output, delta=1, normalise=use_qk_l2norm_in_kernel,
            scale=query.shape[-1] ** -0.5,
        )  # fmt: skip
        return output, None

    def space_rule(
        self, site: int, hidden: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
        D: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")), **_: object,
    ) -> torch.Tensor:  # fmt: skip
        """Compute transformers' ``mamba2_chunk_scan``, the rule of Mamba-2: [1, rows, heads, head_dim] float32."""
        assert dt_softplus, "dt_softplus=False is not supported: see ``Survey``"
        output = torch.empty(hidden.shape, dtype=torch.float32)
        states, bias = self._states, torch.zeros_like(A) if dt_bias is None else dt_bias
        self._rule(
            2, site, C, B, hidden, dt, dt, output, delta=0, normalise=0, scale=1.0,
            bias=states.constant(site, "bias", bias), rates=states.constant(site, "rates", A),
            skip=states.constant(site, "skip", D), least=dt_limit[0], most=dt_limit[1],
        )  # fmt: skip
        return output

    def _rule(
        self, kernel: int, site: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor,
        rate: torch.Tensor, output: torch.Tensor, **more: Any,
    ) -> None:  # fmt: skip
        from outrider.engine.cpu.recurrence_kernel import NativeRule

        states, cache = self._states, self._states.cache
        place = states.places[site]
        self.asked.append(place)
        query, key, value = (_side_by_side(each[0]) for each in (query, key, value))
        decay, rate = (each[0].float().contiguous() for each in (decay, rate))
        count, heads, value_dim = value.shape
        if count > self._rows:
            output[:, self._rows :] = 0
        key_heads, key_dim = key.shape[1:]
        wide = value.element_size()
        job = NativeRule(
            query=query.data_ptr(), query_row=query.stride(0) * wide, key=key.data_ptr(), key_row=key.stride(0) * wide,
            value=value.data_ptr(), value_row=value.stride(0) * wide, decay=decay.data_ptr(), rate=rate.data_ptr(),
            output=output.data_ptr(), states=cache.address(place), place_bytes=cache.place_bytes,
            kept=cache.kept_address(place), kept_rows=cache.kept_rows, row_bytes=cache.sites[place].row_bytes,
            heads=heads, group=heads // key_heads, key_dim=key_dim, value_dim=value_dim,
            walks=ctypes.addressof(self._walks), num_walks=len(self._walks), **more,
        )  # fmt: skip
        _kernels(states.dtype)[kernel](job, _threads(self._rows * heads * key_dim * value_dim))


def _side_by_side(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] else rows.contiguous()


def _threads(numbers: int) -> int:
    return torch.get_num_threads() if numbers >= _WORTH_THREADS else 1
