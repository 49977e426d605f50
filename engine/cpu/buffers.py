"""Buffers for intermediate results of a forward pass, and the jobs that refer to them by address."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from outrider.decoding.arrays import SignedArray
from outrider.engine.cpu.linear import PANEL, filled_up, unpacked_numbers, where_it_lies

if TYPE_CHECKING:  # it imports numba
    from outrider.engine.cpu.linear_kernel import Linear


class RowBuffers:
    """Named row buffers and everything that operations point to; addresses never change."""

    def __init__(self, rows: int, threads: int, dtype: torch.dtype) -> None:
        self.rows, self.threads, self.dtype = rows, threads, dtype
        self._buffers: dict[str, torch.Tensor] = {}
        self._scratch: dict[int, torch.Tensor] = {}  # by row size, since threads may be in different operations
        self._kept: list[object] = []

    def make(self, name: str, size: int, dtype: torch.dtype | None = None) -> None:
        """Allocate [rows, size] once per name; dtype None: the model's."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self.rows, size, dtype=dtype or self.dtype)
        assert self._buffers[name].shape[1] == size, (name, size)

    def bits(self, name: str) -> SignedArray:
        """Return a buffer's memory as integers of the same width, [rows, size]."""
        buffer = self._buffers[name]
        bits: SignedArray = buffer.view(torch.int32 if buffer.element_size() == 4 else torch.int16).numpy()
        return bits

    def at(self, name: str, first: int = 0) -> int:
        """Return the address of element ``first`` of the first row."""
        buffer = self._buffers[name]
        return buffer.data_ptr() + first * buffer.element_size()

    def size(self, name: str) -> int:
        """Return the number of elements of a row."""
        return self._buffers[name].shape[1]

    def stride(self, name: str) -> int:
        """Return the bytes from one row to the next."""
        return self._buffers[name].shape[1] * self._buffers[name].element_size()

    def address_of(self, numbers: torch.Tensor | None) -> int:
        """Return the address of a tensor, which is kept alive; 0 for None."""
        if numbers is None:
            return 0
        self._kept.append(numbers)
        return numbers.data_ptr()

    def keep(self, job: ctypes.Structure) -> int:
        """Return the address of a job, which is kept alive."""
        self._kept.append(job)
        return ctypes.addressof(job)

    def scratch(self, size: int) -> int:
        """Return the address where threads unpack panels of rows of a size."""
        if size not in self._scratch:
            self._scratch[size] = torch.empty(unpacked_numbers(size, self.threads), dtype=self.dtype)
        return self._scratch[size].data_ptr()

    def panels_of(self, weight: torch.Tensor | None) -> tuple[int, int]:
        """Return ``where_it_lies`` of a weight, which is kept alive."""
        self._kept.append(weight)
        return (0, 0) if weight is None else where_it_lies(weight)

    def linear(
        self, layer: torch.nn.Linear, source: str, target: str, up: torch.nn.Linear | None = None, added: str = "",
        factor: float = 0.0, halves: bool = False,
    ) -> Linear:  # fmt: skip
        """Return the job of a product of rows with a linear layer.

        Args:
            layer: the layer; the gate if ``up`` or ``halves`` is given.
            up: second layer of a gated product.
            added: buffer that the outputs are added to, after a multiplication by ``factor`` unless that is 0.
            halves: the weight holds the gate, then ``up``.
        """
        from outrider.engine.cpu.linear_kernel import Linear

        outputs, size = layer.weight.shape
        (address, form), (up_address, up_form) = (self.panels_of(None if one is None else one.weight) for one in (layer, up))
        if halves:
            outputs //= 2
            panels = getattr(layer.weight, "panels", None)
            panel_bytes = PANEL * size * layer.weight.element_size() if panels is None else panels.nbytes // len(panels)
            up_address, up_form = address + outputs // PANEL * panel_bytes, form
        bias, up_bias = (None if each is None or each.bias is None else filled_up(each.bias) for each in (layer, up))
        return Linear(
            self.at(source), self.stride(source), address, self.address_of(bias), up_address, self.address_of(up_bias),
            self.at(added) if added else 0, self.at(target), self.stride(target), 0, size, outputs, 0, 0, form, up_form,
            self.scratch(size) if form or up_form else 0, factor,
        )  # fmt: skip

    def product(
        self, layer: torch.nn.Linear, source: str, target: str, up: torch.nn.Linear | None = None, added: str = "",
        factor: float = 0.0, halves: bool = False,
    ) -> int:  # fmt: skip
        """Return the address of the job of ``linear``."""
        return self.keep(self.linear(layer, source, target, up, added, factor, halves))

    def pairs(self, target: str, other: str, size: int = 0, first: int = 0, other_first: int = 0) -> int:
        """Return the address of a ``Pairs`` job on elements of each row of two buffers; size 0: all elements of the target."""
        from outrider.engine.cpu.forward_kernel import Pairs

        size = size or self.size(target)
        return self.keep(
            Pairs(self.at(target, first), self.stride(target), self.at(other, other_first), self.stride(other), 0, 1, size)
        )
