"""Roofline estimate of forward time: the longer of bytes over bandwidth and operations over peak rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.engine.loading.cards import Card
from outrider.engine.loading.outline import Outline

# Shares of the peaks that engines with graphs and fused kernels reach: reading weights, and with matrices of some hundred rows.
BANDWIDTH_SHARE, FLOPS_SHARE = 0.75, 0.6


def seconds_of(read_bytes: float, operations: float, bandwidth: float, flops: float) -> float:
    """Return the longer of reading and computing, at rates per second."""
    return max(read_bytes / bandwidth, operations / flops)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline of a model on a card, without launches and host time between forwards."""

    card: Card
    found: Outline
    dtype: torch.dtype
    entry_bytes: int  # KV of one token in all layers
    weight_bytes: int  # bytes of all weights

    def forward_s(self, rows: int, context: int) -> float:
        """Return the seconds of one forward of ``rows`` that each attend to ``context`` entries of one sequence.

        Weights are read once, experts in proportion to the rows routed to them evenly; KV is read once. Embeddings, read by
        single rows, are ignored. A row takes 2 operations per weight, and 4 per KV entry and query element.
        """
        found = self.found
        used = 1 - (1 - found.expert_share) ** rows  # share of experts that some row uses
        others = found.parameters - found.embeddings - found.expert_parameters
        wide = self.weight_bytes / found.parameters
        read = wide * (others + used * found.expert_parameters) + context * self.entry_bytes
        products = 2 * rows * (others + found.expert_share * found.expert_parameters)
        attended = 4 * rows * context * sum(layer.heads * layer.head_dim for layer in found.layers)
        rates = self.card.bandwidth * BANDWIDTH_SHARE, self.card.flops(self.dtype) * FLOPS_SHARE
        return seconds_of(read, products + attended, *rates)

    def prefill_s(self, tokens: int, piece: int) -> float:
        """Return the seconds of a prompt in forwards of ``piece`` rows."""
        return sum(self.forward_s(piece, start + piece // 2) for start in range(0, tokens, piece))
