"""A drafter that proposes what no drafter should."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.request import Request
from outrider.decoding.tree import SOURCES, DraftTree
from tests.helpers.models import VOCAB

_SOURCE = SOURCES.index("copy")
_EXTREMES = (-(2**31), -1, 0, VOCAB - 1, VOCAB, 2**31 - 1)


class HostileDrafter(Drafter):
    """Trees of any shape and content: the right continuation in places, wrong, invalid, too deep or too many tokens elsewhere.

    Their structure is valid (parents come first), as the contract of ``DraftTree`` demands; nothing else is.
    """

    def __init__(self, answers: Mapping[str, Sequence[int]], seed: int) -> None:
        """
        Args:
            answers: the outputs of the requests, by id, so that some drafts are right.
            seed: of the trees.
        """
        self._answers, self._rng = answers, np.random.default_rng(seed)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """One tree per request, of any size, whatever the budget."""
        return [self._tree(request, self._answers.get(request.request_id, ())) for request in requests]

    def _tree(self, request: Request, answer: Sequence[int]) -> DraftTree:
        rng, kind = self._rng, int(self._rng.integers(7))
        rows = int(rng.integers(1, 40))
        if kind == 0:  # one token over and over, the end token and token 0 among them
            return DraftTree.chain(request.root, [int(rng.integers(0, 3))] * rows, _SOURCE)
        if kind == 1:  # ids that no embedding has
            return DraftTree.chain(request.root, rng.integers(-5, VOCAB + 500, rows).tolist(), _SOURCE)
        if kind == 2:  # the largest and smallest of everything, at the root as well
            return DraftTree.chain(int(rng.choice(_EXTREMES)), rng.choice(_EXTREMES, rows).tolist(), _SOURCE)
        if kind == 3:  # the right continuation, far deeper than what may still be emitted, then the end token
            return DraftTree.chain(request.root, [*answer[request.num_output :], *[0] * rows], _SOURCE)
        if kind == 4:  # a window that goes on where every position ends
            chain = DraftTree.chain(request.root, rng.integers(0, VOCAB, 200).tolist(), _SOURCE)
            return DraftTree(chain.tokens, chain.parents, chain.sources, int(rng.integers(1, 4)))
        if kind == 5:  # every row a child of the root, most with the same token
            tokens = np.array([request.root, *rng.integers(0, 4, rows)], np.int32)
            parents = np.array([-1, *[0] * rows], np.int32)
            return DraftTree(tokens, parents, np.full(rows + 1, _SOURCE, np.int8), rows + 1)
        return self._partly_right(request, answer, rows)

    def _partly_right(self, request: Request, answer: Sequence[int], rows: int) -> DraftTree:
        rng = self._rng
        parents, tokens, depths = [-1], [request.root], [0]
        for row in range(1, rows):
            parent = int(rng.integers(0, row)) if rng.random() < 0.5 else row - 1
            depth = depths[parent] + 1
            at = request.num_output + depth - 1
            right = answer[at] if at < len(answer) else 0
            parents.append(parent)
            depths.append(depth)
            tokens.append(right if rng.random() < 0.6 else int(rng.integers(0, VOCAB)))
        sources = np.full(rows, _SOURCE, np.int8)
        return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), sources, int(rng.integers(1, rows + 1)))
