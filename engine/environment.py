"""What this process runs in: the names of its devices, and its environment variables."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch


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
        return str(torch.cuda.get_device_name(device))
    return cpu_name() if device.type == "cpu" else str(device)
