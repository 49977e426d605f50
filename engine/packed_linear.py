"""Linear layers whose weights are laid out for the processor once, instead of at every call.

On a CPU oneDNN computes in bfloat16 on blocked weights. torch's own linear layer hands it the plain ones, and for the few rows
of a decoding step the rearranging takes longer than the product. The packed weights give the same bits.

oneDNN compiles a kernel for each number of rows, keeps up to a thousand of them, and each takes some milliseconds and most of a
megabyte. Steps have any number of rows, so a forward is given one of few: see ``padded_rows``.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

_ROWS = 8  # what the layout is chosen for: a root and a few drafted rows
_EXACT = 16  # rows up to which none is added: a step of one request
_STEPS = 4  # sizes from one power of two to the next


def padded_rows(rows: int) -> int:
    """The number of rows to compute for so many: as many up to 16, then the next of four sizes to each power of two.

    Example: 16 stay 16; 17 become 20, 33 become 40, 100 become 112, 512 stay 512.
    """
    if rows <= _EXACT:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _STEPS)
    return -(-rows // step) * step


class PackedLinear(torch.nn.Linear):
    """A linear layer with a second copy of its weight, in the layout of the processor.

    The plain weight stays: it may be tied to an embedding, and it is what checkpoints and fingerprints are made of.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        """Takes over the parameters of a bfloat16 layer on a CPU."""
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise.default(input, self._packed, self.bias, "none", [], "")


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the model computes in bfloat16 on a CPU for which torch has packed weights."""
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    needed = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return all(hasattr(torch.ops.mkldnn, name) for name in needed) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.inference_mode()
def pack_linears(model: PreTrainedModel) -> int:
    """Replaces the plain linear layers of a model in place, where ``can_pack``; returns how many.

    It takes the memory of their weights once more.
    """
    if not can_pack(model):
        return 0
    plain = [(name, module) for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    for name, module in plain:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PackedLinear(module))
    return len(plain)


def unpack_linears(model: PreTrainedModel) -> int:
    """Puts plain linear layers in the places of packed ones, for who changes their weights; returns how many there were."""
    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    for name, module in packed:
        plain = torch.nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
        plain.weight, plain.bias = module.weight, module.bias
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, plain)
    return len(packed)
