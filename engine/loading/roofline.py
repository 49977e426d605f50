"""Seconds of a forward by the roofline: what it reads over the memory's bandwidth, or what it computes over the peak."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.loading.cards import Card
from engine.loading.outline import Outline

# Of the peaks, what engines with graphs and fused kernels reach: while weights are read, and with matrices of some hundred rows.
BANDWIDTH_SHARE, FLOPS_SHARE = 0.75, 0.6


def seconds_of(read_bytes: float, operations: float, bandwidth: float, flops: float) -> float:
    """Return the longer of reading and computing, at rates of a second."""
    return max(read_bytes / bandwidth, operations / flops)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a card. Launches, and what the host does between forwards, are not counted."""

    card: Card
    found: Outline
    dtype: torch.dtype
    entry_bytes: int  # keys and values of one token, all layers
    weight_bytes: int  # all of them

    def forward_s(self, rows: int, context: int) -> float:
        """Return the seconds of one forward of rows that each look at so many entries of one sequence.

        Weights are read once, those of experts as far as rows are routed to them evenly, and of the embeddings single rows; KV
        entries are read once. Each weight takes 2 operations a row, each number of a query's head 4 for each entry.
        """
        found = self.found
        used = 1 - (1 - found.expert_share) ** rows  # of the experts, by all rows together
        others = found.parameters - found.embeddings - found.expert_parameters
        wide = self.weight_bytes / found.parameters
        read = wide * (others + used * found.expert_parameters) + context * self.entry_bytes
        products = 2 * rows * (others + found.expert_share * found.expert_parameters)
        attended = 4 * rows * context * sum(layer.heads * layer.head_dim for layer in found.layers)
        rates = self.card.bandwidth * BANDWIDTH_SHARE, self.card.flops(self.dtype) * FLOPS_SHARE
        return seconds_of(read, products + attended, *rates)

    def prefill_s(self, tokens: int, piece: int) -> float:
        """Return the seconds of a prompt in forwards of so many rows."""
        return sum(self.forward_s(piece, start + piece // 2) for start in range(0, tokens, piece))
