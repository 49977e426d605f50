"""Strategy ``ngrammys``: rows of n-grams from the context and from the model itself (N-Grammys)."""

from __future__ import annotations

import numpy as np

from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.base import RequestDrafter, Target
from outrider.decoding.drafters.options import check_options
from outrider.decoding.request import Request
from outrider.decoding.sources.ngrams import ContextNgrams
from outrider.decoding.tree import SOURCES, DraftTree, tree_of

_CONTEXT, _BIGRAM, _UNIGRAM = (SOURCES.index(name) for name in ("context_ngram", "bigram", "unigram"))
_SPARE_WIDTH = 32  # minimum width of the bigram table, in case ranks share a step later


class NgrammysDrafter(RequestDrafter[ContextNgrams]):
    """Learning-free batched speculation (N-Grammys, arXiv 2411.03786, section 4): k rows of w tokens.

    Allocation ``mixed`` (section 4.3): first the continuations of earlier occurrences of the last q tokens (``ContextNgrams``).
    Then extended bigram rows: row j begins with the model's j-th token after the last token alone, and continues with the model's
    first token after each. If the bigram table is narrower than the rows to fill, rows that begin with tokens of the unigram
    ranking follow, extended in the same way.

    Example: last token 5, k = 3, w = 3, and the model says ``4, 7`` after 5, ``2`` after 4, ``4`` after 2, ``5`` after 7, ``4``
    after 5 in first place. The context holds ``5 1 3 3`` once. Rows: ``1 3 3`` (context), ``4 2 4`` and ``7 5 4`` (bigram).

    Layouts: ``tree`` merges rows with a common prefix; ``batched`` keeps the published block, each row a separate chain below the
    root. Both emit the same text in the same steps. A budget below k * w is filled with rows by rank; the last one is cut.

    If ranks share a step, there are ``ranks * k`` rows of w tokens. Up to ``ranks * table_width`` of the model's tokens begin a
    row, but at most 32 unless ``table_width`` is larger.

    Departures from the paper: the block is not a batch of k sequences with k copies of the KV, but k branches of one sequence
    under a tree mask. The paper does not define the context of a token in the tables of section 4.1: here it is the model's
    beginning or end token (see ``engine.target``). The unigram ranking follows the paper's text (distance from the mean), not its
    listing (inner product). Before ``prepare``, only the context is used.

    Args:
        k: rows per rank, at least 1.
        w: tokens of a row, at least 1.
        q: tokens to match in the context, at least 1.
        allocation: ``mixed``, or one kind of rows only: ``context``, ``bigram``, ``unigram``. Only ``context`` works without the
            model, as in a replay.
        layout: ``tree`` or ``batched``.
        table_width: tokens of the bigram table that begin a row, per rank, at least 1.
        short_rows: allow context rows of fewer than w tokens near the end of the text. The paper skips them, and so misses the
            most recent occurrences.
        max_occurrences: maximum occurrences of the last q tokens that are counted, at least 1.
    """

    def __init__(
        self,
        k: int = 10,
        w: int = 10,
        q: int = 1,
        allocation: str = "mixed",
        layout: str = "tree",
        table_width: int = 10,
        short_rows: bool = False,
        max_occurrences: int = 1024,
    ) -> None:
        super().__init__()
        check_options(
            "ngrammys", k=k, w=w, q=q, allocation=allocation, layout=layout, table_width=table_width,
            max_occurrences=max_occurrences,
        )  # fmt: skip
        self.published_rows = k * w
        self._k, self._w, self._q, self._max_occurrences = k, w, q, max_occurrences
        self._allocation, self._table_width, self._short_rows = allocation, table_width, short_rows
        self._merged = layout == "tree"
        self.needs_logits = allocation != "context"
        self._bigrams: Int32Array | None = None  # [vocab, >= table_width]
        self._unigrams: Int32Array | None = None  # [vocab]

    def prepare(self, target: Target) -> None:
        """Request the tables that the allocation needs."""
        if self._allocation == "context":
            return
        self._bigrams = target.bigram_table(min(max(self._table_width, _SPARE_WIDTH), target.vocab_size))
        if self._allocation == "unigram" or (self._allocation == "mixed" and self._k > min(self._table_width, target.vocab_size)):
            self._unigrams = target.unigram_ranking(target.vocab_size)

    def begin(self, request: Request) -> ContextNgrams:
        """Return an index of the request's n-grams."""
        return ContextNgrams(self._q, self._w, self._max_occurrences)

    def draft(self, request: Request, state: ContextNgrams, budget: int) -> DraftTree:
        """Return a tree of at most k rows per rank."""
        if budget == 0:
            return DraftTree.chain(request.root, ())
        most, rows = self._k * self.ranks, list[tuple[list[int], int]]()
        if self._allocation in ("mixed", "context"):
            rows = [(row, _CONTEXT) for row in state.continuations(request.tokens, most, self._short_rows)]
        rows += self._model_rows(request.root, most - len(rows))
        return tree_of(request.root, rows, budget, merged=self._merged)

    def _model_rows(self, root: int, count: int) -> list[tuple[list[int], int]]:
        """Return up to ``count`` extended rows, bigrams before unigrams."""
        if self._bigrams is None or count == 0:
            return []
        table_width = 0 if self._allocation == "unigram" else self._table_width * self.ranks
        bigrams = self._bigrams[root, : min(count, table_width)]
        unigrams = self._unigrams[: count - len(bigrams)] if self._unigrams is not None else bigrams[:0]
        rows = np.empty((len(bigrams) + len(unigrams), self._w), np.int32)
        rows[:, 0] = np.concatenate([bigrams, unigrams])
        for at in range(1, self._w):
            rows[:, at] = self._bigrams[rows[:, at - 1], 0]
        sources = [_BIGRAM] * len(bigrams) + [_UNIGRAM] * len(unigrams)
        return list(zip(rows.tolist(), sources, strict=True))
