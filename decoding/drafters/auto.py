"""Auto: every source in one tree, the rows that are most likely to be accepted first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from decoding.budget.acceptance import AcceptanceTable, AcceptanceTables
from decoding.budget.backoff import Backoff
from decoding.budget.candidates import Float64Array
from decoding.budget.expansion import Pool, Rows, grow
from decoding.budget.features import (
    BIGRAM,
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
from decoding.budget.latency import StepLoad
from decoding.budget.selection import ANY_CHANCE, Selection
from decoding.drafters.base import Drafter, Target, TargetRows, check_least
from decoding.request import Acceptance, Request, SamplingParams
from decoding.sources.history import Histories, History, compile_recall
from decoding.sources.log.chains import BLOCK, MAX_MATCH
from decoding.sources.log.token_log import TokenLog, compile_log
from decoding.sources.ranked.contexts import NO_CONTEXTS, NO_SIGNS
from decoding.sources.ranked.successors import LearningSteps, SuccessorTables
from decoding.step_output import BudgetCounts
from decoding.tree import SOURCES, DraftTree, Int32Array

_SOURCE_OF_KIND = np.zeros(NUM_KINDS + 1, np.int8)  # the last one is the root's
_SOURCE_OF_KIND[[COPY, COPY_FRESH]] = SOURCES.index("copy")
_SOURCE_OF_KIND[[SIMILAR, SIMILAR_FRESH]] = SOURCES.index("similar")
_SOURCE_OF_KIND[[HISTORY, HISTORY_FRESH]] = SOURCES.index("history")
_SOURCE_OF_KIND[[UNIGRAM, RECYCLING, BIGRAM]] = [SOURCES.index(name) for name in ("unigram", "recycling", "bigram")]

_WEIGHT_BASE, _WEIGHT_LENGTHS = 2.0, 12  # an occurrence weighs 2 ** (length of agreement, up to 12)
_BEGINNING = 6  # tokens of the prompt's end that stand before a similar request's output, so that its beginning is found
_HISTORY_WEIGHT = 0.7  # of an occurrence in other outputs and public texts beside one in the request's own texts
_CAPS = np.array([64, 128, 64, 24], np.int64)  # occurrences by 1-, 2-, 4-gram, and for each further node
_MORE = np.array([0, 0, 0, 24], np.int64)  # for each further rank
_PROMPT_COUNT = 0.2  # what a token of the prompt adds to the frequencies of tokens, one of an output adds 1
_RECYCLED_SOURCE, _GRAMMAR_SOURCE = SOURCES.index("recycling"), SOURCES.index("grammar")
_MAX_FORCED = 8  # tokens that a grammar forces, drafted at once
_LEAST_CHANCE = 1e-4  # rows below it, by ranks, are not looked at: wide trees reach further down
_PROMPT_TELLING, _TOLD_TOGETHER = 4, 16  # among more requests, so many tokens of one are told to the others together
_LEARNING_REQUESTS = 4  # among more of them, what the target ranks is kept of steps with a draft only
_NOTHING, _NO_TOKENS = np.zeros((0, 0), np.int32), np.zeros(0, np.int32)
_UNRANKED = _NOTHING, NO_CONTEXTS[:]
_ROOT_FEATURES = np.zeros(1, np.int32)
_ANY = SamplingParams(max_tokens=8)


class _RequestState:
    """What is kept for one request."""

    def __init__(self, request: Request, history: History | None, frequent: Int32Array, table: AcceptanceTable) -> None:
        blocks = sum(2 + len(text) // BLOCK for text in request.references)
        blocks += 2 + (request.num_prompt + request.params.max_tokens) // BLOCK
        self.log = TokenLog(blocks * BLOCK)
        for reference in request.references:
            self.log.add(reference)
        self.history, self.table = history, table  # of the tenant
        self.similar: TokenLog | None = None  # what requests that resemble it gave
        self.similarities = np.zeros(0)  # by text of that
        self.frequent = frequent
        self.edition = None if history is None else history.edition  # when it was last looked at
        self.logged = 0  # tokens of the committed sequence that are in the log
        self.told = 0  # tokens of the output that the tenant's history was told
        self.features = _ROOT_FEATURES  # [n] of the tree that was proposed last
        self.backoff = Backoff()
        self.accepted = 0  # drafted tokens that the last step kept
        self.above = NO_SIGNS  # of the row before the last token, see ``decoding.sources.ranked.contexts``


class AutoDrafter(Drafter):
    """All draft-free sources under one budget.

    The tree grows best-first. A node's children come from

    * occurrences of the path to it, and of ever shorter ends of that path, in the prompt, the references and the request's own
      output (``copy``), in the outputs of other requests of its tenant and in the public texts (``history``). As in LLMA (arXiv
      2304.04487) and suffix decoding the longest agreement counts most, and as in the tries of Lookahead (arXiv 2312.12728) what
      occurs more often counts more: an occurrence weighs 2 to the power of the number of agreeing tokens, and a child has its
      share of the weight;
    * what the target ranked after the node's token where it last read a context like the node's: like in its last hidden state
      (``decoding.sources.ranked``), or, where that is not known, in the tokens before; and after the token alone, when it last
      computed it for the tenant (``recycling``, Token Recycling with contexts). Where the option is on, also what it ranks after
      the token alone (``bigram``, N-Grammys, arXiv 2411.03786);
    * below the root, the tokens that are most frequent in the tenant's outputs, the public texts and the prompt (``unigram``).

    Where the request's grammar leaves one text only, and none of these drafts it, that is drafted instead (``grammar``).

    A child's chance given its parent is a measured acceptance rate for its kind of feature, the length of agreement (which grows
    with depth) and its share, learned while serving; for what the target ranked, how likely it found it, and how like the
    contexts are. What it ranked in a context like the node's tells of occurrences as well whether they are likely there (as in
    AdaPLD, arXiv 2606.05742, the rows of copied positions do). Where several sources give a child, the highest chance counts. The
    product along the path orders the rows, and as many are drafted as are expected to pay on this device.

    Where ranks share a step, a row costs what it adds to the largest part of the tree
    (``decoding.budget.step_price.largest_part``), so that more rows pay, and with them there are more frequent tokens, more
    occurrences below a node, and rows of a lower chance.

    Nothing of a tenant reaches another. A request without a tenant is private: it drafts from its own texts, what was ranked for
    it alone and, where it may, the public ones, by rates that are its own, and leaves nothing behind. What steps and rows cost is
    everyone's: it holds no tokens.

    Example: after ``4 5 6 | 4 5`` with nothing else known, ``6 4 5`` is drafted as a chain of copies, beside the tokens that are
    frequent.
    """

    def __init__(
        self,
        max_depth: int = 64,
        history_tokens: int = 1 << 20,
        frequent_tokens: int = 32,
        recycling: bool = True,
        bigrams: int = 0,
        all_rows: bool = False,
        similar_requests: int = 4,
    ) -> None:
        """
        Args:
            max_depth: of the tree, at least 1.
            history_tokens: outputs to keep for each tenant, and public texts, in tokens; 0 keeps none.
            frequent_tokens: frequent tokens to offer, for each rank that shares the step when a request begins; 0 for none.
            recycling: offer what the target ranked after a token before, for the same tenant.
            bigrams: ranks to offer of the target's bigram table, 0 for none. Building it takes a forward over the vocabulary.
            all_rows: draft as many rows as asked for, whatever a row costs.
            similar_requests: past requests of the tenant, those with the most similar prompts, whose outputs and passages are
                looked at apart; 0 for none.

        Raises:
            ValueError: a value outside its range.
        """
        check_least(1, max_depth=max_depth)
        check_least(
            0, history_tokens=history_tokens, frequent_tokens=frequent_tokens, bigrams=bigrams, similar_requests=similar_requests
        )
        self._max_depth, self._num_frequent, self._num_bigrams = max_depth, frequent_tokens, bigrams
        self._all_rows, self._recycling, self._num_similar = all_rows, recycling, similar_requests
        self.memory = Histories(history_tokens) if history_tokens else None
        self._nothing = TokenLog(1)  # stands for the log that a request does not draft from
        self._recycled: SuccessorTables | None = None
        self._bigrams = _NOTHING
        self._tables, self._pool = AcceptanceTables(), Pool.empty()[:]
        self._weights = _WEIGHT_BASE ** np.minimum(np.arange(_WEIGHT_LENGTHS + 1), _WEIGHT_LENGTHS)
        self._selection: Selection | None = None
        self._learning, self._proposed = LearningSteps(), 1  # requests of the last proposal
        self._states: dict[str, _RequestState] = {}

    def prepare(self, target: Target) -> None:
        """Makes room for what the target ranks, builds its bigram table if asked to, and times its steps."""
        if self._recycling:
            self._recycled = SuccessorTables(target.vocab_size)
        if self._num_bigrams:
            self._bigrams = target.bigram_table(self._num_bigrams)
        if not self._all_rows:
            self._selection = Selection(target.latency)
        self._compile()

    def _compile(self) -> None:
        """Calls what is compiled at its first call, so that no request waits for it."""
        request = Request("", [0, 0], _ANY)
        self.propose([request], [4])
        AcceptanceTable().compile()
        if self._recycled is not None:
            self._recycled.compile()
        compile_recall()
        self.finish(request)
        compile_log()

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """One tree per request; fewer rows than the budgets where more do not pay."""
        count = self._proposed = len(requests)
        if self._recycled is not None:  # before steps that may be learned from, what an entry of the table holds
            self.top_k = self._recycled.width if self._learning.due(count) else 0
        if self._selection is not None and load is not None and load.propose_s is not None:
            self._selection.timed(load.propose_s)  # asking a request for drafts has to pay, too
        states = [self._state(request) for request in requests]

        def grown(at: int, least_chances: Float64Array = ANY_CHANCE) -> Rows:
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

    def _grow(self, request: Request, state: _RequestState, budget: int, least_chances: Float64Array) -> Rows:
        history = state.history
        state.log.extend(0, request.tokens[state.logged :])
        state.logged = request.num_tokens
        edition, owner, tenant, public = None, -1, self._nothing, self._nothing
        if history is not None:
            # Others hear of it in batches where telling takes longer than it brings.
            if self._proposed <= _PROMPT_TELLING or request.num_output - state.told >= _TOLD_TOGETHER:
                self._tell(request, state, history)
            edition, owner, tenant = history.edition, history.number(request.text), history.log
            if state.told and owner < 0 and self._recycled is not None:  # its text was removed while it runs
                self._recycled.set_apart(request)
        if self.memory is not None and request.public:
            public = self.memory.public.log
        chances, aside = state.table.chances(), state.table.set_aside
        if aside and HISTORY in aside and HISTORY_FRESH in aside:
            tenant = public = self._nothing
        similar = self._nothing if state.similar is None or (SIMILAR in aside and SIMILAR_FRESH in aside) else state.similar
        rows = Rows.empty(budget)
        recycled = None if self._recycled is None or RECYCLING in aside else self._recycled.known(request, edition)
        frequent = _NO_TOKENS if UNIGRAM in aside else state.frequent[: self._num_frequent * self.ranks]
        kept = _UNRANKED if recycled is None else (recycled.entries, recycled.contexts[:])
        ranked = frequent, *kept, state.above, self._bigrams  # see ``Ranked``
        logs = state.log.without(-1), similar.without(-1), tenant.without(owner), public.without(-1)
        caps = _CAPS + (self.ranks - 1) * _MORE if self.ranks > 1 else _CAPS
        measures = chances, self._weights, _HISTORY_WEIGHT, state.similarities, caps
        limits = budget, min(self._max_depth, request.remaining - 1), least_chances
        count = grow(
            logs, request.tokens[-MAX_MATCH:], ranked, measures, limits, self._pool, rows.numbers, rows.chances
        )  # fmt: skip
        return rows.first(count)

    def _history(self, request: Request) -> History | None:
        return None if self.memory is None else self.memory.of(request.memory)

    def _state(self, request: Request) -> _RequestState:
        """What is kept for a request, which begins at the first call; without what came from texts that were removed since."""
        state = self._states.get(request.request_id)
        if state is None:
            history = self._history(request)
            if history is not None:
                history.start(request.text)
            frequent, table = self._frequent(request, history), self._tables.of(request.memory)
            state = self._states[request.request_id] = _RequestState(request, history, frequent, table)
            self._recall(request, state)
        elif state.history is not None and state.edition is not state.history.edition:
            state.edition, state.frequent = state.history.edition, self._frequent(request, state.history)
            self._recall(request, state)
        return state

    def _recall(self, request: Request, state: _RequestState) -> None:
        """Lays out what past requests gave that resemble this one, the most similar last, where occurrences are found first."""
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

    def _tell(self, request: Request, state: _RequestState, history: History, final: bool = False) -> None:
        """Shows new output to the other requests of the tenant."""
        history.extend(request.text, state.told, request.output_ids[state.told :], final)
        state.told = request.num_output

    def _tree(self, request: Request, state: _RequestState, rows: Rows, budget: int) -> DraftTree:
        if not len(rows.chances):
            state.features, tree = _ROOT_FEATURES, DraftTree.chain(request.root, ())
        else:
            tokens, parents, kinds, state.features, _ = rows.numbers
            tree = DraftTree(tokens, parents, _SOURCE_OF_KIND[kinds], len(tokens))
        if request.grammar is not None:
            request.grammar.catch_up(request.output_ids)
            forced = request.grammar.forced()[: min(budget, _MAX_FORCED)]
            if not _holds(tree, forced):
                state.features = _ROOT_FEATURES  # nothing is learned of it
                return DraftTree.chain(request.root, forced, _GRAMMAR_SOURCE)
        return tree

    def _frequent(self, request: Request, history: History | None) -> Int32Array:
        """The tokens that are most frequent in what the request drafts from, the references left out."""
        counted = [] if history is None else [history.frequencies]
        if self.memory is not None and request.public:
            counted.append(self.memory.public.frequencies)
        counts = np.bincount(request.prompt_ids, minlength=max(map(len, counted), default=0)) * _PROMPT_COUNT
        for frequencies in counted:
            counts[: len(frequencies)] += frequencies
        seen = np.flatnonzero(counts)
        return seen[np.argsort(-counts[seen], kind="stable")[: self._num_frequent * self.ranks]].astype(np.int32)

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """Counts what was accepted, and keeps what the target ranked on the way."""
        state, size = self._state(request), len(tree.tokens)
        state.accepted = len(acceptance.rows)
        if size == len(state.features):
            if self._selection is not None:
                self._selection.emitted(acceptance.count)
            state.table.observe(tree.parents, state.features, acceptance.rows)
        above, state.above = state.above, NO_SIGNS
        if self._recycled is None or (size == 1 and self._proposed > _LEARNING_REQUESTS):
            return
        signs = target.signs
        state.above = signs[acceptance.rows[-1] if acceptance.rows else 0]
        hits = tree.sources[list(acceptance.rows)].tolist().count(_RECYCLED_SOURCE)
        if self._learning.count(hits) and target.has_logits:  # counted without logits, too: else no step would be due again
            history = self._history(request)
            table = self._recycled.of(request, None if history is None else history.edition)
            root = request.num_tokens - acceptance.count - 1
            before = np.array([*request.tokens[max(root - 2, 0) : root].tolist()[::-1], -1, -1][:2], np.int32)
            ranked = target.ranked(range(size), table.width)
            table.learn_tree(tree, before, above, acceptance.rows, signs, ranked)

    def held(self) -> Collection[str]:
        """See ``Drafter``."""
        return self._states

    def finish(self, request: Request) -> None:
        """Keeps the output for other requests of the tenant, and forgets the rest."""
        if self._recycled is not None:
            self._recycled.finish(request)
        state = self._states.pop(request.request_id, None)
        if state is not None and state.history is not None:
            self._tell(request, state, state.history, final=True)
            state.history.remember(request)


def _holds(tree: DraftTree, tokens: Sequence[int]) -> bool:
    """Whether a path from the root spells these tokens."""
    rows = [0]
    for token in tokens:
        rows = tree.children(rows, token)
    return bool(rows)
