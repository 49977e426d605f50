"""LoRA adapters of a model's linear layers, added to the rows of their own requests; see ``lora_kernel``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from outrider.engine.cpu.linear import DTYPES, has_kernels
from outrider.engine.cpu.threads import Kernel
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.weights.adapters import Adapter

if TYPE_CHECKING:  # it imports numba
    from outrider.engine.cpu.lora_kernel import LowRank

_WORTH_THREADS = 1 << 18  # products: see ``linear``


class Adapters:
    """Numbered LoRA adapters of a model's linear layers; their factors are used in place."""

    def __init__(self, model: PreTrainedModel, adapters: Sequence[Adapter]) -> None:
        """Add hooks, active inside ``rows``, to the adapted layers. Raises ``ModelLoadError`` without kernels for the dtype."""
        if not has_kernels(model.device, model.dtype):
            dtype = str(model.dtype).removeprefix("torch.")
            raise ModelLoadError(
                f"model.adapters need compiled kernels, which do not exist for {dtype} on this machine: set model.dtype=float32"
            )
        self.numbers = {adapter.name: number for number, adapter in enumerate(adapters)}
        self._adapters, self._rows = adapters, _NO_ROWS
        self._called: set[str] = set()
        self._tables: dict[str, Any] = {}
        for name in {name for adapter in adapters for name in adapter.factors}:
            layer = model.get_submodule(name)
            assert isinstance(layer, torch.nn.Linear), (name, layer)
            self._tables[name] = self._table(name)
            layer.register_forward_hook(self._hook(name))

    @property
    def layers(self) -> set[str]:
        """Return the names of the layers with an adapter."""
        return set(self._tables)

    @property
    def called(self) -> set[str]:
        """Return the names of the layers that ran as modules for adapted rows."""
        return self._called

    @contextmanager
    def rows(self, adapters: npt.NDArray[np.int64] | None) -> Iterator[None]:
        """Apply the given adapters inside the context: [rows] numbers, -1 for none."""
        self._rows = _NO_ROWS if adapters is None else adapters
        try:
            yield
        finally:
            self._rows = _NO_ROWS

    def scratch_size(self) -> int:
        """Return the float32 scratch numbers that a row needs."""
        from outrider.engine.cpu.lora_kernel import WIDTH

        ranks = [factors.down.shape[1] for adapter in self._adapters for factors in adapter.factors.values()]
        return max(ranks) + WIDTH

    def job(self, name: str, layer: torch.nn.Linear, input: int, output: int, scratch: int) -> LowRank:
        """Return the job that adds to a layer's outputs, by addresses of input, outputs and scratch."""
        from outrider.engine.cpu.lora_kernel import LowRank

        outputs, size = layer.weight.shape
        table = ctypes.addressof(self._tables[name])
        return LowRank(table, input, output, scratch, self.scratch_size(), size, outputs, 0, 0, 0)

    def _table(self, name: str) -> Any:
        from outrider.engine.cpu.lora_kernel import LayerFactors

        found = [adapter.factors.get(name) for adapter in self._adapters]
        given = [(0, 0, 0) if each is None else (each.down.data_ptr(), each.up.data_ptr(), each.down.shape[1]) for each in found]
        return (LayerFactors * len(given))(*(LayerFactors(*each) for each in given))

    def _hook(self, name: str) -> Any:
        def add(layer: torch.nn.Linear, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            return self._add(name, layer, inputs[0], output) if len(self._rows) else None

        return add

    def _add(self, name: str, layer: torch.nn.Linear, input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Add to a layer's outputs, [..., rows, outputs], in place; rows beyond the batch's are padding."""
        input, output, count = input.contiguous(), output.contiguous(), len(self._rows)
        computed = output.numel() // output.shape[-1]
        if computed < count:
            raise ModelLoadError(f"adapters cannot be added to {name}: it computes {computed} rows of {count}")
        self._called.add(name)
        scratch = torch.empty(count, self.scratch_size())
        job = self.job(name, layer, input.data_ptr(), output.data_ptr(), scratch.data_ptr())
        taken = ctypes.c_int64(0)
        job.rows, job.adapters, job.taken = count, self._rows.ctypes.data, ctypes.addressof(taken)
        products = count * self.scratch_size() * (job.size + job.outputs)
        _kernel(DTYPES[output.dtype])(job, torch.get_num_threads() if products >= _WORTH_THREADS else 1)
        return output


_NO_ROWS = np.zeros(0, np.int64)


@cache
def _kernel(dtype: str) -> Kernel:
    from outrider.engine.cpu.lora_kernel import entry_point

    return Kernel(entry_point(dtype).address)
