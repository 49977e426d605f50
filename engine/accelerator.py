"""Calls of ``torch.cuda`` that the engine makes; all are here, so that tests can run the engine on a simulated GPU (``use``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from outrider.engine.errors import DeviceError, first_line

_NO_DEVICES = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES; Ray gives the first to actors that reserve no GPU


class Event(Protocol):
    """Point in the work of a stream."""

    def synchronize(self) -> None:
        """Wait on the host until the work before this point is done."""
        ...


class Stream(Protocol):
    """Work queue of one device."""

    def wait_stream(self, stream: Any) -> None:
        """Make later work of this stream wait for the present work of another stream."""
        ...

    def record_event(self) -> Event:
        """Return an event after the present work of this stream."""
        ...


class Graph(Protocol):
    """Captured work that can be launched again."""

    def replay(self) -> None:
        """Launch the work in the current stream."""
        ...


class Accelerator(Protocol):
    """GPUs of this process. Methods that take a device expect ``cuda:N``."""

    def unavailable(self) -> str | None:
        """Return why no GPU can be used and what to do, in one line; None if one can be used."""
        ...

    def device_count(self) -> int:
        """Return the number of GPUs that this process sees."""
        ...

    def name(self, device: torch.device) -> str:
        """Return the model of a GPU."""
        ...

    def uuid(self, device: torch.device) -> str:
        """Return the id that NVML uses for a GPU: ``GPU-`` and hexadecimal digits."""
        ...

    def capability(self, device: torch.device) -> tuple[int, int]:
        """Return the compute capability, such as (8, 0) for an A100."""
        ...

    def has_kernels(self, dtype: torch.dtype) -> bool:
        """Return whether the attention kernels of ``engine.cuda`` support a type here."""
        ...

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Return the free and the total bytes of a GPU, over all processes."""
        ...

    def reserved(self, device: torch.device) -> int:
        """Return the bytes of a GPU that this process has reserved."""
        ...

    def empty_cache(self) -> None:
        """Give cached memory that no tensor uses back to the GPU."""
        ...

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make a GPU the current device of this thread within a block; a CPU is ignored."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait on the host for all work of a GPU, and raise the error of work that failed."""
        ...

    def new_stream(self, device: torch.device) -> Stream:
        """Return a new stream, other than the default one."""
        ...

    def current_stream(self, device: torch.device) -> Stream:
        """Return the stream in which this thread launches."""
        ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Launch in a stream within a block."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Return [size] int32 zeros in pinned host memory, from which copies to a GPU do not block."""
        ...

    def graph_pool(self) -> Any:
        """Return a memory pool for graphs that are never replayed at the same time."""
        ...

    def capture(self, device: torch.device, pool: Any, forward: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Capture one call of ``forward`` as a graph; return it, and the function's output, which each replay overwrites.

        The function must not wait for the GPU. Raises ``RuntimeError`` if a graph cannot hold one of its operations.
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
        from outrider.engine.cuda.slot_kernels import TRITON

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
        # torch's own capture stream belongs to the device of the first capture. ``thread_local``: other threads may use the GPU.
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
    """Make ``accelerator`` return another implementation within a block, for all threads of this process."""
    global _installed
    before, _installed = _installed, other
    try:
        yield
    finally:
        _installed = before


# Messages of libraries and the driver; torch's own error is ``torch.OutOfMemoryError``.
_OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a GPU ran out of memory, after which it can still be used."""
    # A ``DeviceError`` is permanent, even if its text names memory.
    if isinstance(error, torch.OutOfMemoryError | DeviceError):
        return isinstance(error, torch.OutOfMemoryError)
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def device_error(error: BaseException, device: torch.device) -> DeviceError | None:
    """Return the error to raise if the device failed permanently; None if it still works or is not involved."""
    if isinstance(error, DeviceError):
        return error
    if is_out_of_memory(error):
        return None
    if device.type == "cuda":
        # After an illegal access, an ECC error or a lost device every later CUDA call fails, synchronizing included.
        try:
            with accelerator().current(device):
                accelerator().synchronize(device)
        except RuntimeError as later:
            return DeviceError(_reason(error if isinstance(error, torch.AcceleratorError) else later))
        return None
    return DeviceError(_reason(error)) if isinstance(error, torch.AcceleratorError) else None


def _reason(error: BaseException) -> str:
    return first_line(error).removeprefix("CUDA error: ")
