"""For all tests: what a GPU is needed for is skipped without one, and Ray gets a secret of this run's own."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports Ray; without it, Ray writes a token into the home folder.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Tiny models gain nothing from a second thread, and two threads wait for each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What tests keep (tables of tiny models, compiled code) stays out of the home folder; `make clean` removes it.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "user_cache")

settings.register_profile("outrider", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("outrider")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
