"""Strategy ``jacobi``: n-grams from the model's parallel guesses (Lookahead Decoding), and plain Jacobi decoding."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.base import RequestDrafter, Target, TargetRows
from outrider.decoding.drafters.options import check_options
from outrider.decoding.request import Request
from outrider.decoding.sources.jacobi_window import JacobiBlock, JacobiWindow, Ngram, NgramPool, PromptTokens, WindowRows
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree, tree_of

_SOURCE = SOURCES.index("jacobi")


@dataclass(frozen=True, slots=True)
class _Settings:
    window: int
    ngram: int
    guesses: int
    prompt_as_reference: bool


class _Lookahead:
    """Window and n-gram pool of one request."""

    def __init__(self, request: Request, settings: _Settings, end_tokens: Set[int], ranks: int) -> None:
        self._settings, self._end_tokens = settings, end_tokens
        self._source = PromptTokens(request.prompt_ids, request.params.seed, end_tokens)
        self._pool = NgramPool(settings.ngram, settings.guesses * ranks)
        self._learned = 0  # committed tokens whose n-grams are in the pool
        if settings.prompt_as_reference:
            for reference in request.references:
                self._pool.insert_sequence(reference.tolist())
        self._learn(request)
        self._window: JacobiWindow | None = None
        self._rows: WindowRows | None = None  # window rows of the last proposal

    def propose(self, request: Request, budget: int, ranks: int) -> DraftTree:
        """Return the candidates, then as many window columns as fit. Guesses and new windows scale with ``ranks``."""
        # The guesses follow changes of the number of ranks; a window keeps its columns.
        self._pool.guesses = self._settings.guesses * ranks
        tree = self._candidates(request, budget)
        candidates = len(tree)
        rows = self._rows = self._window_rows(request, budget, budget + 1 - candidates, self._settings.window * ranks)
        if rows is None:
            return tree
        tokens = np.concatenate([tree.tokens, rows.tokens])
        parents = np.concatenate([tree.parents, np.where(rows.parents < 0, 0, rows.parents + candidates).astype(np.int32)])
        return DraftTree(tokens, parents, np.full(len(tokens), _SOURCE, np.int8), candidates)

    def observe(self, request: Request, tree: DraftTree, ids: Int32Array, acceptance: Acceptance) -> None:
        """Collect the n-grams of the computed columns, advance the columns, and learn the emitted tokens."""
        window, rows = self._window, self._rows
        self._rows = None
        if window is not None and rows is not None:
            answers = ids[rows.locate(tree)]
            if window.full:
                for key, value in window.ngrams(int(tree.tokens[0]), answers):
                    self._pool.insert(key, value)
            # While the window fills, an answer below every column is needed; a full one advances the computed columns.
            if window.full or len(answers) == window.columns:
                window.advance(answers)
                window.replace_newest(self._end_tokens, self._source)
        self._learn(request)

    def _learn(self, request: Request) -> None:
        """Add the n-grams that end in new tokens of prompt and output to the pool."""
        if self._settings.prompt_as_reference:
            self._pool.insert_sequence(request.tokens[max(0, self._learned + 1 - self._settings.ngram) :].tolist())
            self._learned = request.num_tokens

    def _candidates(self, request: Request, budget: int) -> DraftTree:
        """Return the pool's n-grams below the root, the most recent first, so that a small budget cuts the oldest."""
        depth = min(self._settings.ngram - 1, request.remaining - 1)
        ngrams = reversed(self._pool.lookup(request.root))
        return tree_of(request.root, ((_until(ngram[:depth], self._end_tokens), _SOURCE) for ngram in ngrams), budget)

    def _window_rows(self, request: Request, budget: int, left: int, widest: int) -> WindowRows | None:
        """Return the columns to compute with ``left`` rows: whole columns of a full window, all or none while it fills."""
        if self._window is None or (not self._window.full and self._window.peak_rows > budget):
            self._window = self._new_window(budget, widest)
        window = self._window
        if window is None or request.remaining - window.steps_to_ngrams < 2:  # too late to verify an n-gram
            return None
        # Columns beyond the ranks or the budget wait.
        most = min(window.columns, widest) if window.full else window.columns
        columns = min(most, (left + 1) // window.levels)
        if columns < 1 or (not window.full and columns < window.columns):
            return None
        return WindowRows.of(window, columns)

    def _new_window(self, budget: int, widest: int) -> JacobiWindow | None:
        """Return the widest window, up to ``widest``, that the budget can fill, or None if not even one column fits."""
        ngram = self._settings.ngram
        for width in range(min(widest, (budget + 1) // (ngram - 1)), 0, -1):
            # Guesses are drawn only for a width that fits: drawing advances the random stream.
            window = JacobiWindow(width, ngram, np.zeros(width + ngram - 3, np.int32))
            if window.peak_rows <= budget:
                return JacobiWindow(width, ngram, self._source.draw(width + ngram - 3))
        return None


class _PlainJacobi:
    def __init__(self, request: Request, settings: _Settings, end_tokens: Set[int]) -> None:
        source = PromptTokens(request.prompt_ids, request.params.seed, end_tokens)
        self._block = JacobiBlock(settings.window, source)

    def propose(self, request: Request, budget: int, ranks: int) -> DraftTree:
        """Return the block as one chain, for any number of ranks."""
        # One chain, which cannot be partitioned among ranks.
        return DraftTree.chain(request.root, self._block.guesses[: min(budget, request.remaining - 1)], _SOURCE)

    def observe(self, request: Request, tree: DraftTree, ids: Int32Array, acceptance: Acceptance) -> None:
        """Replace every guess by the target's token at its position."""
        children: dict[tuple[int, int], int] = {}
        for row in range(1, tree.num_candidates):
            children.setdefault((int(tree.parents[row]), int(tree.tokens[row])), row)
        rows = [0]
        for guess in self._block.guesses.tolist():
            child = children.get((rows[-1], guess))
            if child is None:
                break
            rows.append(child)
        self._block.advance(ids[rows], acceptance.count)


class JacobiDrafter(RequestDrafter[_Lookahead | _PlainJacobi]):
    """Lookahead Decoding (arXiv 2402.02057, section 3), the method of the Jacobi window.

    Beside the next token, each forward computes a window of guesses (``JacobiWindow``). The target's token for a column continues
    its Jacobi trajectory and completes an n-gram for the pool (``NgramPool``). N-grams that begin with the last committed token
    are drafted as candidates. The window uses the target's most likely tokens, for sampled requests too.

    With ``ngram`` 2 it is plain Jacobi decoding (section 2; Santilli et al., arXiv 2305.10427): the draft is a block of
    ``window`` guesses (``JacobiBlock``). There is no pool then, and ``guesses`` and ``prompt_as_reference`` have no effect.

    Example: root 5, pool ``5: (6 9 7), (6 8 8)``, window of three levels ``_ 1``, ``2 3`` and ``4 0``. Candidates are ``6 8 8``
    and, below the same 6, ``9 7``. Window rows are 1 and ``2 4`` below the root, and ``3 0`` below 1.

    Rows: at most ``(window + guesses) * (ngram - 1) - 1``; the defaults give 63, for a budget of 64. The paper uses ngram 5 and,
    on an A100, window and guesses of 15 for 7 B parameters (119 rows), 10 for 13 B and 7 for 34 B.
    If ranks share a step (lookahead parallelism, section 3.4), window and guesses apply per rank.

    Departures from the paper's code: the token after a fully accepted n-gram is kept; the window begins after the prefill, which
    has no draft, and candidates are verified while it fills; n-grams with a common prefix share rows; the first guesses are drawn
    by a hash of prompt and seed; all end tokens, for greedy requests too, are cut from candidates and replaced in the window by
    random prompt tokens; an output token enters the text behind the pool once. ``prompt_as_reference``, off in the paper's main
    results, is on, and adds the request's references before its prompt.

    Args:
        window: W of the paper, columns of the window per rank, at least 1; with ``ngram`` 2 the guesses in the block.
        ngram: N of the paper, tokens of an n-gram with its key, at least 3; 2 is plain Jacobi decoding.
        guesses: G of the paper, n-grams that are kept and drafted per token, per rank, at least 1.
        prompt_as_reference: add n-grams of references, prompt and output to the pool (POOL_FROM_PROMPT).
    """

    needs_logits = True
    looks_ahead = True

    def __init__(self, window: int = 8, ngram: int = 5, guesses: int = 8, prompt_as_reference: bool = True) -> None:
        super().__init__()
        check_options("jacobi", window=window, ngram=ngram, guesses=guesses)
        self.published_rows = _published_rows(window, ngram, guesses)
        self._settings = _Settings(window, ngram, guesses, prompt_as_reference)
        self._end_tokens: frozenset[int] = frozenset()

    def prepare(self, target: Target) -> None:
        """Read the model's end tokens."""
        self._end_tokens = frozenset(target.end_token_ids)

    def begin(self, request: Request) -> _Lookahead | _PlainJacobi:
        """Return the request's window and pool, or its block."""
        own = frozenset() if request.params.ignore_eos else self._end_tokens
        ends = own | set(request.params.stop_token_ids)
        if self._settings.ngram == 2:
            return _PlainJacobi(request, self._settings, ends)
        return _Lookahead(request, self._settings, ends, self.ranks)

    def draft(self, request: Request, state: _Lookahead | _PlainJacobi, budget: int) -> DraftTree:
        """Return candidates and window, or one chain in plain Jacobi decoding."""
        return state.propose(request, budget, self.ranks)

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """Update the guesses with the target's tokens."""
        self.state(request).observe(request, tree, target.ids, acceptance)


def _published_rows(window: int, ngram: int, guesses: int) -> int:
    """Return the rows of a step of the published method. Example: window 15, ngram 5 and guesses 15 make 119."""
    if ngram == 2:
        return window
    return JacobiWindow(window, ngram, np.zeros(window + ngram - 3, np.int32)).peak_rows + guesses * (ngram - 1)


def _until(ngram: Ngram, end_tokens: Set[int]) -> Ngram:
    """Return the tokens before the first end token, since verification stops there."""
    for at, token in enumerate(ngram):
        if token in end_tokens:
            return ngram[:at]
    return ngram
