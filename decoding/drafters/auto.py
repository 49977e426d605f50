"""Strategy ``auto``: all draft sources in one tree, the rows that are most likely to be accepted first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from outrider.decoding.arrays import Float64Array, Int32Array
from outrider.decoding.budget.acceptance import AcceptanceTable, AcceptanceTables
from outrider.decoding.budget.draft_budget import ANY_CHANCE, Backoff, DraftBudget
from outrider.decoding.budget.features import (
    COPY,
    COPY_FRESH,
    HISTORY,
    HISTORY_FRESH,
    NUM_KINDS,
    RECYCLING,
    SIMILAR,
    SIMILAR_FRESH,
    UNIGRAM,
)
from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.budget.tree_builder import TreeRows, Workspace, build_tree
from outrider.decoding.drafters.base import Drafter, Target, TargetRows
from outrider.decoding.drafters.options import check_options
from outrider.decoding.request import BudgetCounts, Request, SamplingParams
from outrider.decoding.sources.history import Histories, History, compile_recall
from outrider.decoding.sources.log.chains import BLOCK, MAX_MATCH
from outrider.decoding.sources.log.token_log import TokenLog, compile_log
from outrider.decoding.sources.ranked.contexts import NO_CONTEXTS, NO_SIGNS
from outrider.decoding.sources.ranked.successors import LearningSteps, SuccessorTables
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree

_SOURCE_OF_KIND = np.zeros(NUM_KINDS + 1, np.int8)  # the last entry is the root's
_SOURCE_OF_KIND[[COPY, COPY_FRESH]] = SOURCES.index("copy")
_SOURCE_OF_KIND[[SIMILAR, SIMILAR_FRESH]] = SOURCES.index("similar")
_SOURCE_OF_KIND[[HISTORY, HISTORY_FRESH]] = SOURCES.index("history")
_SOURCE_OF_KIND[[UNIGRAM, RECYCLING]] = [SOURCES.index(name) for name in ("unigram", "recycling")]

_WEIGHT_BASE, _WEIGHT_LENGTHS = 2.0, 12  # weight of an occurrence: 2 ** min(agreement, 12)
_BEGINNING = 6  # prompt tokens put before a similar request's output, so that its beginning is found
_HISTORY_WEIGHT = 0.7  # weight of an occurrence in tenant or public texts, relative to one in the request's own texts
_CAPS = np.array([64, 128, 64, 24], np.int64)  # maximum occurrences by 1-, 2-, 4-gram, and per further node
_MORE = np.array([0, 0, 0, 24], np.int64)  # added for each further rank
_PROMPT_COUNT = 0.2  # weight of a prompt token in token frequencies; output tokens have 1
_RECYCLED_SOURCE, _GRAMMAR_SOURCE = SOURCES.index("recycling"), SOURCES.index("grammar")
_MAX_FORCED = 8  # maximum grammar-forced tokens drafted at once
_LEAST_CHANCE = 1e-4  # divided by the number of ranks: minimum chance of a row, since wide trees use less likely rows
_PROMPT_TELLING, _TOLD_TOGETHER = 4, 16  # with more than 4 requests, output is added to the history in batches of 16 tokens
_LEARNING_REQUESTS = 4  # with more requests, rankings are learned only from steps with a draft
_NO_TOKENS = np.zeros(0, np.int32)
_UNRANKED = np.zeros((0, 0), np.int32), NO_CONTEXTS[:]
_ROOT_FEATURES = np.zeros(1, np.int32)
_ANY = SamplingParams(max_tokens=8)


class _RequestState:
    def __init__(self, request: Request, history: History | None, frequent: Int32Array, table: AcceptanceTable) -> None:
        blocks = sum(2 + len(text) // BLOCK for text in request.references)
        blocks += 2 + (request.num_prompt + request.params.max_tokens) // BLOCK
        self.log = TokenLog(blocks * BLOCK)
        for reference in request.references:
            self.log.add(reference)
        self.history, self.table = history, table  # shared by the tenant's requests
        self.similar: TokenLog | None = None  # texts of similar past requests
        self.similarities = np.zeros(0)  # [texts] similarity of each text in ``similar``
        self.frequent = frequent
        self.history_version = None if history is None else history.version  # version of the history last seen
        self.logged = 0  # tokens of the committed sequence that are in the log
        self.num_published = 0  # output tokens that are in the tenant's history
        self.features = _ROOT_FEATURES  # [n] features of the last proposed tree
        self.backoff = Backoff()
        self.accepted = 0  # drafted tokens accepted in the last step
        self.parent_signs = NO_SIGNS  # hidden-state signs of the row before the last token (``decoding.sources.ranked.contexts``)


class AutoDrafter(Drafter):
    """All draft-free sources under one row budget.

    The tree grows best-first. The children of a node come from:

    * ``copy``: occurrences of the path to the node, and of ever shorter suffixes of it, in the prompt, the references and the
      request's own output; ``similar``: the same in texts of similar past requests; ``history``: the same in other outputs of its
      tenant and in public texts. An occurrence weighs 2 to the power of the number of agreeing tokens (longest agreement as in
      LLMA, arXiv 2304.04487, frequency as in Lookahead, arXiv 2312.12728), and a child has its share of the total weight.
    * ``recycling`` (Token Recycling with contexts): tokens that the target ranked after the node's token when it last read a
      similar context, by its last hidden state (``decoding.sources.ranked``) or, if that is unknown, by the tokens before; and
      tokens that it last ranked after the token alone, for the same tenant.
    * ``unigram``, below the root only: the most frequent tokens of the tenant's outputs, the public texts and the prompt.
    * ``grammar``: the only text that the request's grammar allows, drafted instead of a tree that does not hold it.

    The chance of a child given its parent is a learned acceptance rate (``AcceptanceTable``), adjusted for occurrences by the
    ranking in a similar context (as AdaPLD, arXiv 2606.05742, uses the rows of copied positions). Rows are ordered by the product
    of chances along the path, and as many are drafted as are expected to pay off on this device (``DraftBudget``).

    **Privacy**: no text of a tenant reaches another. A request without a tenant drafts only from its own texts, its own rankings
    and, if allowed, public texts, with separate acceptance rates, and leaves nothing behind.

    Args:
        max_depth: maximum depth of the tree, at least 1.
        history_tokens: tokens of outputs to keep per tenant, and of public texts; 0 keeps none.
        recycling: offer tokens that the target ranked before, for the same tenant.
        all_rows: draft as many rows as the budget allows, whatever they cost.
        similar_requests: number of past requests of the tenant, those with the most similar prompts, whose outputs and passages
            form the ``similar`` source; 0 for none.
    """

    num_frequent = 32  # frequent tokens to offer, per rank that shares the step when a request begins

    def __init__(
        self,
        max_depth: int = 64,
        history_tokens: int = 1 << 20,
        recycling: bool = True,
        all_rows: bool = False,
        similar_requests: int = 4,
    ) -> None:
        check_options("auto", max_depth=max_depth, history_tokens=history_tokens, similar_requests=similar_requests)
        self._max_depth, self._num_similar = max_depth, similar_requests
        self._all_rows, self._recycling = all_rows, recycling
        self.histories = Histories(history_tokens) if history_tokens else None
        self._nothing = TokenLog(1)  # empty log, for sources that a request does not use
        self._recycled: SuccessorTables | None = None
        self._tables, self._pool = AcceptanceTables(), Workspace.empty()[:]
        self._weights = _WEIGHT_BASE ** np.minimum(np.arange(_WEIGHT_LENGTHS + 1), _WEIGHT_LENGTHS)
        self._selection: DraftBudget | None = None
        self._learning, self._proposed = LearningSteps(), 1  # _proposed: number of requests in the last proposal
        self._states: dict[str, _RequestState] = {}

    def prepare(self, target: Target) -> None:
        """Allocate the ranking tables, time the target's steps, and compile."""
        if self._recycling:
            self._recycled = SuccessorTables(target.vocab_size)
        if not self._all_rows:
            # Shared by all tenants: step and row costs contain no tokens.
            self._selection = DraftBudget(target.latency)
        self._compile()

    def _compile(self) -> None:
        request = Request("", [0, 0], _ANY)
        self.propose([request], [4])
        AcceptanceTable().compile()
        if self._recycled is not None:
            self._recycled.compile()
        compile_recall()
        self.finish(request)
        compile_log()

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """Return one tree per request, with fewer rows than the budget if more do not pay off."""
        count = self._proposed = len(requests)
        if self._recycled is not None:  # rank tokens only in steps that may be learned from
            self.top_k = self._recycled.width if self._learning.due(count) else 0
        if self._selection is not None and load is not None and load.propose_s is not None:
            self._selection.timed(load.propose_s)  # drafting time counts as a cost
        states = [self._state(request) for request in requests]

        def grown(at: int, least_chances: Float64Array = ANY_CHANCE) -> TreeRows:
            # Ranks that share a step make rows cheaper, so that less likely ones pay off.
            least = np.maximum(least_chances, _LEAST_CHANCE / self.ranks)
            return self._grow(requests[at], states[at], budgets[at], least)

        if self._selection is None or not requests:
            rows = [grown(at) for at in range(count)]
        else:
            backoffs, everyone = [state.backoff for state in states], [state.backoff for state in self._states.values()]
            accepted = sum(state.accepted for state in states)
            rows = self._selection.rows(load or StepLoad.of(requests), self.ranks, backoffs, everyone, accepted, grown)
        return [self._tree(*each) for each in zip(requests, states, rows, budgets, strict=True)]

    def budget(self) -> BudgetCounts | None:
        """See ``Drafter``."""
        return None if self._selection is None else self._selection.counts()

    def _grow(self, request: Request, state: _RequestState, budget: int, least_chances: Float64Array) -> TreeRows:
        history = state.history
        state.log.extend(0, request.tokens[state.logged :])
        state.logged = request.num_tokens
        edition, owner, tenant, public = None, -1, self._nothing, self._nothing
        if history is not None:
            # With many requests, batching saves more time than the fresher history would.
            if self._proposed <= _PROMPT_TELLING or request.num_output - state.num_published >= _TOLD_TOGETHER:
                self._publish(request, state, history)
            edition, owner, tenant = history.version, history.number(request.text), history.log
            if state.num_published and owner < 0 and self._recycled is not None:  # its text was deleted while the request runs
                self._recycled.set_apart(request)
        if self.histories is not None and request.public:
            public = self.histories.public.log
        chances, aside = state.table.chances(), state.table.disabled_sources
        # All chances of the source are 0: an empty log saves the search. Occurrences of both kinds come from the same log.
        if aside and HISTORY in aside and HISTORY_FRESH in aside:
            tenant = public = self._nothing
        similar = self._nothing if state.similar is None or (SIMILAR in aside and SIMILAR_FRESH in aside) else state.similar
        rows = TreeRows.empty(budget)
        recycled = None if self._recycled is None or RECYCLING in aside else self._recycled.known(request, edition)
        frequent = _NO_TOKENS if UNIGRAM in aside else state.frequent[: self.num_frequent * self.ranks]
        kept = _UNRANKED if recycled is None else (recycled.entries, recycled.contexts[:])
        ranked = frequent, *kept, state.parent_signs  # see ``RankedTokens``
        logs = state.log.without(-1), similar.without(-1), tenant.without(owner), public.without(-1)
        # If ranks share a step more rows pay off, so that further occurrences are worth their search.
        caps = _CAPS + (self.ranks - 1) * _MORE if self.ranks > 1 else _CAPS
        measures = chances, self._weights, _HISTORY_WEIGHT, state.similarities, caps
        # The bonus token takes the last place of the request.
        limits = budget, min(self._max_depth, request.remaining - 1), least_chances
        count = build_tree(
            logs, request.tokens[-MAX_MATCH:], ranked, measures, limits, self._pool, rows.numbers, rows.chances
        )  # fmt: skip
        return rows.first(count)

    def _history(self, request: Request) -> History | None:
        return None if self.histories is None else self.histories.of(request.cache_namespace)

    def _state(self, request: Request) -> _RequestState:
        """Return the state of a request, created at the first call, and renewed if texts of the tenant were deleted."""
        state = self._states.get(request.request_id)
        if state is None:
            history = self._history(request)
            if history is not None:
                history.start(request.text)
            frequent, table = self._frequent(request, history), self._tables.of(request.cache_namespace)
            state = self._states[request.request_id] = _RequestState(request, history, frequent, table)
            self._recall(request, state)
        elif state.history is not None and state.history_version is not state.history.version:
            state.history_version, state.frequent = state.history.version, self._frequent(request, state.history)
            self._recall(request, state)
        return state

    def _recall(self, request: Request, state: _RequestState) -> None:
        """Load texts of similar past requests, the most similar last, because occurrences are searched from the end."""
        state.similar = None
        recalled = [] if state.history is None else state.history.recall(request, self._num_similar)[::-1]
        if not recalled:
            return
        beginning = request.prompt_ids[-_BEGINNING:]
        texts = [np.concatenate([beginning, text.tokens]) if text.is_output else text.tokens for text in recalled]
        state.similar = TokenLog(sum(1 + -(-len(text) // BLOCK) for text in texts) * BLOCK)
        for text in texts:
            state.similar.add(text)
        state.similarities = np.array([text.similarity for text in recalled])

    def _publish(self, request: Request, state: _RequestState, history: History, final: bool = False) -> None:
        history.extend(request.text, state.num_published, request.output_ids[state.num_published :], final)
        state.num_published = request.num_output

    def _tree(self, request: Request, state: _RequestState, rows: TreeRows, budget: int) -> DraftTree:
        if not len(rows.chances):
            state.features, tree = _ROOT_FEATURES, DraftTree.chain(request.root, ())
        else:
            tokens, parents, kinds, state.features, _ = rows.numbers
            tree = DraftTree(tokens, parents, _SOURCE_OF_KIND[kinds], len(tokens))
        if request.grammar is not None:
            request.grammar.catch_up(request.output_ids)
            forced = request.grammar.forced()[: min(budget, _MAX_FORCED)]
            if not _holds(tree, forced):
                state.features = _ROOT_FEATURES  # grammar rows teach nothing
                return DraftTree.chain(request.root, forced, _GRAMMAR_SOURCE)
        return tree

    def _frequent(self, request: Request, history: History | None) -> Int32Array:
        """Return the most frequent tokens of the tenant's outputs, the public texts and the prompt."""
        counted = [] if history is None else [history.frequencies]
        if self.histories is not None and request.public:
            counted.append(self.histories.public.frequencies)
        counts = np.bincount(request.prompt_ids, minlength=max(map(len, counted), default=0)) * _PROMPT_COUNT
        for frequencies in counted:
            counts[: len(frequencies)] += frequencies
        seen = np.flatnonzero(counts)
        return seen[np.argsort(-counts[seen], kind="stable")[: self.num_frequent * self.ranks]].astype(np.int32)

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """Learn from a verified tree: acceptance rates, and the tokens that the target ranked."""
        state, size = self._state(request), len(tree.tokens)
        state.accepted = len(acceptance.rows)
        # After a preemption or a cut the computed tree is not the proposed one, and the features do not describe it.
        if size == len(state.features):
            if self._selection is not None:
                self._selection.emitted(acceptance.count)
            state.table.observe(tree.parents, state.features, acceptance.rows)
        # Unknown in the next step if this one returns early.
        above, state.parent_signs = state.parent_signs, NO_SIGNS
        if self._recycled is None or (size == 1 and self._proposed > _LEARNING_REQUESTS):
            return
        signs = target.signs
        state.parent_signs = signs[acceptance.rows[-1] if acceptance.rows else 0]
        hits = tree.sources[list(acceptance.rows)].tolist().count(_RECYCLED_SOURCE)
        if self._learning.count(hits) and target.has_logits:  # count even without logits, otherwise no step would be due again
            history = self._history(request)
            table = self._recycled.of(request, None if history is None else history.version)
            root = request.num_tokens - acceptance.count - 1
            before = np.array([*request.tokens[max(root - 2, 0) : root].tolist()[::-1], -1, -1][:2], np.int32)
            ranked = target.ranked(range(size), table.width)
            table.learn_tree(tree, before, above, acceptance.rows, signs, ranked)

    def tracked_requests(self) -> Collection[str]:
        """See ``Drafter``."""
        return self._states

    def finish(self, request: Request) -> None:
        """Add the output to the tenant's history, and forget the request."""
        if self._recycled is not None:
            self._recycled.finish(request)
        state = self._states.pop(request.request_id, None)
        if state is not None and state.history is not None:
            self._publish(request, state, state.history, final=True)
            state.history.remember(request)


def _holds(tree: DraftTree, tokens: Sequence[int]) -> bool:
    """Return whether a path from the root spells these tokens."""
    rows = [0]
    for token in tokens:
        rows = tree.children(rows, token)
    return bool(rows)
