"""A target without a model, as drafters may ask it, and what tests look at in draft trees and logs of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.decoding.arrays import Int32Array
from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.sources.log.chains import MAX_MATCH, follower, gather
from outrider.decoding.sources.log.token_log import TokenLog
from outrider.decoding.tree import DraftTree

FLAT = LatencyCurve((1, 64), (1.0, 1.0), 0, 0.0, 0.0)  # steps that cost the same for any number of rows


class Target:
    """After a token it ranks the ones behind it, in a circle, and its steps take what a curve says."""

    max_model_len = 4096

    def __init__(
        self, vocab_size: int = 60, end_token_ids: tuple[int, ...] = (2,), curve: LatencyCurve = FLAT, first: int = 1
    ) -> None:
        """
        Args:
            vocab_size: tokens of the circle.
            end_token_ids: tokens that end a text.
            curve: of its steps.
            first: how far behind a token the likeliest one after it stands.
        """
        self.vocab_size, self.end_token_ids, self._curve, self._first = vocab_size, end_token_ids, curve, first

    def bigram_table(self, width: int) -> Int32Array:
        """See ``decoding.drafters.base.Target``."""
        behind = np.arange(self._first, self._first + width)
        return (np.arange(self.vocab_size)[:, None] + behind).astype(np.int32) % self.vocab_size

    def unigram_ranking(self, width: int) -> Int32Array:
        """See ``decoding.drafters.base.Target``."""
        return np.arange(width, dtype=np.int32)

    def latency(self) -> LatencyCurve:
        """See ``decoding.drafters.base.Target``."""
        return self._curve


def says(*best: Sequence[int], vocab_size: int = 60) -> TargetRows:
    """Logits whose most likely tokens are, row by row, the given ones and then the lowest ids."""
    logits = torch.zeros(len(best), vocab_size) - torch.arange(vocab_size)
    for row, tokens in enumerate(best):
        logits[row, list(tokens)] = 100.0 - torch.arange(len(tokens), dtype=torch.float32)
    return TargetRows(logits.argmax(-1).numpy().astype(np.int32), logits)


def prepared(strategy: str, target: Target | None = None, **options: object) -> Drafter:
    """A new drafter that has asked a target what it wants to know."""
    drafter = build_drafter(strategy, options)
    drafter.prepare(target or Target())
    return drafter


def tree_of(parents: Sequence[int], candidates: int | None = None) -> DraftTree:
    """A tree whose tokens and sources tell its rows apart; ``parents`` are those of the rows below the root."""
    n = len(parents) + 1
    tokens, sources = np.arange(100, 100 + n, dtype=np.int32), np.arange(n).astype(np.int8)
    return DraftTree(tokens, np.array([-1, *parents], np.int32), sources, n if candidates is None else candidates)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens down to each row below the root, in the order of the rows."""
    return [tuple(tree.tokens[tree.path(row)].tolist()) for row in range(1, len(tree))]


def is_chain(tree: DraftTree) -> bool:
    """Whether every row continues the row before it."""
    return all(parent == row - 1 for row, parent in enumerate(tree.parents))


def leaves(tree: DraftTree) -> list[int]:
    """The rows without children."""
    return sorted(set(range(len(tree))) - set(tree.parents.tolist()))


Occurrence = tuple[list[int], int]  # what follows it, up to four tokens, and how many tokens agree there


def occurrences(log: TokenLog, context: Sequence[int], caps: Sequence[int] = (20_000,) * 3, owner: int = -1) -> list[Occurrence]:
    """Of the end of a context in a log, in the order in which they are found."""
    positions, matches = np.empty(20_000, np.int64), np.empty(20_000, np.int32)
    most = np.array(caps, np.int64)
    count = gather(log.arrays, log.oldest, owner, np.array(context, np.int32), most, 0, positions, matches)
    found = []
    for position in positions[:count]:
        after = [follower(log.arrays.tokens, position + i) for i in range(1, 5)]
        found.append(after[: after.index(-1)] if -1 in after else after)
    return list(zip(found, matches[:count].tolist(), strict=True))


def naive_occurrences(texts: Sequence[Sequence[int]], context: Sequence[int]) -> list[Occurrence]:
    """The same of texts, each searched token by token."""
    hits = []
    for text in texts:
        for at in range(len(text) - 1):
            length = 0
            while length < min(at + 1, len(context), MAX_MATCH) and text[at - length] == context[-1 - length]:
                length += 1
            if length:
                hits.append((list(text[at + 1 : at + 5]), length))
    return hits
