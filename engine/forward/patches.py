"""Replacements inside a stock transformers model, in place, and the kinds that this module makes (``patch_modules``).

Results are those of the model's own code up to rounding, and no number of a row depends on the number of rows. transformers
itself is not changed.

    in the model                 replacement                          reason
    attention function           attention.tree_attention             KV slots; a row sees its ancestors in a draft tree
    cache (Llama 4 only)         runner.PositionOnlyCache             it scales queries by positions that it asks the cache for
    list of layers               WholeList                            torch makes a new list of every slice
    RMS norms, on CPUs           CompiledNorm                         Python calls take as long as the arithmetic
    activations, on CPUs         RowActivation                        torch computes the last elements by another function
    search for padding           do_not_warn                          it makes a GPU synchronize in every forward pass
    RoPE that depends on length  rope.RowRope                         frequencies by row, not by the greatest position
    weights, on CPUs             cpu.linear.row_linears               products in text order; ``Conv1D`` becomes ``Linear``
    matrices of a GGUF file      loading.weights.packing.keep_blocks  weights stay quantized
    ``forward`` of mixers        cpu.mixers.bind_mixers               states in slots, advanced along draft trees
    gates of mixers and experts  cpu.mixers.FilledRows, ApartRows     as for activations
    implementation of experts    runner.ModelRunner: "eager"          an expert's rows are rows of a linear layer
    linear layers with adapters  cpu.lora.Adapters (forward hooks)    each row has the adapter of its request
    layers, engine.compile       runners.compile_layers               fewer kernels in a CUDA graph
    list of layers, for a check  exactness.first_layers               shortened for the time of the check
    all modules, known families  cpu.fused_forward.FusedForward       one call for all layers; the modules keep the weights

Paths are in ``engine/forward`` or ``engine``. ``actors/sharded`` replaces what ranks divide, ``loading.weights.gguf`` what reads.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from outrider.engine.cpu.linear import DTYPES, has_kernels
from outrider.engine.cpu.threads import Kernel

_PROBE_ROWS = 32
_REGISTERS = 64  # elements that torch computes at once: two registers of bfloat16
_PART, _GELU_PART = 32768, 16384  # elements from which on torch uses several threads
_DIFFERING = 0.01  # share of a norm's elements that may round differently, because the order of additions differs


class CompiledNorm(torch.nn.Module):
    """RMS norm of Llama's or Gemma's kind, in one call of compiled code."""

    def __init__(self, weight: torch.nn.Parameter, epsilon: float, above: float | None = None) -> None:
        """Take over the weight of a norm, [size] of a dtype in ``DTYPES``, with size a multiple of 16."""
        super().__init__()
        self.weight, self.variance_epsilon, self._size = weight, epsilon, weight.shape[0]
        # A norm that rounds only its end result adds ``above`` to its weight, 1 in Gemma's.
        self.wide = above is not None
        self.factors: torch.Tensor = weight.detach() if above is None else weight.detach().float() + above  # factors as used

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return normalized hidden states, [..., size]."""
        weight, size = self.weight, self._size
        assert hidden_states.dtype == weight.dtype and hidden_states.shape[-1] == size, hidden_states.shape
        rows = hidden_states.contiguous()
        output = torch.empty_like(rows)
        kernel, job = _norm_kernel(DTYPES[weight.dtype])
        count, factors = rows.numel() // size, self.factors.data_ptr()
        kernel(job(rows.data_ptr(), factors, output.data_ptr(), count, size, self.variance_epsilon, self.wide))
        return output


@cache
def _norm_kernel(dtype: str) -> tuple[Kernel, Callable[..., ctypes.Structure]]:
    """Return the compiled function, which is cached here and not in a module, so that models can be copied and pickled."""
    from outrider.engine.cpu.norm_kernel import Norm, entry_point  # needs numba

    return Kernel(entry_point(dtype).address), Norm


class RowActivation(torch.nn.Module):
    """Element-wise activation that gives equal inputs equal bits at every index."""

    def __init__(self, activation: torch.nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the activation, of the same shape."""
        input = input.contiguous()
        count = input.numel()
        # torch computes the last elements of each thread's part, fewer than two registers, by another function.
        filled = whole_parts(count)
        if filled == count:
            output: torch.Tensor = self.activation(input)
            return output
        filled_up: torch.Tensor = self.activation(torch.nn.functional.pad(input.view(-1), (0, filled - count)))
        return filled_up[:count].view(input.shape)


def whole_parts(count: int, size: int = 1) -> int:
    """Return the least number of rows of ``size`` elements >= ``count`` that torch splits into parts of whole registers."""
    threads = torch.get_num_threads()
    while True:
        parts, of_gelu = min(threads, max(1, -(-count * size // _PART))), threads if count * size > _GELU_PART else 1
        step = _REGISTERS * math.lcm(parts, of_gelu)
        step //= math.gcd(step, size)
        if count % step == 0:
            return count
        count += step - count % step


class WholeList(torch.nn.ModuleList):
    """List of layers that returns itself for a full slice; torch makes a new ``ModuleList`` for every slice."""

    def __getitem__(self, index: Any) -> Any:
        """See ``torch.nn.ModuleList``."""
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)


_ACTIVATIONS = {kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()}


@torch.inference_mode()
def patch_modules(model: PreTrainedModel) -> int:
    """Replace a model's list of layers and, on a CPU, norms and activations in place; return the number of replaced modules."""
    do_not_warn(model)
    replaced: dict[str, torch.nn.Module] = {}
    layers = model.config.get_text_config().num_hidden_layers
    held = {id(module.activation) for module in model.modules() if isinstance(module, RowActivation)}
    for name, module in model.named_modules():
        if type(module) is torch.nn.ModuleList and len(module) == layers and len({type(layer) for layer in module}) == 1:
            replaced[name] = WholeList(module)
        elif type(module).__name__.endswith("RMSNorm"):
            compiled = _compiled_norm(module)
            if compiled is not None:
                replaced[name] = compiled
        elif model.device.type == "cpu" and type(module) in _ACTIVATIONS and id(module) not in held:
            replaced[name] = RowActivation(module)
    for name, module in sorted(replaced.items(), key=lambda item: -item[0].count(".")):  # members of a list before the list
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
    return len(replaced)


def do_not_warn(model: PreTrainedModel) -> None:
    """Disable the model's search for padding, which is never present and makes a GPU synchronize in every forward pass."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _unwarned


def _unwarned(*_: object) -> None:
    pass


def _compiled_norm(norm: torch.nn.Module) -> CompiledNorm | None:
    """Return the replacement of an RMS norm, if a probe gives the same result: different norms have the same name."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, torch.nn.Parameter) or not isinstance(epsilon, float):
        return None
    if not has_kernels(weight.device, weight.dtype) or weight.dim() != 1 or weight.shape[0] % 16:
        return None
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBE_ROWS, weight.shape[0], generator=generator).to(weight.dtype)
    expected = norm(probe)
    for above in (None, 1.0):
        compiled = CompiledNorm(weight, epsilon, above)
        if _agree(compiled(probe), expected):
            return compiled
    return None


def _agree(given: torch.Tensor, expected: torch.Tensor) -> bool:
    half = given.dtype != torch.float32
    close = torch.allclose(given, expected, rtol=1e-2 if half else 1e-5, atol=1e-6)
    return close and not (half and (given != expected).double().mean().item() >= _DIFFERING)
