"""Plugin of pytest for the part ``tests``, in the place of tests/conftest.py, which needs more packages than pytest."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers of the project's tests."""
    for name in ("gpu", "slow", "timeout"):
        config.addinivalue_line("markers", f"{name}: see pyproject.toml")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where torch sees no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
