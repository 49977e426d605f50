"""Strategy ``llma``: copy from references at places that agree with the output so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from outrider.decoding.arrays import Int32Array, Int64Array
from outrider.decoding.drafters.base import CopyDrafter, Target
from outrider.decoding.drafters.options import check_options
from outrider.decoding.request import Request
from outrider.decoding.sources.history import Histories, History, compile_recall
from outrider.decoding.tree import SOURCES

_END = -1  # separator after each reference; not a token id
_STREAM = 1  # random stream of the request's seed, apart from the sampling stream


def agreements(text: Int32Array, ends: Int64Array, query: Int32Array, max_length: int) -> list[Int64Array]:
    """Return the positions, of [m] ascending ``ends``, that agree with a query's end in 1, 2, ... ``max_length`` tokens."""
    # All of ``ends`` hold the query's last token.
    levels = [ends] if len(ends) else []
    while levels and len(levels) < min(max_length, len(query)):
        length = len(levels)
        longer = ends[(ends >= length) & (text[ends - length] == query[-1 - length])]
        if not len(longer):
            break
        ends = longer
        levels.append(ends)
    return levels


def _of_length(levels: list[Int64Array], length: int) -> Int64Array:
    """Return the positions that agree in exactly ``length`` tokens."""
    if length > len(levels):
        return np.zeros(0, np.int64)
    ends = levels[length - 1]
    return ends if length == len(levels) else np.setdiff1d(ends, levels[length], assume_unique=True)


class ReferenceIndex:
    """Index of the token positions in a fixed set of references."""

    def __init__(self, references: Sequence[Int32Array]) -> None:
        parts = [part for reference in references for part in (reference, [_END])]
        self.text = np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)  # [n]
        self._order = np.argsort(self.text, kind="stable")  # [n] positions by token, then by position
        self._sorted = self.text[self._order]  # [n]

    def ends(self, token: int) -> Int64Array:
        """Return [m] ascending positions of a token, without those at the end of a reference."""
        left, right = np.searchsorted(self._sorted, [token, token + 1])
        ends: Int64Array = self._order[left:right]
        # In range, because the text ends with a separator.
        ends = ends[self.text[ends + 1] != _END]
        return ends

    def copy(self, position: int, count: int) -> Int32Array:
        """Return up to ``count`` tokens from ``position``, cut at the end of the reference."""
        span = self.text[position : position + count]
        stops = np.flatnonzero(span == _END)
        return span[: stops[0]] if len(stops) else span


class _State:
    def __init__(self, history: History | None) -> None:
        self.history = history
        self.history_version: object = None  # version of the history at the last lookup of references
        self.index = ReferenceIndex(())


