"""Strategies ``prompt_lookup`` and ``adapld``: copy the tokens after an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.base import CopyDrafter, RequestDrafter, Target, TargetRows
from outrider.decoding.drafters.options import check_options
from outrider.decoding.request import Request
from outrider.decoding.sources.ngrams import NgramIndex
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree, tree_of

_COPIED, _RANKED = SOURCES.index("prompt_lookup"), SOURCES.index("recycling")
_MOST_CONTEXT = 64  # maximum tokens before an occurrence that are compared


class PromptLookupDrafter(CopyDrafter[NgramIndex]):
    """Prompt lookup decoding of transformers: the ``num_tokens`` tokens after the first occurrence of the last n-gram.

    N-gram sizes go from ``max_ngram`` down to 1, over prompt and output. If ranks share a step, further copies come from other
    occurrences of the longest n-gram, the latest first, and of shorter ones.

    Example: after ``1 2 3 9 1 2`` with max_ngram 2, the n-gram ``1 2`` stands at the start and ``3 9 1 2`` is drafted.

    Source: transformers 5.23 (``prompt_lookup_num_tokens``), with two departures that change no output: end tokens are not cut
    from the draft, since verification stops at them, and the length limit counts the tokens that may still be emitted.

    Args:
        max_ngram: longest n-gram to look up, at least 1.
        num_tokens: maximum tokens of a copy, at least 1; each rank gets one copy.
    """

    source = SOURCES.index("prompt_lookup")

    def __init__(self, max_ngram: int = 2, num_tokens: int = 10) -> None:
        super().__init__()
        check_options("prompt_lookup", max_ngram=max_ngram, num_tokens=num_tokens)
        self.published_rows = num_tokens
        self._max_ngram, self._num_tokens = max_ngram, num_tokens

    def begin(self, request: Request) -> NgramIndex:
        """Return an index of the request's n-grams."""
        return NgramIndex(range(1, self._max_ngram + 1))

    def copies(self, request: Request, state: NgramIndex, most: int) -> Iterator[Int32Array]:
        """See ``CopyDrafter``. Longer n-grams come first; of each, the first occurrence, then the others from the latest on."""
        tokens, count = request.tokens, min(self._num_tokens, most)
        state.update(tokens)
        for n in range(self._max_ngram, 0, -1):
            ends = state.ends(tokens, n)
            for at in (*ends[:1], *ends[:0:-1]):
                yield tokens[at : at + count]


class AdaPldDrafter(RequestDrafter[dict[int, list[int]]]):
    """Adaptive prompt lookup (AdaPLD, arXiv 2606.05742): a copy, and beside it the target's ranked tokens at that position.

    The *anchor* is the occurrence of the last token with the nearest context. The ``num_tokens`` tokens after it are the main
    branch. The target's ``branches`` most likely tokens at the anchor are further children of the root; each is followed by one
    token, the one after its occurrence whose context is nearest to the anchor's. Prompt positions and replays have no ranks.

    Example: after ``1 5 6 2 5 7 1 5`` the anchor is the first 5: ``1 5`` stood before, ``2 5`` is less near. ``6 2 5 7 1 5`` is
    the main branch. Had the target said 5 itself, then with 6, 7 and 9 as likeliest next, 7 and 9 are branches, and 1 follows 7.

    Departures from the paper, since a drafter does not see hidden states: nearness is the length of agreement of the preceding
    tokens (at most 64; ties go to the latest) instead of the cosine of hidden states; nothing is drafted if the last token is
    new, instead of using the token with the nearest embedding. Every branch gets its successor (section 3.5), and a step without
    an accepted token is not computed again.

    Args:
        num_tokens: maximum tokens of the main branch, at least 1, per rank.
        branches: maximum number of the target's own tokens beside it, 1 to 32.
    """

    def __init__(self, num_tokens: int = 30, branches: int = 8) -> None:
        super().__init__()
        check_options("adapld", num_tokens=num_tokens, branches=branches)
        self.published_rows = num_tokens + 2 * branches
        self._num_tokens, self._branches = num_tokens, branches

    def prepare(self, target: Target) -> None:
        """Enable ranking of each step's accepted rows."""
        self.top_k = min(self._branches, target.vocab_size)

    def begin(self, request: Request) -> dict[int, list[int]]:
        """Return a map from position to the target's ranked next tokens, the likeliest first."""
        return {}

    def draft(self, request: Request, state: dict[int, list[int]], budget: int) -> DraftTree:
        """Return the main branch, then the others, as many as the budget holds."""
        tokens = request.tokens
        anchor = _nearest(tokens, len(tokens) - 1)
        if anchor is None or budget == 0:
            return DraftTree.chain(request.root, ())
        main = tokens[anchor + 1 : anchor + 1 + self._num_tokens * self.ranks].tolist()
        ranked = [token for token in state.get(anchor, ()) if token != main[0]]
        branches = [[token, *_followers(tokens, anchor, token)] for token in ranked]
        # The branches keep their rows, and the main branch is cut to the rest of the budget.
        rows = [(main[: max(1, budget - sum(map(len, branches)))], _COPIED), *((branch, _RANKED) for branch in branches)]
        return tree_of(request.root, rows, budget)

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """Store the target's ranked tokens after each row of the accepted path."""
        if not target.has_logits or self.top_k == 0:
            return
        path = [0, *acceptance.rows]
        first = request.num_tokens - 1 - len(path)  # position of the root
        ranked = target.top_k(path, self.top_k).tolist()
        self.state(request).update(zip(range(first, first + len(path)), ranked, strict=True))


def _nearest(tokens: Int32Array, at: int, token: int | None = None) -> int | None:
    """Return the position of ``token`` (default: the one at ``at``), not the last, with the longest agreement before it."""
    places = (tokens[:-1] == (tokens[at] if token is None else token)).nonzero()[0]
    if len(places) == 0:
        return None
    for back in range(1, min(at, _MOST_CONTEXT) + 1):
        if len(places) == 1:
            break
        agreeing = places[places >= back]
        agreeing = agreeing[tokens[agreeing - back] == tokens[at - back]]
        if len(agreeing) == 0:
            break
        places = agreeing
    return int(places[-1])


def _followers(tokens: Int32Array, anchor: int, token: int) -> list[int]:
    """Return the token after the occurrence of ``token`` with the context nearest to the anchor's, or []."""
    place = _nearest(tokens, anchor + 1, token)
    return [] if place is None else [int(tokens[place + 1])]
