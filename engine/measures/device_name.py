"""Name of a device, as its maker calls it."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


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