class LlmaDrafter(CopyDrafter[_State]):
    """Inference with reference (LLMA, arXiv 2304.04487, sections 2 and 3).

    The last ``match_length`` output tokens are looked up in the references. The occurrence whose preceding tokens agree longest
    with the output is chosen, and the ``copy_length`` tokens after it are drafted. References are, in this order: those of the
    request (documents, earlier turns), its prompt, outputs and documents of the tenant's most similar past requests (the paper's
    cache-assisted generation), and the output itself. If ranks share a step, further copies come from the next best occurrences.

    Example: reference ``4 5 6 7``, output ``9 5``: ``5`` matches and ``6 7`` is drafted.

    Departures from the paper: ties go to the first occurrence, as in the published code, unless ``ties`` selects the paper's
    random choice. Departures from the published code: an occurrence at the end of a reference is skipped, agreement is measured
    over up to ``max_context`` tokens instead of 5, ``copy_length`` does not count the root, and a copy is not cut at an end
    token, since verification stops there.

    Args:
        match_length: n of the paper, at least 1.
        copy_length: k of the paper, tokens of a copy, at least 1; each rank gets one copy.
        max_context: longest agreement to measure, at least ``match_length``.
        include_prompt: use the prompt as a reference.
        include_output: use the output so far as a reference.
        ties: choice among equally long agreements: the ``first``, the last (``recent``), or a ``random`` one, determined by the
            request's seed and the position.
        history_tokens: tokens of outputs to keep per tenant; 0 keeps none.
        similar_requests: number of most similar past requests whose outputs are references; 0 for none.
    """

    source = SOURCES.index("llma")

    def __init__(
        self,
        match_length: int = 1,
        copy_length: int = 15,
        max_context: int = 32,
        include_prompt: bool = True,
        include_output: bool = False,
        ties: str = "first",
        history_tokens: int = 1 << 20,
        similar_requests: int = 4,
    ) -> None:
        super().__init__()
        check_options(
            "llma", match_length=match_length, copy_length=copy_length, max_context=max_context, ties=ties,
            history_tokens=history_tokens, similar_requests=similar_requests,
        )  # fmt: skip
        if max_context < match_length:
            raise ValueError(f"max_context must be at least match_length ({match_length}), got {max_context}")
        self.published_rows = copy_length
        self._match_length, self._copy_length, self._max_context = match_length, copy_length, max_context
        self._include_prompt, self._include_output, self._ties = include_prompt, include_output, ties
        self._num_similar = similar_requests
        self.histories = Histories(history_tokens) if history_tokens and similar_requests else None

    def prepare(self, target: Target) -> None:
        """Compile the search for similar requests."""
        if self.histories is not None:
            compile_recall()

    def begin(self, request: Request) -> _State:
        """Return an index of the request's references."""
        history = None if self.histories is None else self.histories.of(request.cache_namespace)
        if history is not None:
            history.start(request.text)
        state = _State(history)
        self._look_up(request, state)
        return state

    def _look_up(self, request: Request, state: _State) -> None:
        texts = request.references + ((request.prompt_ids,) if self._include_prompt else ())
        if state.history is not None:
            state.history_version = state.history.version
            texts += tuple(text.tokens for text in state.history.recall(request, self._num_similar))
        state.index = ReferenceIndex(texts)

    def finish(self, request: Request) -> None:
        """Add the output to the tenant's history."""
        state = self._states.pop(request.request_id, None)
        if state is not None and state.history is not None:
            state.history.extend(request.text, 0, request.output_ids, final=True)
            state.history.remember(request)

    def copies(self, request: Request, state: _State, most: int) -> Iterator[Int32Array]:
        """See ``CopyDrafter``. The longest agreements come first."""
        if state.history is not None and state.history_version is not state.history.version:  # texts were deleted
            self._look_up(request, state)
        output, index, count = request.output_ids, state.index, min(self._copy_length, most)
        if count < 1 or len(output) < self._match_length:
            return
        levels = agreements(index.text, index.ends(request.root), output, self._max_context)
        own_levels = self._own(output)
        for length in range(max(len(levels), len(own_levels)), self._match_length - 1, -1):
            ends, own_ends = _of_length(levels, length), _of_length(own_levels, length)
            for choice in self._order(request, len(ends) + len(own_ends)):
                if choice < len(ends):
                    yield index.copy(int(ends[choice]) + 1, count)
                else:
                    start = int(own_ends[choice - len(ends)]) + 1
                    yield output[start : start + count]

    def _own(self, output: Int32Array) -> list[Int64Array]:
        ends = np.flatnonzero(output[:-1] == output[-1]) if self._include_output else np.zeros(0, np.int64)
        return agreements(output, ends, output, self._max_context)

    def _order(self, request: Request, count: int) -> Sequence[int]:
        """Return the order in which to copy ``count`` equally long agreements, which are numbered from the oldest."""
        if self._ties == "first" or count == 0:
            return range(count)
        if self._ties == "recent":
            return range(count - 1, -1, -1)
        # A function of seed and position alone: the choice does not depend on which steps were drafted.
        stream = np.random.Philox(key=request.params.seed, counter=[0, request.num_tokens, _STREAM, 0])
        first = int(stream.random_raw() % count)
        return [*range(first, count), *range(first)]
