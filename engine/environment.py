"""Environment of this process: names of its devices, and environment variables."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from outrider.engine.accelerator import accelerator

_DEVICES, _DRIVER = Path("/dev"), Path("/proc/driver/nvidia")  # present if an NVIDIA driver is loaded


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the block, and restore its value afterwards."""
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
    """Return the processor's model name from ``/proc/cpuinfo``, or else from ``platform``."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Return the model name of a GPU or CPU; torch's name for any other device."""
    if device.type == "cuda":
        return accelerator().name(device)
    return cpu_name() if device.type == "cpu" else str(device)


def nvidia_device_present() -> bool:
    """Return whether this machine has an NVIDIA GPU, by its driver or ``nvidia-smi``, without torch."""
    return any(_DEVICES.glob("nvidia[0-9]*")) or _DRIVER.exists() or shutil.which("nvidia-smi") is not None


@cache
def code_digest() -> str:
    """Return a digest of the code of the engine and its drafters, for results on disk that depend on it."""
    digest = hashlib.sha256()
    for folder in ("engine", "decoding"):
        for path in sorted((Path(__file__).resolve().parents[1] / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
