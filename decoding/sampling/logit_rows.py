"""Access to single rows of logits on the host, whichever device computed them."""

from __future__ import annotations

from typing import Protocol

import torch


class LogitRows(Protocol):
    """Rows of logits: a tensor on the CPU, or ``HostRows`` for another device."""

    def __getitem__(self, row: int, /) -> torch.Tensor:
        """Return one row, [vocab]."""
        ...


class HostRows:
    """Rows of [n, vocab] logits on another device, each copied to the host at its first use; ``root`` is the first row."""

    def __init__(self, logits: torch.Tensor, root: torch.Tensor) -> None:
        # Copies are lazy because verification visits few rows of a draft tree.
        self._logits, self._there = logits, {0: root}

    def __getitem__(self, row: int) -> torch.Tensor:
        if row not in self._there:
            self._there[row] = self._logits[row].cpu()
        return self._there[row]
