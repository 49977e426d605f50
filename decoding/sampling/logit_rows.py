"""Logits looked at row by row on the host, wherever they were computed."""

from __future__ import annotations

from typing import Protocol

import torch


class LogitRows(Protocol):
    """Rows of logits: a tensor on the CPU, or one elsewhere as ``HostRows``."""

    def __getitem__(self, row: int, /) -> torch.Tensor:
        """[vocab]."""
        ...


class HostRows:
    """The rows of a tensor elsewhere. Each is copied to the host when it is first asked for: of a tree, a walk visits few."""

    def __init__(self, logits: torch.Tensor, root: torch.Tensor) -> None:
        """
        Args:
            logits: [n, vocab] on any device.
            root: [vocab] the first row, on the host.
        """
        self._logits, self._there = logits, {0: root}

    def __getitem__(self, row: int) -> torch.Tensor:
        """[vocab] on the host."""
        if row not in self._there:
            self._there[row] = self._logits[row].cpu()
        return self._there[row]
