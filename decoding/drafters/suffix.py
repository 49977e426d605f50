"""Strategies ``suffix``, ``suffix_decoding`` and ``sam``: continuations of suffixes of the text that occurred before."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile

from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import CopyDrafter, RequestDrafter
from outrider.decoding.drafters.options import check_options
from outrider.decoding.drafters.recycling import PUBLISHED_ROWS, RecyclingDrafter
from outrider.decoding.request import Request
from outrider.decoding.sources.history import Histories, History
from outrider.decoding.sources.ranked.successors import MAX_TENANTS
from outrider.decoding.sources.suffix_automaton import CountedAutomaton, SuffixAutomaton
from outrider.decoding.tree import SOURCES, DraftTree

_SOURCE = SOURCES.index("suffix")


class _Texts:
    """References, prompt and output of one request, concatenated in one automaton."""

    def __init__(self, request: Request) -> None:
        self._automaton = SuffixAutomaton()
        # A different negative token follows each reference, so that no match crosses its end.
        for number, reference in enumerate(request.references):
            self._automaton.extend([*reference.tolist(), -1 - number])
        self._prompt = len(self._automaton.text)  # start of the prompt
        self._output = self._prompt + request.num_prompt

    def update(self, request: Request) -> None:
        known = len(self._automaton.text) - self._prompt
        self._automaton.extend(request.tokens[known:].tolist())

    def matches(self, min_length: int, occurrence: str) -> Iterator[tuple[int, int]]:
        """Yield (start of the copy, match length) of two occurrences per suffix, the longest first, then by preference."""
        automaton, state = self._automaton, self._automaton.match
        while state and automaton.length[state] >= min_length:
            last, first = automaton.last_end[state], automaton.first_end[state]
            # A text repeats its latest form, but follows its sources from their beginning.
            latest = occurrence == "latest" or (occurrence == "mixed" and last > self._output)
            for end in (last, first) if latest else (first, last):
                if automaton.text[end] >= 0:
                    yield end, automaton.length[state]
            state = automaton.link[state]

    def copy(self, start: int, count: int) -> list[int]:
        """Return up to ``count`` tokens from ``start``: cut at the end of a reference, restarting at the end of the text."""
        span = self._automaton.text[start : start + count]
        if start < self._prompt:
            return list(takewhile(lambda token: token >= 0, span))
        return (span * (count // len(span) + 1))[:count]


class SuffixDrafter(CopyDrafter[_Texts]):
    """Longest suffix match (SAM-Decoding, arXiv 2411.10666), drafted by length (SuffixDecoding, arXiv 2411.04975, section 4).

    The longest suffix of the text that occurs earlier in references, prompt or output is chosen, and ``max_spec_factor * match +
    max_spec_offset`` tokens after it are drafted. A copy that reaches the end of the text restarts, so that a period is drafted
    in full. If ranks share a step, further copies come from the other known occurrence, then from shorter matches.

    Example: reference ``7 1 2 3``, prompt ``1 2 4``, output ``5 1 2``: the match ``1 2`` stands in both, the reference comes
    first, and ``3`` is drafted. After the output ``5 1 2 6 1 2`` it is ``6 1 2 6 1 ...``.

    Departures: one automaton per request; the latest occurrence in the output; nothing is drafted without a match.
    ``suffix_decoding`` and ``sam`` are the two methods as published.

    Args:
        max_spec_tokens: maximum tokens of a copy, at least 1; each rank gets one copy.
        max_spec_factor: tokens to copy per matching token, at least 0.
        max_spec_offset: tokens to copy on top; may be negative, so that short matches draft nothing.
        min_match_length: at least 1.
        occurrence: occurrence to copy, over references, prompt and output in this order: ``latest``, ``earliest``, or the latest
            if it is in the output, else the earliest (``mixed``).
    """

    source = _SOURCE

    def __init__(
        self,
        max_spec_tokens: int = 40,
        max_spec_factor: float = 4.0,
        max_spec_offset: float = 4.0,
        min_match_length: int = 1,
        occurrence: str = "mixed",
    ) -> None:
        super().__init__()
        check_options(
            "suffix", max_spec_tokens=max_spec_tokens, max_spec_factor=max_spec_factor, max_spec_offset=max_spec_offset,
            min_match_length=min_match_length, occurrence=occurrence,
        )  # fmt: skip
        self.published_rows = max_spec_tokens
        self._max_spec_tokens, self._min_match_length, self._occurrence = max_spec_tokens, min_match_length, occurrence
        self._factor, self._offset = max_spec_factor, max_spec_offset

    def begin(self, request: Request) -> _Texts:
        """Return an automaton of the request's texts."""
        return _Texts(request)

    def copies(self, request: Request, state: _Texts, most: int) -> Iterator[list[int]]:
        """See ``CopyDrafter``. The longest match comes first."""
        state.update(request)
        for start, length in state.matches(self._min_match_length, self._occurrence) if most > 0 else ():
            wanted = int(self._factor * length + self._offset + 1e-6)  # published rounding: 0.1 * 10 is 1
            yield state.copy(start, min(wanted, most, self._max_spec_tokens)) if wanted > 0 else []


