"""Matrices that stay block-quantized in memory and are unpacked one panel at a time when they are multiplied."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from outrider.engine.cpu.block_formats import FORMATS, PANEL, BlockFormat, Blocks, packed
from outrider.engine.cpu.linear import DTYPES, SHAPE_FUNCTIONS, linear, pair_of
from outrider.engine.cpu.threads import Kernel

_TOGETHER = 128  # panels packed or unpacked at once


class PackedWeight(torch.Tensor):
    """Constant matrix [outputs, size] of quantized blocks (``block_formats``); operations but products get an unpacked copy."""

    kind: str  # name of its format
    panels: torch.Tensor  # [panels, bytes of a panel] uint8

    @staticmethod
    def of(parts: Iterator[Blocks], name: str, outputs: int, size: int, dtype: torch.dtype) -> PackedWeight:
        """Pack quantized rows, given in order in parts of ``PART_ROWS``; ``size`` is a multiple of the format's block."""
        form, count = FORMATS[name], -(-outputs // PANEL)
        assert size % form.block == 0, (size, form)
        panels = torch.empty(count, size // form.block * form.block_bytes, dtype=torch.uint8)
        at = 0
        for part in parts:
            laid = packed(part, form, pair_of(dtype)).reshape(-1, panels.shape[1])
            panels[at : at + len(laid)] = torch.from_numpy(laid)
            at += len(laid)
        assert at == count, (at, count)
        return _over(panels, name, (outputs, size), dtype)

    @property
    def form(self) -> BlockFormat:
        """Return the format."""
        return FORMATS[self.kind]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the bytes of the packed memory."""
        return self.panels.nbytes

    def plain(self) -> torch.Tensor:
        """Return an unpacked copy in plain order."""
        return torch.cat([rows for _, rows in self.parts()])

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield unpacked copies of the rows in order, in parts, each with the index of its first row."""
        for first in range(0, len(self.panels), _TOGETHER):
            own = _unpacked(self, range(first, min(first + _TOGETHER, len(self.panels))))
            rows = own.transpose(1, 2).reshape(-1, self.shape[1])
            yield first * PANEL, rows[: self.shape[0] - first * PANEL]

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return some unpacked rows, [..., size], as an embedding does."""
        # Each panel is unpacked once, however many of its rows are wanted.
        panels, places = torch.unique(outputs // PANEL, return_inverse=True)
        return _unpacked(self, panels.tolist())[places, :, outputs % PANEL].flatten(-2)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = args[0] if args and type(args[0]) is PackedWeight else None
        if func is torch.nn.functional.linear and type(args[1]) is PackedWeight:
            return linear(*args, **kwargs)
        if func is torch.nn.functional.embedding and type(args[1]) is PackedWeight:
            return args[1].rows(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.detach and own is not None:
                return _over(own.panels, own.kind, tuple(own.shape), own.dtype)
            if func in SHAPE_FUNCTIONS or func is torch.Tensor.requires_grad_:
                return func(*args, **kwargs)
            if own is not None and func.__name__.endswith("_") and not func.__name__.endswith("__"):
                raise TypeError("weights in blocks cannot be changed in place")
            return func(*map(_usual, args), **{name: _usual(each) for name, each in kwargs.items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Copy the memory too, which torch's own copy does not."""
        memo[id(self)] = copied = _parameter(self.panels.clone(), self.kind, tuple(self.shape), self.dtype)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _parameter, (self.panels, self.kind, tuple(self.shape), self.dtype)


PART_ROWS = _TOGETHER * PANEL


def _over(panels: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> PackedWeight:
    # A tensor of the weight's shape without memory for it: the numbers are in ``panels``.
    made = torch.empty((), dtype=dtype).expand(shape).as_subclass(PackedWeight)
    made.panels, made.kind = panels, name
    return made


def _parameter(panels: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(_over(panels, name, shape, dtype), requires_grad=False)


def _usual(value: Any) -> Any:
    return value.plain() if type(value) is PackedWeight else value


def _unpacked(weight: PackedWeight, panels: range | list[int]) -> torch.Tensor:
    """Return unpacked panels, [panels, size / pair, PANEL, pair]."""
    kernel, job_type = _kernel(DTYPES[weight.dtype], weight.kind)
    pair, size = pair_of(weight.dtype), weight.shape[1]
    target = torch.empty(len(panels), size // pair, PANEL, pair, dtype=weight.dtype)
    sources = weight.panels.data_ptr() + np.array(panels, np.int64) * weight.panels.shape[1]
    kernel(job_type(weight.form.number, sources.ctypes.data, len(panels), size, target.data_ptr()))
    return target


@cache
def _kernel(dtype: str, kind: str) -> tuple[Kernel, Callable[..., ctypes.Structure]]:
    from outrider.engine.cpu.block_kernel import Unpacking, entry_point  # needs numba

    return Kernel(entry_point(dtype, (kind,)).address), Unpacking
