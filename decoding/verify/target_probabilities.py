"""The target's choices and probabilities at the rows of a computed tree, under the request's sampling parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
import torch

from outrider.decoding.arrays import Float64Array
from outrider.decoding.jit import NATIVE
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sampling.nucleus import survivors
from outrider.decoding.sampling.penalties import LogitRules
from outrider.decoding.sampling.probabilities import ACCEPT, RESIDUAL, pick, uniform
from outrider.decoding.sampling.ranking import argmax_rows
from outrider.decoding.sampling.sampler import choose, warp
from outrider.decoding.tree import DraftTree


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


class TargetDistributions:
    """Distributions of the target at each row of a tree, in any order, with the request's rules and warps at the row's prefix.

    Args:
        logits: raw logits of the tree's n rows.
        rules: logit rules with counts of the committed output, if the request ``alters_logits``. Queries move the counts: see
            ``settle``.
    """

    def __init__(
        self,
        request: Request,
        tree: DraftTree,
        logits: LogitRows,
        end_tokens: frozenset[int],
        rules: LogitRules | None = None,
    ) -> None:
        self.tree, self.params, self.end_tokens = tree, request.params, end_tokens
        self.remaining = request.remaining  # tokens that may still be emitted
        self.num_tokens, self.num_output = request.num_tokens, request.num_output
        self._logits, self._rules = logits, rules
        self._depths = tree.depths().tolist()
        self._path: list[int] = []  # rows whose tokens the counts include

    def choose(self, row: int) -> int:
        """Return the request's own token below a row: exactly what plain decoding emits there."""
        return choose(self._logits[row], self.params, self.position(row), self._rules_at(row), self._barred(row))

    def warped(self, row: int) -> Float64Array:
        """Return [vocab] sampling probabilities below a row; for a greedy request 1 at its token."""
        return request_distribution(self._logits[row], self.params, self._rules_at(row), self._barred(row))

    def raw_logprobs(self, row: int) -> Float64Array:
        """Return [vocab] log-probabilities below a row, before temperature and truncation, but after the logits processors."""
        logits, rules = self._logits[row], self._rules_at(row)
        if rules is not None:
            logits = rules.apply(logits, self._barred(row))
        found: Float64Array = torch.log_softmax(logits.to(torch.float64), dim=-1).cpu().numpy()
        return found

    def position(self, row: int) -> int:
        """Return the absolute position of the token below a row."""
        return int(self.num_tokens + self._depths[row])

    def uniform(self, row: int, stream: int, index: int = 0) -> float:
        """Return a number in (0, 1) for the token below a row, see ``decoding.sampling.probabilities``."""
        return uniform(self.params.seed, self.position(row), stream, index)

    def accepts(self, row: int, probability: float, index: int = 0) -> bool:
        """Return whether the ``index``-th draft token below ``row`` is accepted with this probability; 1 or more is certain."""
        return self.uniform(row, ACCEPT, index) < probability

    def draw(self, row: int, distribution: Float64Array) -> int:
        """Draw a token below a row from a [vocab] distribution, to replace rejected ones."""
        return pick(distribution, self.uniform(row, RESIDUAL))

    def settle(self) -> None:
        """Reset the counts of the rules to the committed output."""
        if self._rules is not None:
            self._rules.truncate(self.num_output)
        self._path = []

    def _barred(self, row: int) -> Collection[int]:
        return self.end_tokens if self.num_output + self._depths[row] < self.params.min_tokens else ()

    def _rules_at(self, row: int) -> LogitRules | None:
        """Return the rules with the counts of the prefix that ends with a row."""
        if self._rules is not None and row != (self._path[-1] if self._path else 0):
            path, shared = self.tree.path(row), 0
            # Only the tokens behind the common prefix of the last row and this one are exchanged.
            while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
                shared += 1
            self._rules.truncate(self.num_output + shared)
            for below in path[shared:]:
                self._rules.push(int(self.tree.tokens[below]))
            self._path = path
        return self._rules


def request_distribution(
    logits: torch.Tensor, params: SamplingParams, rules: LogitRules | None = None, barred: Collection[int] = ()
) -> Float64Array:
    """Return [vocab] probabilities of a request's next token, 1 at a greedy one; ``rules`` and ``barred`` as in ``choose``."""
    if rules is not None:
        logits = rules.apply(logits, barred)
    if params.greedy:
        distribution = np.zeros(logits.shape[-1])
        distribution[argmax_rows(logits[None])[0]] = 1.0
        return distribution
    short = _distribution_of_few(logits, params)
    if short is not None:
        return short
    probs: Float64Array = torch.softmax(warp(logits, params).to(torch.float64), dim=-1).cpu().numpy()
    return probs


def _distribution_of_few(logits: torch.Tensor, params: SamplingParams) -> Float64Array | None:
    """Return ``request_distribution`` without sorting the vocabulary, if few tokens are left on a CPU; else None."""
    if (
        not NATIVE
        or logits.device.type != "cpu"
        or logits.dtype == torch.float64
        or not (params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0)
    ):
        return None
    scores = (logits.to(torch.float32) / params.temperature).numpy()
    top = scores.max()
    # Rows with NaN or infinite scores are left to ``warp``.
    if not np.isfinite(top):
        return None
    found = survivors(scores, top, float(np.exp(scores - top).sum()) if params.top_p < 1.0 else 0.0, params)
    if found is None:
        return None
    ids, left = found
    weights = np.exp(left.astype(np.float64) - top)
    distribution = np.zeros(len(scores))
    distribution[ids] = weights / weights.sum()
    return distribution
