"""Plugin of pytest for the part ``tests``, in the place of tests/conftest.py, which needs more packages than pytest."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

ENDS = "GPU_SUITE_TESTS_END"  # environment variable: seconds since 1970 after which no test begins
CUT_OFF = "no time is left for more tests"


def pytest_configure(config: Any) -> None:
    """Name the markers of the project's tests."""
    for name in ("gpu", "slow", "timeout"):
        config.addinivalue_line("markers", f"{name}: see pyproject.toml")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skip tests marked ``gpu`` where torch sees no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker("skip")


def pytest_runtest_protocol(item: Any) -> None:
    """Stop where no time is left."""
    if time.time() > float(os.environ.get(ENDS, "inf")):
        item.session.shouldstop = CUT_OFF
