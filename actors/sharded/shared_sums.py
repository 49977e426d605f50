"""DeepSpeed's all-reduce through shared memory, for ranks on CPUs of one machine: several times as fast as gloo."""

# The functions below handle facts of DeepSpeed 0.19, which compiles a module for this at first use, in half a minute or more.

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from outrider.decoding.jit import cache_folder
from outrider.decoding.private_files import open_private, read_sealed, save_sealed
from outrider.engine.environment import environment
from outrider.engine.errors import one_line
from outrider.engine.loading.cache_files import alone

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
BUFFER_BYTES = 66 * 2**20 + 8  # per rank, independent of the model
_MODULE = "deepspeed_shm_comm"
_SEAL = "deepspeed_shm_comm.sha256"  # sealed digest of the loaded library
_FOLDER = "TORCH_EXTENSIONS_DIR"  # environment variable from which torch takes the folder of compiled modules


def choose_transport(deepspeed: Any, rank: int, world_size: int) -> None:
    """Choose shared memory or gloo, as rank 0 can, after ``rendezvous``. All ranks call it. Raises RuntimeError if one cannot."""
    through_memory = torch.zeros(1)
    if rank == 0:
        reason = _why_not(world_size) or _load()
        through_memory[0] = reason is None
        if reason is not None:
            logger.warning("all-reduce uses gloo, which is slower than shared memory: %s", reason)
    distributed.broadcast(through_memory, 0)
    if not through_memory:
        deepspeed.ops.__compatible_ops__[_MODULE] = False  # the value that DeepSpeed itself sets without the module
    elif rank:
        reason = _load()
        if reason is not None:
            raise RuntimeError(reason)


def sweep(host: str, port: int, world_size: int) -> None:
    """Unlink the ranks' shared-memory buffers. Existing mappings stay valid, and the memory is freed when they end."""
    # DeepSpeed never removes these files itself.
    for rank in range(world_size):
        (SHARED_MEMORY / f"deepspeed_allreduce_buffer_{os.getuid()}_{host}_{port}_{rank}").unlink(missing_ok=True)


def _why_not(world_size: int) -> str | None:
    if not SHARED_MEMORY.is_dir():
        return f"{SHARED_MEMORY} does not exist"
    # If the buffers do not fit, the process dies of a bus error.
    free, needed = shutil.disk_usage(SHARED_MEMORY).free, world_size * BUFFER_BYTES
    if free < needed:
        return (
            f"{needed >> 20} MiB are needed in {SHARED_MEMORY} for {world_size} ranks and {free >> 20} are free: give the "
            "container more (docker run --shm-size, an emptyDir with medium Memory)"
        )
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler} to compile DeepSpeed's module with: apt-get install g++"
    return None


def _load() -> str | None:
    """Load the module, compiling it if needed. Return the reason if that fails."""
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed raises without a C++ compiler, ninja or Python's headers; the caller then uses gloo, with a warning.
    scripts = sysconfig.get_path("scripts")  # contains ninja; not on PATH unless the environment is activated
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((scripts, os.environ.get("PATH", "")))
    folder = cache_folder() / f"deepspeed-torch-{torch.__version__}"
    try:
        with alone_in(folder):
            get_accelerator().create_op_builder("ShareMemCommBuilder").load()
            _seal(folder)
    except (RuntimeError, ImportError, OSError) as error:
        return f"DeepSpeed's module cannot be compiled or loaded (g++ and Python's headers are needed): {one_line(error)}"
    return None


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder of compiled modules for this process, and remove a module that differs from the last loaded one."""
    made = folder / _MODULE
    # A process killed during compilation leaves a lock file for which all later ones wait forever. So the module is compiled in
    # our folder, under a lock that ends with its process.
    with alone(folder / "alone"):
        try:
            whole = read_sealed(folder / _SEAL) == _digest(made)
        except (OSError, ValueError):
            whole = False
        if not whole and made.exists():  # also removes the stale lock file of a killed process; our own lock excludes others
            logger.warning("DeepSpeed's module in %s is incomplete and is compiled again", made)
            shutil.rmtree(made)
        with environment(_FOLDER, str(folder)):
            yield


def _seal(folder: Path) -> None:
    try:
        (folder / _MODULE / f"{_MODULE}.so").chmod(0o755)  # the compiler may have left it group-writable
        save_sealed(folder / _SEAL, _digest(folder / _MODULE))
    except OSError as error:
        logger.warning("DeepSpeed's module cannot be cached and will be compiled again at the next start: %s", error)


def _digest(made: Path) -> bytes:
    with open_private(made / f"{_MODULE}.so") as file:
        return hashlib.sha256(file.read()).digest()
