"""Lets torch handle tensors that say ``cuda:0`` in a build without CUDA, by a device guard that does nothing."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import torch

from outrider.decoding.jit import cache_folder
from outrider.decoding.private_files import read_sealed, save_sealed

logger = logging.getLogger(__name__)

# Torch asks a device's guard before each operation on its tensors, and has none for CUDA here. It would also try to initialize
# CUDA before it hands a factory such as ``torch.zeros(3, device="cuda")`` to a dispatch mode.
_SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/device_lazy_init.h>
static c10::impl::DeviceGuardImplRegistrar guard(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
static const bool ready = (torch::utils::set_requires_device_init(at::kCUDA, false), true);
"""


def unavailable() -> str | None:
    """Return why there can be no double here, for a test that is skipped; None where there can."""
    if torch.cuda.is_available():
        return "there is a GPU, of which no double is needed"
    if shutil.which(_compiler()) is None:
        return f"no C++ compiler ({_compiler()}) for the device guard of the double"
    return None


@cache
def load_guard() -> None:
    """Compile the guard once for this torch, in two seconds, and load it into this process.

    Raises:
        RuntimeError: it cannot be compiled.
    """
    digest = hashlib.sha256(f"{_SOURCE} {torch.__version__} {torch.__file__}".encode()).hexdigest()[:16]
    library = cache_folder() / f"device-guard-{digest}.so"
    try:
        read_sealed(library)  # the linker passes over the seal, which is behind all that it reads
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            logger.warning("the device guard of the double cannot be used and is compiled anew: %s", error)
    else:
        torch.ops.load_library(str(library))
        return
    with tempfile.TemporaryDirectory() as folder:
        made = _compile(Path(folder))
        torch.ops.load_library(str(made))
        try:
            save_sealed(library, made.read_bytes())
        except OSError as error:
            logger.warning("the device guard of the double cannot be kept: %s", error)


def _compile(folder: Path) -> Path:
    root = Path(torch.__file__).parent
    source, made = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_SOURCE, encoding="utf-8")
    include = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    command = [
        _compiler(), "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in include), str(source), f"-L{root / 'lib'}", "-lc10", "-ltorch_python", "-o", str(made),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"the device guard of the double cannot be compiled: {error.stderr[-500:]}") from error
    return made


def _compiler() -> str:
    return os.environ.get("CXX", "c++")
