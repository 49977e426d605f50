"""Free memory of this machine, and the memory that a model's weights take."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from outrider.configs.slices import KEPT
from outrider.engine.accelerator import accelerator
from outrider.engine.cpu.block_formats import FORMATS, PANEL
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.model_files import is_gguf
from outrider.engine.loading.weights.gguf import read_header

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by safetensors name
KEPT_SHARE = 0.25  # on a CPU, share of the memory that running requests' slots leave; the rest is for others
_CPU = torch.device("cpu")
_MACHINE = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")  # limits of a container, absent outside of one


def free_bytes() -> int:
    """Return the bytes that processes of this machine or container may still take; all memory if that is unknown."""
    try:
        kinds = dict(line.split(":") for line in _MACHINE.read_text().splitlines())
        free = int(kinds["MemAvailable"].removesuffix("kB")) << 10
    except (OSError, KeyError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, KeyError):  # no container limit
        limit, used = (int((_CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
        # Cached file pages count as used, but the kernel drops them for a process that needs memory.
        kinds = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(kinds["inactive_file"]))
    return free


def release_memory(model: torch.nn.Module) -> None:
    """Release memory that loading took and the model does not need: mapped files, and pages left by allocations."""
    # CPU weights are views of their mapped file until they are laid out anew. A few remaining ones (norms, biases) would keep the
    # whole mapping, so they are copied.
    tensors = (*model.parameters(), *model.buffers())
    left = [each for each in tensors if each.device.type == "cpu" and type(each) in (torch.Tensor, torch.nn.Parameter)]
    if 2 * sum(each.nbytes for each in left) < sum(each.nbytes for each in tensors):
        for tensor in left:
            tensor.data = tensor.data.clone()
    release_heap()


def release_heap() -> None:
    """Return free heap pages to the system; reading a vocabulary takes three times the memory that it keeps."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def left_bytes(device: torch.device, utilization: float = 1.0) -> int:
    """Return the bytes that this process may take of a device, on a GPU of its share ``utilization``; 0 without the device."""
    if device.type != "cuda":
        return free_bytes()
    with contextlib.suppress(RuntimeError):
        free, total = accelerator().memory(device)
        return max(0, min(free, int(utilization * total) - accelerator().reserved(device)))
    return 0


def default_slots(running: int, slot_bytes: int, left: int, share: float = KEPT_SHARE) -> int:
    """Return the default number of KV slots beyond those of running requests: as many as fit into a share of the rest.

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
    """Raise ``ModelLoadError`` if a model's weights do not fit into memory. Files on a hub are not checked.

    Args:
        path: name of the model in errors.
        files: a folder or a GGUF file.
        dtype: of the weights in memory; auto: as in the files, bfloat16 for a GGUF file.
        packed: whether weights of a GGUF file stay quantized. Weights quantized at load are read in the type of the files first.
    """
    refuse_more_than_free(path, weight_bytes(files, dtype, packed), adapter_bytes, device, utilization)


def refuse_more_than_free(
    path: str, need: int, adapter_bytes: int = 0, device: torch.device = _CPU, utilization: float = 1.0
) -> None:
    """Raise ``ModelLoadError`` if weights of ``need`` bytes do not fit, see ``refuse_too_large``."""
    need, free = need + adapter_bytes, left_bytes(device, utilization)
    if need > free:
        what = "weights and adapters" if adapter_bytes else "weights"
        where, advice = "memory", "stop other processes that use it"
        if device.type == "cuda":
            where, whole = str(device), accelerator().memory(device)[1]
            several = "share it among GPUs by parallelism.mode=tensor or pipeline"
            # Above 95 % of a GPU there is no room for KV slots and steps, whatever the share.
            advice = several if need > 0.95 * whole else f"{advice}, raise engine.gpu_memory_utilization"
        raise ModelLoadError(
            f"model {path!r} needs {need / 2**30:.1f} GiB for its {what}, and {free / 2**30:.1f} GiB of {where} are free: "
            f"{advice}, or give a smaller model"
        )


def weight_bytes(files: str, dtype: torch.dtype | Literal["auto"], packed: bool) -> int:
    """Return the bytes of the weights in memory, see ``refuse_too_large``; 0 if unknown."""
    wide = torch.bfloat16.itemsize if dtype == "auto" else dtype.itemsize
    with contextlib.suppress(OSError, ValueError, SafetensorError):  # loading reports broken files
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
    """Return the type of the first floating-point weight in a folder; None if unknown."""
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
