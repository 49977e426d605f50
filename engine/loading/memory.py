"""Memory that is left on this machine, and what the weights of a model take of it."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from configs.slices import KEPT
from engine.accelerator import accelerator
from engine.errors import ModelLoadError
from engine.forward.cpu.products.block_formats import FORMATS, PANEL
from engine.loading.model_files import is_gguf
from engine.loading.weights.gguf import read_header

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by safetensors' names
KEPT_SHARE = 0.25  # on a CPU, of what is left beside the slots of running requests: other processes load models, too
_CPU = torch.device("cpu")
_MACHINE = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")  # as a container sees its own limits; elsewhere nothing is limited there


def free_bytes() -> int:
    """What processes may still take: of the machine, or of the container that they run in; all, where a system does not tell."""
    try:
        kinds = dict(line.split(":") for line in _MACHINE.read_text().splitlines())
        free = int(kinds["MemAvailable"].removesuffix("kB")) << 10
    except (OSError, KeyError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, KeyError):  # no limit
        limit, used = (int((_CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
        kinds = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(kinds["inactive_file"]))
    return free


def give_back(model: torch.nn.Module) -> None:
    """Lets go of what a model took while it was made ready and does not need: its mapped files, and what allocations left.

    Weights on a CPU are parts of their file's mapping until they are laid out anew. The last few, norms and biases, would keep
    all of it: they are copied. Where most weights are still there it stays.
    """
    tensors = (*model.parameters(), *model.buffers())
    left = [each for each in tensors if each.device.type == "cpu" and type(each) in (torch.Tensor, torch.nn.Parameter)]
    if 2 * sum(each.nbytes for each in left) < sum(each.nbytes for each in tensors):
        for tensor in left:
            tensor.data = tensor.data.clone()
    give_heap_back()


def give_heap_back() -> None:
    """Lets go of pages that allocations left: reading a vocabulary takes three times what is kept of it."""
    with contextlib.suppress(OSError, AttributeError):  # a C library of another kind
        ctypes.CDLL(None).malloc_trim(0)


def left_bytes(device: torch.device, utilization: float = 1.0) -> int:
    """Return what this process may still take of a device's memory, in bytes; 0 where there is no such device.

    Of a GPU that is its share less what it has taken, whatever the other replicas on it have by now, and never more than is free.

    Args:
        device: of the model; a GPU with its number.
        utilization: share of a GPU's memory that this process may take.
    """
    if device.type != "cuda":
        return free_bytes()
    with contextlib.suppress(RuntimeError):
        free, total = accelerator().memory(device)
        return max(0, min(free, int(utilization * total) - accelerator().reserved(device)))
    return 0


def kept_slots(running: int, slot_bytes: int, left: int, share: float = KEPT_SHARE) -> int:
    """KV slots beyond those of running requests, where nobody says how many: as many as fit into a share of what is left.

    Example: 8 requests with slots of 190 MiB, and 20 GiB that are left: 16, as a quarter of the 18.5 GiB beside the eight has
    room for 24. With 10 GiB left it would be 11.
    """
    beside = max(0, left - running * slot_bytes)
    return min(KEPT * running, int(share * beside) // max(1, slot_bytes))


def refuse_too_large(
    path: str,
    files: str,
    dtype: torch.dtype | Literal["auto"],
    packed: bool = False,
    adapter_bytes: int = 0,
    device: torch.device = _CPU,
    utilization: float = 1.0,
) -> None:
    """Refuses a model whose weights do not fit into memory, before they are read; of files on a hub loading decides.

    Args:
        path: what the model is called.
        files: a folder or a GGUF file.
        dtype: of the weights in memory; auto: as in the files, bfloat16 for a GGUF file.
        packed: those of a GGUF file stay quantized. What is quantized at load is there in the type of the files first.
        adapter_bytes: that the adapters take in memory.
        device: where the weights go.
        utilization: see ``left_bytes``.

    Raises:
        ModelLoadError: with how much it needs.
    """
    refuse_more_than_free(path, weight_bytes(files, dtype, packed), adapter_bytes, device, utilization)


def refuse_more_than_free(
    path: str, need: int, adapter_bytes: int = 0, device: torch.device = _CPU, utilization: float = 1.0
) -> None:
    """As ``refuse_too_large``, of a model the bytes of whose weights are known."""
    need, free = need + adapter_bytes, left_bytes(device, utilization)
    if need > free:
        what = "weights and adapters" if adapter_bytes else "weights"
        where, advice = "memory", "end what takes it"
        if device.type == "cuda":
            where, whole = str(device), accelerator().memory(device)[1]
            several = "share it among GPUs by parallelism.mode=tensor or pipeline"
            # With more than nearly all of a GPU there is no room for KV slots and steps, whatever the share.
            advice = several if need > 0.95 * whole else f"{advice}, raise engine.gpu_memory_utilization"
        raise ModelLoadError(
            f"model {path!r} needs {need / 2**30:.1f} GiB for its {what}, and {free / 2**30:.1f} GiB of {where} are free: "
            f"{advice}, or give a smaller model"
        )


def weight_bytes(files: str, dtype: torch.dtype | Literal["auto"], packed: bool) -> int:
    """Of the weights in memory; 0 where the files do not tell. The arguments are those of ``refuse_too_large``."""
    wide = torch.bfloat16.itemsize if dtype == "auto" else dtype.itemsize
    with contextlib.suppress(OSError, ValueError, SafetensorError):  # loading says what is wrong with them
        if is_gguf(files):
            header = read_header(Path(files).expanduser())
            forms = {name: FORMATS.get(kind) if packed else None for name, kind in header.kinds.items()}
            return sum(
                count * wide if (form := forms[name]) is None else count * form.block_bytes // (form.block * PANEL)
                for name, count in header.tensors.items()
            )
        parts = list(Path(files).expanduser().glob("*.safetensors"))
        if dtype == "auto":
            return sum(part.stat().st_size for part in parts)
        return sum(map(_elements, parts)) * wide
    return 0


def stored_type(files: str) -> torch.dtype | None:
    """The type of the first weight in a folder that is of floating point; None where the files do not tell."""
    with contextlib.suppress(OSError, ValueError, SafetensorError):
        for part in sorted(Path(files).expanduser().glob("*.safetensors")):
            with safe_open(part, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    kind = _TYPES.get(tensors.get_slice(name).get_dtype())
                    if kind is not None:
                        return kind
    return None


def _elements(part: Path) -> int:
    with safe_open(part, "pt") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
