"""What this process runs in: the names of its devices, and its environment variables."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.accelerator import accelerator

_DEVICES, _DRIVER = Path("/dev"), Path("/proc/driver/nvidia")  # where an NVIDIA driver shows


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """A variable has a value within the block, for this process and those that it starts, and what it had before after it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def cpu_name() -> str:
    """The processor's model, as Linux knows it; what Python knows of it elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Of a GPU its model, of a CPU the processor's; torch's name of what is neither."""
    if device.type == "cuda":
        return accelerator().name(device)
    return cpu_name() if device.type == "cpu" else str(device)


def nvidia_device_present() -> bool:
    """Return whether this machine has an NVIDIA GPU, by its driver or the driver's tool; torch is not asked."""
    return any(_DEVICES.glob("nvidia[0-9]*")) or _DRIVER.exists() or shutil.which("nvidia-smi") is not None
