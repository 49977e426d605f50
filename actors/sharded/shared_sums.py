"""DeepSpeed's sums through shared memory, for ranks on the processors of one machine: several times as fast as by gloo.

DeepSpeed compiles a module for them at the first use, which takes half a minute, or longer on a busy machine. Facts of version
0.19 that are provided for here:

- a process that is killed while it compiles leaves a file behind for which every later one waits for ever: the module lies in a
  folder of ours, of which one process at a time has a lock that ends with it;
- without a C++ compiler or Python's headers it raises: the sums go by gloo then, with a warning;
- each rank takes 66 MiB in /dev/shm, whose names nobody removes, and where they do not fit a process ends with a bus error.
"""

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

from decoding.jit import cache_folder
from decoding.private_files import keep_sealed, open_private, read_sealed
from engine.environment import environment
from engine.errors import one_line
from engine.loading.kept_files import alone

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
BUFFER_BYTES = 66 * 2**20 + 8  # of each rank, whatever it computes
_MODULE = "deepspeed_shm_comm"
_SEAL = "deepspeed_shm_comm.sha256"  # digest of the library that was loaded, sealed
_FOLDER = "TORCH_EXTENSIONS_DIR"  # the variable by which torch knows where compiled modules lie


def settle(deepspeed: Any, rank: int, world_size: int) -> None:
    """Has these ranks' sums go through shared memory, or by gloo, as rank 0 finds; called by all of them, once they have met.

    Raises:
        RuntimeError: rank 0 has the module, and this one cannot load it.
    """
    through_memory = torch.zeros(1)
    if rank == 0:
        reason = _why_not(world_size) or _load()
        through_memory[0] = reason is None
        if reason is not None:
            logger.warning("the ranks' sums go by gloo, which is slower than shared memory: %s", reason)
    distributed.broadcast(through_memory, 0)
    if not through_memory:
        deepspeed.ops.__compatible_ops__[_MODULE] = False  # as DeepSpeed says itself where there is no such module
    elif rank:
        reason = _load()
        if reason is not None:
            raise RuntimeError(reason)


def sweep(host: str, port: int, world_size: int) -> None:
    """Takes the names of the ranks' buffers away: what has them mapped keeps them, and nothing is left when it ends."""
    for rank in range(world_size):
        (SHARED_MEMORY / f"deepspeed_allreduce_buffer_{os.getuid()}_{host}_{port}_{rank}").unlink(missing_ok=True)


def _why_not(world_size: int) -> str | None:
    """What is missing for sums through shared memory; None where nothing is."""
    if not SHARED_MEMORY.is_dir():
        return f"there is no {SHARED_MEMORY}"
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
    """Loads the module, compiled before where that was never done here; returns why that cannot be."""
    from deepspeed.accelerator import get_accelerator

    scripts = sysconfig.get_path("scripts")  # ninja is there, and need not be on the path where the environment is not activated
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
    """Lock the folder of compiled modules for this process, and remove a module that is not as it was when it was loaded."""
    made = folder / _MODULE
    with alone(folder / "alone"):
        try:
            whole = read_sealed(folder / _SEAL) == _digest(made)
        except (OSError, ValueError):
            whole = False
        if not whole and made.exists():  # of one that was killed, too, whose lock the next would wait for: nobody else is here
            logger.warning("DeepSpeed's module in %s is not whole and is compiled anew", made)
            shutil.rmtree(made)
        with environment(_FOLDER, str(folder)):
            yield


def _seal(folder: Path) -> None:
    """Notes a module that was loaded, where that can be."""
    try:
        (folder / _MODULE / f"{_MODULE}.so").chmod(0o755)  # the compiler may have let a group write to it
        keep_sealed(folder / _SEAL, _digest(folder / _MODULE))
    except OSError as error:
        logger.warning("DeepSpeed's module cannot be kept and will be compiled again at the next start: %s", error)


def _digest(made: Path) -> bytes:
    with open_private(made / f"{_MODULE}.so") as file:
        return hashlib.sha256(file.read()).digest()