class _Outputs:
    """Outputs of a tenant's requests in two automata: when the newer one is full, it replaces the older one."""

    def __init__(self, depth: int, capacity: int, history_version: object) -> None:
        self.history_version = history_version  # version of the history at the start
        self.automata = [CountedAutomaton(depth)]
        self._depth, self._capacity, self._texts = depth, capacity, 0

    def add(self, tokens: Sequence[int]) -> None:
        if len(self.automata[0].text) + len(tokens) >= self._capacity // 2:
            self.automata = [CountedAutomaton(self._depth), self.automata[0]]
        self._texts += 1
        self.automata[0].extend([*tokens[-self._capacity // 2 :], -self._texts])


class SuffixDecodingDrafter(RequestDrafter[CountedAutomaton]):
    """SuffixDecoding (arXiv 2411.04975, section 4): the most frequent continuations of a suffix of the text, as a tree.

    Each suffix of ``m`` tokens that occurs in the request's own texts, or in outputs of its tenant, offers a tree of up to
    ``max_spec_factor * m + max_spec_offset`` tokens, best first by their share of the suffix's occurrences. Its score is the sum
    of the shares: the expected number of accepted tokens. The best score is drafted; ties go to the request's own texts, then to
    the longest suffix. If texts of a tenant are deleted, all its outputs are dropped.

    Example: after ``1 2 3 1 2 4 1 2`` the end ``1 2`` stands three times, itself among them, so that 3 and 4 have 1/3 each: both
    are drafted with a score of 2/3.

    Departures: equally likely tokens are ordered by depth, then by count, where the published order is the heap's; outputs of
    running requests are only in their own texts; the oldest half of the outputs is dropped at once; references belong to the
    request's own texts.

    Args:
        max_spec_tokens: maximum tokens of a tree, per rank that shares the step, at least 1.
        max_spec_factor: tokens to draft per matching token, per rank, at least 0.
        max_spec_offset: tokens to draft on top, per rank; may be negative.
        min_token_prob: minimum share of a token, from 0 to 1.
        max_tree_depth: maximum tokens of a match and its draft together, at least 2.
        capacity: tokens of outputs to keep per tenant, at least 2.
    """

    def __init__(
        self,
        max_spec_tokens: int = 64,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        max_tree_depth: int = 64,
        capacity: int = 1 << 16,
    ) -> None:
        super().__init__()
        check_options(
            "suffix_decoding", max_spec_tokens=max_spec_tokens, max_spec_factor=max_spec_factor, max_spec_offset=max_spec_offset,
            min_token_prob=min_token_prob, max_tree_depth=max_tree_depth, capacity=capacity,
        )  # fmt: skip
        self.published_rows = max_spec_tokens
        self._most, self._factor, self._offset = max_spec_tokens, max_spec_factor, max_spec_offset
        self._least, self._depth, self._capacity = min_token_prob, max_tree_depth, capacity
        # Of suffixes with the same occurrences the longest drafts most, until the depth limit leaves it no room.
        self._roomy = int((max_tree_depth - max_spec_offset) / (1.0 + max_spec_factor))
        self._outputs: OrderedDict[str, _Outputs] = OrderedDict()
        self.histories = Histories(1)  # only notified of deletions; holds no texts

    def keeps_output(self, request: Request) -> bool:
        """Return False: the outputs are not in the history."""
        return False

    def begin(self, request: Request) -> CountedAutomaton:
        """Return an automaton of the request's references; prompt and output are added by ``draft``."""
        history = self._history(request)
        if history is not None:
            history.start(request.text)
        own = CountedAutomaton(self._depth)
        for number, reference in enumerate(request.references, start=1):
            own.extend([*reference.tolist(), -number])
        return own

    def draft(self, request: Request, state: CountedAutomaton, budget: int) -> DraftTree:
        """Return the tree with the best score."""
        first = sum(len(reference) + 1 for reference in request.references)
        state.extend(request.tokens[len(state.text) - first :].tolist())
        kept = self._kept(request)
        context = request.tokens[-self._depth :].tolist()
        best, score = DraftTree.chain(request.root, ()), 0.0
        for automaton in (state, *(kept.automata if kept is not None else ())):
            for end, most, fewest in automaton.ends(None if automaton is state else context):
                for length in dict.fromkeys((most, max(fewest, min(most, self._roomy)))):
                    rows = int(self._factor * length + self._offset + 1e-6)  # the published rounding
                    rows = min(min(rows, self._most) * self.ranks, budget)
                    if rows > score:  # otherwise it cannot reach a better score
                        tree, reached = self._grow(automaton, end, length, request.root, rows)
                        if reached > score:
                            best, score = tree, reached
        return best

    def finish(self, request: Request) -> None:
        """Keep the output for the tenant's other requests, and forget the request."""
        if request.request_id in self._states:
            kept, history = self._kept(request), self._history(request)
            if kept is not None and history is not None:
                # A text that was deleted while the request ran does not come back.
                if not history.removed(request.text):
                    kept.add(request.output_ids.tolist())
                history.extend(request.text, 0, (), final=True)
        super().finish(request)

    def _history(self, request: Request) -> History | None:
        # Read anew each time: an engine with several strategies sets one history for all of them.
        return None if self.histories is None else self.histories.of(request.cache_namespace)

    def _kept(self, request: Request) -> _Outputs | None:
        """Return the outputs of the request's tenant, or None without a tenant."""
        history = self._history(request)
        if history is None or request.cache_namespace is None:
            return None
        kept = self._outputs.get(request.cache_namespace)
        # Another version means that texts of the tenant were deleted: single texts cannot be removed from an automaton.
        if kept is None or kept.history_version is not history.version:
            kept = self._outputs[request.cache_namespace] = _Outputs(self._depth, self._capacity, history.version)
        self._outputs.move_to_end(request.cache_namespace)
        if len(self._outputs) > MAX_TENANTS:
            self._outputs.popitem(last=False)
        return kept

    def _grow(self, automaton: CountedAutomaton, end: int, length: int, root: int, rows: int) -> tuple[DraftTree, float]:
        counts = automaton.count
        tokens, parents, score = [root], [-1], 0.0
        open_rows: list[tuple[float, int, int, int, int, int]] = []  # -share, depth, -count, token, parent, state

        def offer(parent: int, state: int, share: float, depth: int) -> None:
            if length + depth > self._depth:
                return
            for token, follower in automaton.following(state):
                own = share * counts[follower] / counts[state]
                if token >= 0 and own >= self._least:
                    heapq.heappush(open_rows, (-own, depth, -counts[follower], token, parent, follower))

        offer(0, end, 1.0, 1)
        while open_rows and len(tokens) <= rows:
            share, depth, _, token, parent, state = heapq.heappop(open_rows)
            row = len(tokens)
            tokens.append(token)
            parents.append(parent)
            score -= share
            offer(row, state, -share, depth + 1)
        return DraftTree.of(tokens, parents, _SOURCE), score


class SamDrafter(RecyclingDrafter):
    """SAM-Decoding (arXiv 2411.10666, section 3.3): a ``suffix`` copy after a long match, else the ``recycling`` tree.

    Departures: no automaton of a corpus; prompt rows teach nothing to the table.

    Args:
        max_spec_tokens: maximum tokens of a copy, at least 1.
        min_match_length: minimum matching tokens for a copy, at least 1.
        shape, scope: see ``RecyclingDrafter``.
    """

    def __init__(
        self, max_spec_tokens: int = 40, min_match_length: int = 5, shape: str = "published", scope: str = "tenant"
    ) -> None:
        super().__init__(shape=shape, scope=scope)
        check_options("sam", max_spec_tokens=max_spec_tokens, min_match_length=min_match_length)
        self.published_rows = max(max_spec_tokens, PUBLISHED_ROWS)
        self._copies = SuffixDrafter(max_spec_tokens, 0.0, float(max_spec_tokens), min_match_length)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """Return one tree per request."""
        self._copies.ranks = self.ranks
        copied = self._copies.propose(requests, budgets)
        grown = super().propose(requests, budgets, load)
        return [copy if copy.num_candidates > 1 else tree for copy, tree in zip(copied, grown, strict=True)]

    def finish(self, request: Request) -> None:
        """Forget the request."""
        self._copies.finish(request)
        super().finish(request)

    def tracked_requests(self) -> Collection[str]:
        """See ``Drafter``."""
        return {*super().tracked_requests(), *self._copies.tracked_requests()}
