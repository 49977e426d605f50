"""Calls of ``torch.cuda`` that the engine makes: memory, capability, streams, events and graphs of a GPU.

Nothing else in ``engine/`` calls ``torch.cuda``. Tests run the engine on a double of a GPU, which is the second implementation of
``Accelerator`` and is installed with ``use``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from engine.errors import DeviceError, first_line

_NO_DEVICES = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES; Ray gives the first to actors that reserve no GPU


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Wait on the host until the work before this point is done."""
        ...


class Stream(Protocol):
    """A queue of work of one device."""

    def wait_stream(self, stream: Any) -> None:
        """Let later work of this stream begin after the present work of another stream."""
        ...

    def record_event(self) -> Event:
        """Return an event behind the present work of this stream."""
        ...


class Graph(Protocol):
    """Captured work that can be launched again."""

    def replay(self) -> None:
        """Launch the work in the current stream."""
        ...


class Accelerator(Protocol):
    """The GPUs of this process, as the engine uses them. A method that takes a device expects ``cuda:N``."""

    def unavailable(self) -> str | None:
        """Return why no GPU can be used, in one line that says what to do; None where one can."""
        ...

    def device_count(self) -> int:
        """Return the number of GPUs that this process sees."""
        ...

    def name(self, device: torch.device) -> str:
        """Return the model of a GPU."""
        ...

    def uuid(self, device: torch.device) -> str:
        """Return what NVML knows a GPU by: ``GPU-`` and hexadecimal digits."""
        ...

    def capability(self, device: torch.device) -> tuple[int, int]:
        """Return the compute capability, such as (8, 0) for an A100."""
        ...

    def has_kernels(self, dtype: torch.dtype) -> bool:
        """Return whether the attention kernels of ``engine.forward.cuda`` compute in a type here."""
        ...

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Return the free and the total bytes of a GPU, over all processes."""
        ...

    def reserved(self, device: torch.device) -> int:
        """Return the bytes that this process has taken of a GPU."""
        ...

    def empty_cache(self) -> None:
        """Return memory that no tensor uses to the GPU."""
        ...

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make a GPU the current device of this thread within a block. On a CPU the block runs as it is."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait on the host for all work of a GPU. Raises the error of work that failed."""
        ...

    def new_stream(self, device: torch.device) -> Stream:
        """Return a stream beside the default one."""
        ...

    def current_stream(self, device: torch.device) -> Stream:
        """Return the stream in which this thread launches."""
        ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch in a stream within a block."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Return [size] int32 zeros on the host, from which copies to a GPU do not block."""
        ...

    def graph_pool(self) -> Any:
        """Return a handle of memory that graphs share which are never replayed at once."""
        ...

    def capture(self, device: torch.device, pool: Any, forward: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Capture the launches of a function.

        Args:
            device: of the function's tensors; it must be the current one.
            pool: see ``graph_pool``.
            forward: is called once; it must not wait for the GPU.

        Returns:
            The graph, and the function's output, which each replay overwrites.

        Raises:
            RuntimeError: the function does what a graph cannot hold.
        """
        ...


class Cuda:
    """``Accelerator`` of the NVIDIA GPUs that torch sees."""

    def unavailable(self) -> str | None:
        """See ``Accelerator``."""
        if torch.cuda.is_available():
            return None
        if torch.version.cuda is None:
            release = torch.__version__.partition("+")[0]
            return f"this is a CPU build of torch: pip install --force-reinstall torch=={release}, from an index with CUDA builds"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in _NO_DEVICES:
            return f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides all GPUs: unset it, or give it numbers of GPUs"
        others = "" if hidden is None else f", or CUDA_VISIBLE_DEVICES={hidden!r} names no GPU of this machine"
        return f"the NVIDIA driver is missing or too old for CUDA {torch.version.cuda}{others}: update it (nvidia-smi shows it)"

    def device_count(self) -> int:
        """See ``Accelerator``."""
        return torch.cuda.device_count()

    def name(self, device: torch.device) -> str:
        """See ``Accelerator``."""
        return str(torch.cuda.get_device_name(device))

    def uuid(self, device: torch.device) -> str:
        """See ``Accelerator``."""
        return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"

    def capability(self, device: torch.device) -> tuple[int, int]:
        """See ``Accelerator``."""
        return torch.cuda.get_device_capability(device)

    def has_kernels(self, dtype: torch.dtype) -> bool:
        """See ``Accelerator``."""
        from engine.forward.cuda.slot_kernels import TRITON

        return TRITON and dtype in (torch.bfloat16, torch.float16, torch.float32)

    def memory(self, device: torch.device) -> tuple[int, int]:
        """See ``Accelerator``."""
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)

    def reserved(self, device: torch.device) -> int:
        """See ``Accelerator``."""
        return int(torch.cuda.memory_reserved(device))

    def empty_cache(self) -> None:
        """See ``Accelerator``."""
        torch.cuda.empty_cache()

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """See ``Accelerator``."""
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    def synchronize(self, device: torch.device) -> None:
        """See ``Accelerator``."""
        torch.cuda.synchronize(device)

    def new_stream(self, device: torch.device) -> Stream:
        """See ``Accelerator``."""
        return torch.cuda.Stream(device)

    def current_stream(self, device: torch.device) -> Stream:
        """See ``Accelerator``."""
        return torch.cuda.current_stream(device)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """See ``Accelerator``."""
        return torch.cuda.stream(stream)

    def pinned(self, size: int) -> torch.Tensor:
        """See ``Accelerator``."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def graph_pool(self) -> Any:
        """See ``Accelerator``."""
        return torch.cuda.graph_pool_handle()

    def capture(self, device: torch.device, pool: Any, forward: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """See ``Accelerator``."""
        graph = torch.cuda.CUDAGraph()
        # A stream of this device: the one that torch keeps for captures is of the device that was current at the first of them.
        # Other threads of the process may use the GPU meanwhile: only calls of this thread break the capture.
        stream = torch.cuda.Stream(device)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = forward()
        return graph, output


_installed: Accelerator = Cuda()


def accelerator() -> Accelerator:
    """Return the GPUs of this process."""
    return _installed


@contextlib.contextmanager
def use(other: Accelerator) -> Iterator[None]:
    """Have ``accelerator`` return another implementation within a block, for all threads of this process."""
    global _installed
    before, _installed = _installed, other
    try:
        yield
    finally:
        _installed = before


# Of libraries and of the driver, beside torch.OutOfMemoryError.
_OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU lacked memory. It goes on."""
    if isinstance(error, torch.OutOfMemoryError | DeviceError):
        return isinstance(error, torch.OutOfMemoryError)
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def device_error(error: BaseException, device: torch.device) -> DeviceError | None:
    """Return the error to raise where the device failed for good; None where it goes on, or has no part in the error.

    After an illegal access, an ECC error or a lost device every later call of CUDA fails. So the device is asked: it has failed
    where waiting for it fails, too.
    """
    if isinstance(error, DeviceError):
        return error
    if is_out_of_memory(error):
        return None
    if device.type == "cuda":
        try:
            with accelerator().current(device):
                accelerator().synchronize(device)
        except RuntimeError as later:
            return DeviceError(_reason(error if isinstance(error, torch.AcceleratorError) else later))
        return None
    return DeviceError(_reason(error)) if isinstance(error, torch.AcceleratorError) else None


def _reason(error: BaseException) -> str:
    return first_line(error).removeprefix("CUDA error: ")
