"""Device that is measured: a GPU, the double of one, or the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from outrider.engine.accelerator import accelerator, use

NO_TIMES = {
    "cpu": "of a CPU: they say nothing of a GPU",
    "double": "of the double of a GPU, which computes on the CPU: they mean nothing",
}


@contextlib.contextmanager
def measured_on(device: str, double: bool) -> Iterator[None]:
    """Make a device the current one of this thread within a block; ``double``: install the double of a GPU before."""
    with contextlib.ExitStack() as stack:
        if double:
            torch.set_num_threads(1)  # several gain nothing with models as small, and wait for each other on a busy machine
            from outrider.experiments.device_double.gpu import DoubleGpu
            from outrider.experiments.device_double.loading import loading

            stack.enter_context(use(DoubleGpu(gpus=1)))
            stack.enter_context(loading())
        stack.enter_context(current(device))
        yield


def current(device: str) -> AbstractContextManager[Any]:
    """Make a device the current one of this thread within a block."""
    return accelerator().current(torch.device(device))


def is_cuda(device: str) -> bool:
    """Return whether CUDA computes there: not on a CPU, and not on the double of a GPU."""
    return device.startswith("cuda") and torch.cuda.is_available()


def wait(device: str) -> None:
    """Wait until the device has done all that it was given."""
    if device.startswith("cuda"):
        accelerator().synchronize(torch.device(device))


def empty_cache(device: str) -> None:
    """Return memory that no tensor uses to the GPU."""
    if device.startswith("cuda"):
        accelerator().empty_cache()
