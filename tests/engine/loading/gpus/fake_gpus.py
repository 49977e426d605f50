"""GPUs that do not exist: what the engine asks of them before it computes, see ``engine.accelerator``."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

GIB = 2**30
A100_80 = int(79.15 * GIB)  # what CUDA gives of 80 GB


@dataclass
class FakeGpus:
    """Some GPUs of the same kind. Memory is in bytes."""

    count: int = 1
    total: int = A100_80
    free: int = A100_80
    taken: int = 0  # by this process
    why: str | None = None  # none can be used

    def unavailable(self) -> str | None:
        """See ``Accelerator``."""
        return self.why

    def device_count(self) -> int:
        """See ``Accelerator``."""
        return self.count

    def memory(self, device: torch.device) -> tuple[int, int]:
        """See ``Accelerator``. CUDA's error for a device that is not there is a RuntimeError."""
        if device.index is None or device.index >= self.count:
            raise RuntimeError("invalid device ordinal")
        return self.free, self.total

    def reserved(self, device: torch.device) -> int:
        """See ``Accelerator``."""
        return self.taken

    def capability(self, device: torch.device) -> tuple[int, int]:
        """See ``Accelerator``."""
        return (8, 0)

    def has_kernels(self, dtype: torch.dtype) -> bool:
        """See ``Accelerator``."""
        return True

    def name(self, device: torch.device) -> str:
        """See ``Accelerator``."""
        return f"a GPU, number {device.index}"

    def uuid(self, device: torch.device) -> str:
        """See ``Accelerator``."""
        return f"GPU-{device.index}"

    def empty_cache(self) -> None:
        """See ``Accelerator``."""

    def current(self, device: torch.device) -> AbstractContextManager[None]:
        """See ``Accelerator``."""
        return contextlib.nullcontext()
