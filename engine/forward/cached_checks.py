"""Results of the exactness self-check on disk: on a CPU it is done once for a model, a setting, a machine and versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
from pathlib import Path

import torch
from transformers import PreTrainedModel

from outrider.configs.slices import EngineOptions
from outrider.decoding.jit import cache_folder
from outrider.decoding.private_files import read_sealed, save_sealed
from outrider.engine.cuda.static_runner import TREE_ROWS
from outrider.engine.environment import code_digest, device_name
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.runners import made_unchecked, make_runner
from outrider.engine.loading.model import model_revision

logger = logging.getLogger(__name__)

_KERNELS = ("ATEN_", "DNNL_", "MKL_", "NUMBA_", "ONEDNN_")  # environment variables that choose kernels


def make_runner_with_cached_check(
    model: PreTrainedModel, capacity: int, options: EngineOptions, tree_rows: int = TREE_ROWS
) -> ModelRunner:
    """Do the same as ``make_runner``; on a CPU without the check if it succeeded before, with everything that it depends on."""
    if model.device.type != "cpu" or options.exact != "strict":
        return make_runner(model, capacity, options, tree_rows)
    path = cache_folder() / f"exact-{_digest(model, capacity, options, tree_rows)}"
    found = _read(path)
    if found is not None:
        runner = made_unchecked(model, capacity, options, found["rows"], tree_rows)
        logger.info("the exactness check is not repeated: it succeeded before on this machine (%s)", path)
        if runner.fixed_rows is not None:
            logger.warning("forward passes are limited to %d rows, which is slower: others were not exact", runner.fixed_rows)
        return runner
    runner = make_runner(model, capacity, options, tree_rows)
    try:
        save_sealed(path, json.dumps({"rows": runner.fixed_rows}).encode())
    except OSError as error:
        logger.warning("the result of the exactness check could not be saved, it is repeated at the next start: %s", error)
    return runner


def _read(path: Path) -> dict[str, int | None] | None:
    try:
        found: dict[str, int | None] = json.loads(read_sealed(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("the result of the exactness check at %s cannot be used, and it is repeated: %s", path, error)
        return None
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # numba may be missing
        return None


def _digest(model: PreTrainedModel, capacity: int, options: EngineOptions, tree_rows: int) -> str:
    setting = {
        "model": [type(model).__name__, model_revision(model), str(model.dtype)],
        "shape": [capacity, options.max_running, options.kv_slots, options.prefix_caching, options.compile, tree_rows],
        "machine": [device_name(model.device), torch.get_num_threads(), os.uname().release],
        "kernels": sorted(each for each in os.environ.items() if each[0].startswith(_KERNELS)),
        "versions": [
            *map(_version, ("torch", "transformers", "numba", "numpy")),
            *platform.libc_ver(),
            code_digest(),
        ],
    }
    return hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:32]
