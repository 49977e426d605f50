"""Strategy ``trie``: branches of prompt and past outputs, by frequency (Alipay's Lookahead)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.base import RequestDrafter, Target
from outrider.decoding.drafters.options import check_options
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.history import Histories, History, compile_recall
from outrider.decoding.sources.log.chains import BLOCK, MAX_MATCH
from outrider.decoding.sources.log.token_log import TokenLog, compile_log
from outrider.decoding.sources.log.trie_selection import INPUT, MIXED, OUTPUT, Nodes, hierarchical, single
from outrider.decoding.tree import SOURCES, DraftTree, tree_of

_MAX_ROWS, _MOST_OCCURRENCES = 4096, 1024
_SOURCE = SOURCES.index("trie")
_SOURCES = np.full(_MAX_ROWS, _SOURCE, np.int8)  # every tree uses a slice of it
_ROOT_PARENTS, _ROOT_SOURCES = np.full(1, -1, np.int32), np.zeros(1, np.int8)  # arrays of a tree of one row
for _shared in (_SOURCES, _ROOT_PARENTS, _ROOT_SOURCES):
    _shared.flags.writeable = False
_FREQUENCIES = {"mix": MIXED, "input": INPUT, "output": OUTPUT}


def _segments(tokens: Int32Array, end_tokens: tuple[int, ...]) -> list[Int32Array]:
    """Return the parts of a text between end tokens, without them."""
    ends = np.flatnonzero(np.isin(tokens, end_tokens))
    return [tokens[start:end] for start, end in zip((0, *(ends + 1)), (*ends, len(tokens)), strict=True)]


class _OwnTexts:
    """Texts of one request, split at end tokens: prompt, references, texts of similar past requests; output if it is private."""

    def __init__(self, request: Request, end_tokens: tuple[int, ...], private: bool) -> None:
        self.published = 0  # output tokens that are in the history
        self.history = History(request.params.max_tokens + BLOCK, end_tokens) if private else None
        self.history_version: object = None  # version of the tenant's history when the texts were written

    def lay_out(self, request: Request, end_tokens: tuple[int, ...], recalled: Sequence[Int32Array]) -> None:
        prompt, *documents = (_segments(text, end_tokens) for text in (request.prompt_ids, *request.references, *recalled))
        prompt = [segment for segment in prompt if len(segment) > 1]  # a single token has no branch, but would take a block
        references = [segment for segments in documents for segment in segments if len(segment) > 1]
        self.log = TokenLog((1 + sum(1 + len(text) // BLOCK for text in (*prompt, *references))) * BLOCK)
        for segment in prompt:
            self.log.add(segment)
        self.references = self.log.end  # the first position of the references
        for segment in references:
            self.log.add(segment)


class TrieDrafter(RequestDrafter[_OwnTexts]):
    """Multi-branch drafts from a trie of prompt and output branches (Lookahead, arXiv 2312.12728, sections 4.2 and 4.3).

    The last ``max_query_length`` tokens, then ever shorter suffixes, are looked up in the branches of the request's prompt, of
    all outputs of its tenant (its own growing one included), and of the public texts. The continuations are drafted as one tree,
    the most frequent branches first. An occurrence in the prompt counts 9,999 times one in an output, but half of the rows are
    reserved for outputs.

    Example: with the past outputs ``1 2 3 4`` and ``1 2 3 5`` and a text that ends in ``1 2``, the tree is 3 with the children 4
    and 5.

    If ranks share a step, the tree has ``decoding_length`` rows per rank, shorter suffixes are looked up until there are
    ``branch_length`` rows per rank, and more occurrences count. The layout ``single`` cannot be partitioned.

    The trie is implicit, see ``decoding.sources.log.token_log``; tests compare it with the explicit one in
    ``experiments/papers/ablation/frequency_trie.py``, which also lists the defects of the published code that are fixed here.
    Further departures: frequencies count at most ``max_occurrences`` occurrences; equally frequent nodes are ordered by depth;
    an output can be drafted from at once, not ``branch_length`` tokens later; pruning is continuous. With ``mix``
    exactly ``min_input`` and ``min_output`` rows are reserved; the published code keeps all nodes that tie with the last of them.
    References count like outputs, for their request only, and so do public texts. A request without a tenant has a private trie.

    Args:
        decoding_length: maximum rows of a tree per rank that shares the step, the root included, at least 1.
        branch_length: maximum tokens of a branch, at least 1.
        max_query_length: tokens to look up, 1 to 32.
        layout: hierarchical (one tree), parallel (its branches side by side), single (the best branch).
        frequencies: mix, input (of the prompt) or output.
        min_input: rows reserved for the branches most frequent in the prompt, with ``mix``, per rank.
        min_output: rows reserved for the branches most frequent in outputs, with ``mix``, per rank; -1: half of the tree's rows.
        max_occurrences: occurrences counted per lookup in each of prompt, outputs and public texts, those with four agreeing
            tokens before those with fewer, the latest first; 1 to 1024. This many per rank, but at most 1024 in total.
        capacity: tokens of outputs to keep per tenant, and of public texts; with 0 every request is private.
        similar_requests: number of past requests of the tenant, those with the most similar prompts, whose outputs and passages
            count like references; 0 for none.
    """

    def __init__(
        self,
        decoding_length: int = 64,
        branch_length: int = 12,
        max_query_length: int = 2,
        layout: str = "hierarchical",
        frequencies: str = "mix",
        min_input: int = 0,
        min_output: int = -1,
        max_occurrences: int = 96,
        capacity: int = 1 << 20,
        similar_requests: int = 4,
    ) -> None:
        check_options(
            "trie", decoding_length=decoding_length, branch_length=branch_length, max_query_length=max_query_length,
            layout=layout, frequencies=frequencies, min_input=min_input, min_output=min_output, max_occurrences=max_occurrences,
            capacity=capacity, similar_requests=similar_requests,
        )  # fmt: skip
        super().__init__()
        self.published_rows = decoding_length - 1
        self._decoding_length, self._branch_length, self._max_query_length = decoding_length, branch_length, max_query_length
        self._layout, self._mode, self._max_occurrences = layout, _FREQUENCIES[frequencies], max_occurrences
        self._min_input, self._min_output, self._num_similar = min_input, min_output, similar_requests
        self.histories = Histories(capacity) if capacity else None
        self._nothing, self._nodes = TokenLog(1), Nodes.empty()[:]
        self._end_tokens: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tries of outputs and public texts."""
        return 0 if self.histories is None else self.histories.nbytes

    def prepare(self, target: Target) -> None:
        """Read the end tokens, which no branch crosses, and compile."""
        self._end_tokens = target.end_token_ids
        if self.histories is not None:
            self.histories.end_tokens = target.end_token_ids
        request = Request("", [0], SamplingParams(max_tokens=8))
        self.propose([request], [4])
        self.finish(request)
        compile_log()
        compile_recall()

    def draft(self, request: Request, state: _OwnTexts, budget: int) -> DraftTree:
        """Return the tree below the text's end."""
        own = state
        # Published first, so that the request drafts from its own latest tokens too.
        history = self._publish(request, own) if own.published < request.num_output else self._history(request, own)
        if own.history_version is not history.version:  # texts were deleted
            self._lay_out(request, own, history)
        size = min(self._decoding_length * self.ranks, _MAX_ROWS, budget + 1)
        depth = min(self._branch_length, request.remaining - 1)
        if size < 2 or depth < 1:
            return DraftTree(request.tokens[-1:].copy(), _ROOT_PARENTS, _ROOT_SOURCES, 1)
        context = request.tokens[-MAX_MATCH:]
        tokens, parents = np.empty(size, np.int32), np.empty(size, np.int32)
        public = self._nothing if self.histories is None or not request.public else self.histories.public.log
        logs = own.log.without(-1), history.log.without(-1), public.without(-1)
        occurrences = min(self._max_occurrences * self.ranks, _MOST_OCCURRENCES)
        query = self._mode, own.references, self._max_query_length, depth, occurrences
        if self._layout == "single":
            rows = single(logs, query, context, self._nodes, tokens, parents)
        else:
            min_output = max(size // 2, 1) if self._min_output < 0 else self._min_output * self.ranks
            quotas = depth * self.ranks, self._min_input * self.ranks, min_output
            rows = hierarchical(logs, query, quotas, context, self._nodes, tokens, parents)
        tree = DraftTree(tokens[:rows], parents[:rows], _SOURCES[:rows], rows)
        return _side_by_side(tree) if self._layout == "parallel" else tree

    def begin(self, request: Request) -> _OwnTexts:
        """Return the request's prompt and references, and start its output in the history."""
        own = _OwnTexts(request, self._end_tokens, private=self.histories is None or request.cache_namespace is None)
        history = self._history(request, own)
        history.start(request.text)
        self._lay_out(request, own, history)
        return own

    def _lay_out(self, request: Request, own: _OwnTexts, history: History) -> None:
        own.history_version = history.version
        own.lay_out(request, self._end_tokens, [text.tokens for text in history.recall(request, self._num_similar)])

    def _history(self, request: Request, own: _OwnTexts) -> History:
        history = own.history
        if history is None:
            assert self.histories is not None
            history = self.histories.of(request.cache_namespace)
        assert history is not None
        return history

    def _publish(self, request: Request, own: _OwnTexts, final: bool = False) -> History:
        history = self._history(request, own)
        history.extend(request.text, own.published, request.output_ids[own.published :], final)
        own.published = request.num_output
        return history

    def finish(self, request: Request) -> None:
        """Complete the request's output in the tenant's trie, and drop its prompt and references."""
        own = self._states.pop(request.request_id, None)
        if own is not None:
            self._publish(request, own, final=True).remember(request)


def _side_by_side(tree: DraftTree) -> DraftTree:
    """Return the paths to the leaves as disjoint chains, cut to the number of rows of the tree."""
    leaves = np.setdiff1d(np.arange(1, len(tree)), tree.parents).tolist()
    branches = ((tree.tokens[tree.path(leaf)].tolist(), _SOURCE) for leaf in leaves)
    return tree_of(int(tree.tokens[0]), branches, len(tree) - 1, merged=False)
