"""Products of rows with a model's weights on a CPU by compiled code: see ``engine.native.linear``.

The weights stay where they are, so that nothing is held twice, and who changes them need not say so.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decoding.jit import NATIVE
from engine.native.threads import on_threads

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_WORTH_THREADS = 1 << 18  # products: some microseconds on one thread, as much as it takes to wake another


@cache
def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is compiled code for a model of a type on a device."""
    if not NATIVE or device.type != "cpu" or dtype not in DTYPES:
        return False
    from engine.native.linear import FEATURES

    return dtype != torch.float16 or "+f16c" in FEATURES or platform.machine() in ("aarch64", "arm64")


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As ``torch.nn.functional.linear``; each row has the same bits whatever rows are computed with it.

    Args:
        input: [..., size], of a type in ``DTYPES``.
        weight: [outputs, size] of the same type.
        bias: [outputs].

    Returns:
        [..., outputs].
    """
    outputs, size = weight.shape
    group, kernel, address, job_type, counters = _kernel(DTYPES[input.dtype])
    assert input.dtype == weight.dtype and input.shape[-1] == size, (input.dtype, weight.dtype, input.shape, weight.shape)
    if outputs < group:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, group - outputs))
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, group - outputs))
        return linear(input, weight, bias)[..., :outputs]
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    rows = input.reshape(math.prod(input.shape[:-1]), size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count = rows.shape[0]
    output = input.new_empty(count, outputs)
    biases = _zeros(outputs) if bias is None else bias.float()
    threads = torch.get_num_threads() if count * outputs * size >= _WORTH_THREADS else 1
    taken = (ctypes.c_int64 * counters(threads))()
    wide = input.element_size()
    job = job_type(
        rows.data_ptr(), rows.stride(0) * wide, weight.data_ptr(), weight.stride(0) * wide, biases.data_ptr(), output.data_ptr(),
        outputs * wide, count, size, outputs, threads, ctypes.addressof(taken),
    )  # fmt: skip
    if threads == 1 or not on_threads(address, ctypes.addressof(job), threads):
        kernel(ctypes.addressof(job))
    return output.view(*input.shape[:-1], outputs)


@cache
def _kernel(dtype: str) -> tuple[int, Callable[[int], None], int, Callable[..., ctypes.Structure], Callable[[int], int]]:
    """The compiled function, which no module holds: a model can be copied and pickled."""
    from engine.native.linear import GROUP, Linear, counters, entry_point

    address: int = entry_point(dtype).address
    return GROUP, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), address, Linear, counters


_kept_zeros = torch.zeros(0)


def _zeros(count: int) -> torch.Tensor:
    """So many zeros at least."""
    global _kept_zeros
    if len(_kept_zeros) < count:
        _kept_zeros = torch.zeros(2 * count)
    return _kept_zeros


class RowLinear(torch.nn.Linear):
    """A linear layer by ``linear``."""

    def __init__(self, layer: torch.nn.Linear | Conv1D) -> None:
        """Takes over the parameters of a layer. A ``Conv1D``'s weight keeps its shape, and is laid out anew."""
        outputs, inputs = layer.weight.shape if isinstance(layer, torch.nn.Linear) else layer.weight.shape[::-1]
        super().__init__(inputs, outputs, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._turned = not isinstance(layer, torch.nn.Linear)
        if self._turned:
            self.weight.data = self.weight.data.t().contiguous().t()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return linear(input, self.weight.t() if self._turned else self.weight, self.bias)


class RowWeight(torch.Tensor):
    """A weight that its module hands to ``torch.nn.functional.linear`` itself, as routers and experts do."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``linear`` in the place of torch's. One expert of several is such a weight, too; other results are plain tensors."""
        if func in _SAME_KIND:
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return (linear if func is torch.nn.functional.linear else func)(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """As torch's own, which wants all that it makes on the way to be of this class."""
        memo[id(self)] = copied = torch.nn.Parameter(self.clone(), requires_grad=False)
        return copied


_SAME_KIND = (torch.Tensor.__getitem__, torch.Tensor.clone, torch.Tensor.detach, torch.Tensor.to)


@torch.inference_mode()
def row_linears(model: PreTrainedModel) -> int:
    """Has a model's products computed by ``linear``, in place, where there is compiled code; returns how many layers."""
    if not has_kernels(model.device, model.dtype):
        return 0
    replaced = 0
    for name, module in list(model.named_modules()):
        if type(module) in (torch.nn.Linear, Conv1D):
            if module.weight.dtype == model.dtype:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, RowLinear(module))
                replaced += 1
        elif not isinstance(module, torch.nn.Embedding | RowLinear):
            for own, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dim() > 1 and type(parameter) is torch.nn.Parameter and parameter.dtype == model.dtype:
                    weight = parameter.detach().as_subclass(RowWeight)
                    setattr(module, own, torch.nn.Parameter(weight, requires_grad=False))
                    replaced += 1
    return replaced
