"""CPU products of rows with a model's weights by compiled code; see ``engine.cpu.linear_kernel``."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.decoding.jit import NATIVE
from outrider.engine.cpu.block_formats import PANEL
from outrider.engine.cpu.threads import Kernel

if TYPE_CHECKING:
    from outrider.engine.cpu.packed_weight import PackedWeight

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
STEPS = 2  # the inner size is a multiple of this many numbers, in bfloat16 of pairs
COUNTER = 64  # bytes between thread counters: one cache line each
_WORTH_THREADS = 1 << 18  # products: some microseconds on one thread, about the cost of waking another


@cache
def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether compiled code exists for a device and dtype."""
    if not NATIVE or device.type != "cpu" or dtype not in DTYPES:
        return False
    from outrider.engine.cpu.simd import FEATURES

    return dtype != torch.float16 or "+f16c" in FEATURES or platform.machine() in ("aarch64", "arm64")


class PanelWeight(torch.Tensor):
    """Weight matrices stored in the order in which ``linear`` reads them, of shape [..., outputs, size].

    The memory holds zero-padded panels, [..., outputs / 32, size / pair, 32, pair] with pairs in bfloat16.
    """

    _float32: PanelWeight | None = None

    @classmethod
    def of(cls, weight: torch.Tensor) -> PanelWeight:
        """Return a copy of weights [..., outputs, size], of a dtype in ``DTYPES``, in panels."""
        outputs, size = weight.shape[-2:]
        multiple = STEPS * pair_of(weight.dtype)
        whole = -(-outputs // PANEL) * PANEL, -(-max(size, 1) // multiple) * multiple
        made = weight.new_empty(*weight.shape[:-2], *whole)[..., :outputs, :size].as_subclass(PanelWeight)
        made._write(weight)
        return made

    def _panels(self) -> torch.Tensor:
        """Return the panels, [..., panels, size / pair, 32, pair], including padding."""
        plain = self.as_subclass(torch.Tensor)
        *leading, wide, _ = plain.stride()
        pair, count = pair_of(plain.dtype), -(-plain.shape[-2] // PANEL)
        shape = (*plain.shape[:-2], count, wide // pair, PANEL, pair)
        return plain.as_strided(shape, (*leading, PANEL * wide, PANEL * pair, pair, 1))

    def _write(self, weight: torch.Tensor) -> None:
        outputs, size = weight.shape[-2:]
        panels = self._panels()
        *leading, count, steps, _, pair = panels.shape
        padding = (0, steps * pair - size, 0, count * PANEL - outputs)
        filled = torch.nn.functional.pad(weight, padding) if any(padding) else weight.contiguous()
        filled = filled.view(*leading, count, PANEL, steps, pair)
        if pair == 2:  # torch copies one number of four bytes several times as fast as two of two bytes
            panels, filled = panels.view(torch.int32), filled.view(torch.int32)
        panels.copy_(filled.transpose(-3, -2))

    def plain(self) -> torch.Tensor:
        """Return a copy in plain order."""
        panels = self._panels()
        *leading, count, steps, _, pair = panels.shape
        filled = panels.transpose(-3, -2).reshape(*leading, count * PANEL, steps * pair)
        return filled[..., : self.shape[-2], : self.shape[-1]]

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the rows of some outputs of a single matrix, [..., size], as an embedding does."""
        found = self._panels()[outputs // PANEL, :, outputs % PANEL]
        return found.flatten(-2)[..., : self.shape[1]]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAME_KIND:
            return super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.__getitem__ and args[0].dim() > 2 and _is_number(args[1]):
            return super().__torch_function__(func, types, (args[0], int(args[1])), kwargs)
        if func in _CASTS and args[1:] == (torch.float32,) and not kwargs:  # of a router's weight, in every forward pass
            return args[0]._in_float32()
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.nn.functional.linear and type(args[1]) is PanelWeight:
                return linear(*args, **kwargs)
            if func is torch.nn.functional.embedding and type(args[1]) is PanelWeight:
                return args[1].rows(args[0])
            if func in _PRODUCTS and type(args[1]) is TurnedWeight and args[1].dim() == 2:
                return linear(args[0], args[1])
            if func in SHAPE_FUNCTIONS:
                return func(*args, **kwargs)
            # Operations other than products, embeddings and selection of a matrix get a copy in plain order, which is written
            # back if they work in place.
            changed = [each for each in args[:1] if isinstance(each, PanelWeight) and _in_place(func)]
            found = func(*map(_usual, args), **{name: _usual(each) for name, each in kwargs.items()}) if not changed else None
            for weight in changed:
                usual = weight.plain()
                func(usual, *map(_usual, args[1:]), **kwargs)
                weight._write(usual)
                found = weight
            return found

    def _in_float32(self) -> PanelWeight:
        if self.dtype == torch.float32:
            return self
        if self._float32 is None:
            self._float32 = type(self).of(self.plain().float())
        return self._float32

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Copy the memory too, which torch's own copy does not."""
        memo[id(self)] = copied = _parameter(self.plain(), type(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _parameter, (self.plain(), type(self))


class TurnedWeight(PanelWeight):
    """Weight matrices [..., size, outputs], stored as their transpose; their torch shape is that of the memory."""

    @classmethod
    def of(cls, weight: torch.Tensor) -> TurnedWeight:
        """See ``PanelWeight``."""
        return PanelWeight.of(weight.mT).as_subclass(cls)

    def _write(self, weight: torch.Tensor) -> None:
        super()._write(weight.mT)

    def plain(self) -> torch.Tensor:
        """See ``PanelWeight``."""
        return super().plain().mT


def _parameter(weight: torch.Tensor, kind: type[PanelWeight]) -> torch.nn.Parameter:
    return torch.nn.Parameter(kind.of(weight), requires_grad=False)


def pair_of(dtype: torch.dtype) -> int:
    """Return the number of adjacent numbers of an output."""
    return 2 if dtype == torch.bfloat16 else 1


def _is_number(index: Any) -> bool:
    return type(index) is int or (type(index) is torch.Tensor and index.dim() == 0 and index.dtype == torch.int64)


def _usual(value: Any) -> Any:
    return value.plain() if isinstance(value, PanelWeight) else value


def _in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


_CASTS = (torch.Tensor.type, torch.Tensor.to)
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_SAME_KIND = (torch.Tensor.detach, torch.Tensor.requires_grad_)
SHAPE_FUNCTIONS = {
    *(getattr(torch.Tensor, name) for name in (
        "dim", "size", "numel", "nelement", "element_size", "stride", "storage_offset", "data_ptr", "untyped_storage",
        "is_floating_point", "is_complex", "__len__",
    )),
    *(getattr(torch.Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta", "itemsize", "nbytes", "grad", "is_leaf",
        "grad_fn", "is_cuda", "is_sparse", "is_quantized",
    )),
}  # fmt: skip


_NO_PRODUCTS = (torch.nn.Embedding, torch.nn.modules.conv._ConvNd)


def linear(input: torch.Tensor, weight: PanelWeight | PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``torch.nn.functional.linear`` for one dtype in ``DTYPES``; a row's bits do not depend on the other rows."""
    memory = weight.as_subclass(torch.Tensor)
    (outputs, size), wide = memory.shape, memory.stride(0) or weight.shape[1]
    assert input.dtype == memory.dtype and input.shape[-1] == size, (input.dtype, memory.dtype, input.shape, memory.shape)
    kernel, job_type = _kernel(DTYPES[input.dtype], getattr(weight, "kind", None))
    if not size:  # empty tensors have no address
        return torch.nn.functional.linear(input, weight.plain(), bias)
    rows = input.reshape(math.prod(input.shape[:-1]), size)
    if wide > size:
        rows = torch.nn.functional.pad(rows, (0, wide - size))
    elif rows.stride(1) != 1:
        rows = rows.contiguous()
    count, of_number = rows.shape[0], input.element_size()
    output = input.new_empty(count, outputs)
    bias = None if bias is None else filled_up(bias)
    threads = torch.get_num_threads() if count * outputs * size >= _WORTH_THREADS else 1
    taken = ctypes.create_string_buffer(COUNTER * (threads + 1))
    address, form = where_it_lies(weight)
    scratch = rows.new_empty(unpacked_numbers(wide, threads) if form else 0)
    job = job_type(
        rows.data_ptr(), rows.stride(0) * of_number, address, 0 if bias is None else bias.data_ptr(), 0, 0, 0,
        output.data_ptr(), outputs * of_number, count, wide, outputs, threads, ctypes.addressof(taken), form, 0,
        scratch.data_ptr(),
    )  # fmt: skip
    kernel(job, threads)
    return output.view(*input.shape[:-1], outputs)


def where_it_lies(weight: torch.Tensor) -> tuple[int, int]:
    """Return the address of a weight's panels and the number of their format, 0 if not packed."""
    panels = getattr(weight, "panels", None)
    return (weight.data_ptr(), 0) if panels is None else (panels.data_ptr(), weight.form.number)  # type: ignore[attr-defined]


def unpacked_numbers(size: int, threads: int) -> int:
    """Return how many numbers of scratch space threads need to unpack panels of rows of a size, and those of a gate."""
    return 2 * threads * PANEL * size


def filled_up(bias: torch.Tensor) -> torch.Tensor:
    """Return a bias zero-padded to whole panels."""
    missing = -len(bias) % PANEL
    return torch.nn.functional.pad(bias, (0, missing)) if missing else bias.contiguous()


@cache
def _kernel(dtype: str, kind: str | None) -> tuple[Kernel, Callable[..., ctypes.Structure]]:
    """Return the compiled function, which is cached here and not in a module, so that models can be copied and pickled."""
    from outrider.engine.cpu.linear_kernel import Linear, entry_point  # needs numba

    return Kernel(entry_point(dtype, () if kind is None else (kind,)).address), Linear


@torch.no_grad()
def row_linears(model: PreTrainedModel) -> int:
    """Make ``linear`` compute a model's products, in place, if compiled code exists; return the number of converted weights."""
    if not has_kernels(model.device, model.dtype):
        return 0
    for name, module in list(model.named_modules()):
        if type(module) is Conv1D:
            parent, _, child = name.rpartition(".")
            # A ``Conv1D`` becomes a ``Linear``.
            setattr(model.get_submodule(parent), child, _as_linear(module))
    holders: dict[int, tuple[torch.nn.Parameter, list[tuple[torch.nn.Module, str]]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if type(parameter) is torch.nn.Parameter and parameter.dim() > 1 and parameter.dtype == model.dtype:
                holders.setdefault(id(parameter), (parameter, []))[1].append((module, name))
    made = 0
    while holders:  # each old weight is freed before the next one is converted
        _, (parameter, places) = holders.popitem()  # a shared weight stays shared
        if all(isinstance(module, _NO_PRODUCTS) for module, _ in places):
            continue
        turned = all(getattr(module, "is_transposed", False) for module, _ in places) and parameter.dim() == 3
        panels = _parameter(parameter.detach(), TurnedWeight if turned else PanelWeight)
        for module, name in places:
            setattr(module, name, panels)
        made += 1
    return made


def _as_linear(layer: Conv1D) -> torch.nn.Linear:
    inputs, outputs = layer.weight.shape
    made = torch.nn.Linear(inputs, outputs, device="meta")
    made.weight, made.bias = torch.nn.Parameter(layer.weight.detach().t(), requires_grad=False), layer.bias
    return made
