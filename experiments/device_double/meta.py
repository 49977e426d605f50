"""Double of a GPU whose tensors have no numbers: it counts the bytes that a program asks of the GPU, of models of any size."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from outrider.experiments.device_double.gpu import DoubleGpu, DoubleTensor

_META = torch.device("meta")


class MetaGpu(DoubleGpu):
    """A ``DoubleGpu`` over torch's meta device. Nothing is computed, and what asks for a number fails."""

    def __init__(self, capability: tuple[int, int] = (8, 0), memory_gib: float = 80.0) -> None:
        super().__init__(1, capability, memory_gib)
        self._purpose = "other"
        self._purposes: dict[int, str] = {}  # by storage
        self._tensors: list[tuple[weakref.ref[DoubleTensor], int, int]] = []  # with their storage, and its bytes

    @contextlib.contextmanager
    def purpose(self, name: str) -> Iterator[None]:
        """Count what is allocated within a block under a name."""
        before, self._purpose = self._purpose, name
        try:
            yield
        finally:
            self._purpose = before

    def allocated(self) -> Counter[str]:
        """Return the bytes of the tensors that live, by purpose."""
        live = {storage: size for tensor, storage, size in self._tensors if tensor() is not None}
        found: Counter[str] = Counter()
        for storage, size in live.items():
            found[self._purposes[storage]] += size
        return found

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """See ``DoubleGpu``. Copies from the host are allocations alone."""
        flat = tree_flatten((args, kwargs))[0]
        ours = [each for each in flat if isinstance(each, DoubleTensor)]
        devices = [each for each in flat if isinstance(each, torch.device)]
        if not ours and not any(device.type == "cuda" for device in devices):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "slot_attention":
            return None
        if any(device.type == "cpu" for device in devices) or (name == "copy_" and not isinstance(args[0], DoubleTensor)):
            raise NotImplementedError(f"{func}: a tensor without numbers cannot be copied to the host")
        known = {id(each.numbers): each for each in ours}
        storages = {_storage(each.numbers) for each in ours}
        found = func(*_without_numbers(args), **_without_numbers(kwargs))

        def wrapped(numbers: torch.Tensor) -> DoubleTensor:
            made = known.get(id(numbers))
            if made is None:
                made, storage = DoubleTensor(numbers, 0, self), _storage(numbers)
                if storage not in storages:
                    self._purposes[storage] = self._purpose
                self._tensors.append((weakref.ref(made), storage, numbers.untyped_storage().nbytes()))
            return made

        return tree_map_only(torch.Tensor, wrapped, found)


def _storage(numbers: torch.Tensor) -> int:
    return int(numbers.untyped_storage()._cdata)


def _without_numbers(given: Any) -> Any:
    given = tree_map_only(torch.Tensor, lambda each: each.numbers if isinstance(each, DoubleTensor) else each.to(_META), given)
    given = tree_map_only(torch.device, lambda device: _META, given)
    return {name: each for name, each in given.items() if name != "pin_memory"} if isinstance(given, dict) else given
