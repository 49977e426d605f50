"""LLMA: copy from references where they agree with the output so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from decoding.drafters.base import CopyDrafter, Target, check_choice, check_least
from decoding.request import Request
from decoding.sources.history import Histories, History, compile_recall
from decoding.tree import SOURCES, Int32Array

Positions = npt.NDArray[np.int64]

TIES = ("first", "recent", "random")

_END = -1  # stands after each reference; no token has this id
_STREAM = 1  # of the request's seed, beside the one that draws its tokens


def agreements(text: Int32Array, ends: Positions, query: Int32Array, max_length: int) -> list[Positions]:
    """Which of some positions in a text agree with the end of a query, read backwards, in one token, in two, and so on.

    Example: text ``4 5 6 5``, query ``9 4 5``: the ends 1 and 3, where 5 stands, agree in one token, and 1 in two.

    Args:
        text: [n] token ids.
        ends: [m] ascending positions at which the query's last token stands.
        query: [q] token ids, at least one.
        max_length: agreement is not measured beyond this many tokens.

    Returns:
        For each length from 1 to the longest that is reached, the positions that agree in as many tokens or more; nothing without
        ``ends``.
    """
    levels = [ends] if len(ends) else []
    while levels and len(levels) < min(max_length, len(query)):
        length = len(levels)
        longer = ends[(ends >= length) & (text[ends - length] == query[-1 - length])]
        if not len(longer):
            break
        ends = longer
        levels.append(ends)
    return levels


def _of_length(levels: list[Positions], length: int) -> Positions:
    """The positions that agree in so many tokens and no more."""
    if length > len(levels):
        return np.zeros(0, np.int64)
    ends = levels[length - 1]
    return ends if length == len(levels) else np.setdiff1d(ends, levels[length], assume_unique=True)


class ReferenceIndex:
    """Occurrences of tokens in a fixed set of references."""

    def __init__(self, references: Sequence[Int32Array]) -> None:
        parts = [part for reference in references for part in (reference, [_END])]
        self.text = np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)  # [n]
        self._order = np.argsort(self.text, kind="stable")  # [n] positions by token, then by position
        self._sorted = self.text[self._order]  # [n]

    def ends(self, token: int) -> Positions:
        """[m] the positions of a token, ascending, but for those at the end of a reference, where there is nothing to copy."""
        left, right = np.searchsorted(self._sorted, [token, token + 1])
        ends: Positions = self._order[left:right]
        ends = ends[self.text[ends + 1] != _END]
        return ends

    def copy(self, position: int, count: int) -> Int32Array:
        """Up to ``count`` tokens from ``position``, cut at the end of the reference."""
        span = self.text[position : position + count]
        stops = np.flatnonzero(span == _END)
        return span[: stops[0]] if len(stops) else span


class _State:
    """What is kept for one request: its references, and where its output goes."""

    def __init__(self, history: History | None) -> None:
        self.history = history
        self.edition: object = None  # of the history when the references were looked up
        self.index = ReferenceIndex(())


class LlmaDrafter(CopyDrafter[_State]):
    """Inference with reference (LLMA, arXiv 2304.04487, sections 2 and 3).

    At each step the last ``match_length`` tokens of the output are looked up in the references; of all occurrences the one whose
    preceding tokens agree the longest with the output is taken, and the ``copy_length`` tokens after it are drafted. References
    are those of the request (documents, earlier turns) in their order, then its prompt, then outputs and documents of the
    tenant's past requests that resemble it the most (the paper's cache-assisted generation), then the output itself.

    Example: reference ``4 5 6 7``, output ``9 5``: ``5`` matches and ``6 7`` is drafted.

    Where ranks share a step, further copies are from the other occurrences that agree the longest, then from those that agree in
    a token less.

    Departures from the paper: ties go to the first occurrence, as in the published code, unless ``ties`` asks for the paper's
    random choice. From the published code: an occurrence at the end of a reference is passed over for the next best, agreement is
    measured up to ``max_context`` tokens instead of 5, ``copy_length`` does not count the root, and a copy is not cut at an end
    token, since verification stops there.
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
        """
        Args:
            match_length: n of the paper, at least 1.
            copy_length: k of the paper, tokens of a copy, at least 1; each rank gets one copy.
            max_context: tokens over which agreement is measured, at least ``match_length``.
            include_prompt: the prompt is a reference.
            include_output: the output so far is a reference.
            ties: which of several occurrences that agree equally long is copied: the ``first``, the last (``recent``), or a
                ``random`` one, which is a function of the request's seed and the position in the text.
            history_tokens: outputs to keep for each tenant, in tokens; 0 keeps none.
            similar_requests: past requests whose outputs are references, those with the most similar prompts; 0 for none.

        Raises:
            ValueError: a value outside its range.
        """
        super().__init__()
        check_least(1, match_length=match_length, copy_length=copy_length)
        if max_context < match_length:
            raise ValueError(f"max_context must be at least match_length ({match_length}), got {max_context}")
        check_choice(TIES, ties=ties)
        check_least(0, history_tokens=history_tokens, similar_requests=similar_requests)
        self._match_length, self._copy_length, self._max_context = match_length, copy_length, max_context
        self._include_prompt, self._include_output, self._ties = include_prompt, include_output, ties
        self._num_similar = similar_requests
        self.memory = Histories(history_tokens) if history_tokens and similar_requests else None

    def prepare(self, target: Target) -> None:
        """Compiles what finds similar requests."""
        if self.memory is not None:
            compile_recall()

    def begin(self, request: Request) -> _State:
        """An index of its references."""
        history = None if self.memory is None else self.memory.of(request.memory)
        if history is not None:
            history.start(request.text)
        state = _State(history)
        self._look_up(request, state)
        return state

    def _look_up(self, request: Request, state: _State) -> None:
        texts = request.references + ((request.prompt_ids,) if self._include_prompt else ())
        if state.history is not None:
            state.edition = state.history.edition
            texts += tuple(text.tokens for text in state.history.recall(request, self._num_similar))
        state.index = ReferenceIndex(texts)

    def finish(self, request: Request) -> None:
        """Keeps the output for requests of the tenant that resemble this one."""
        state = self._states.pop(request.request_id, None)
        if state is not None and state.history is not None:
            state.history.extend(request.text, 0, request.output_ids, final=True)
            state.history.remember(request)

    def copies(self, request: Request, state: _State, most: int) -> Iterator[Int32Array]:
        """See ``CopyDrafter``: those that agree the longest first."""
        if state.history is not None and state.edition is not state.history.edition:  # texts were deleted
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

    def _own(self, output: Int32Array) -> list[Positions]:
        """The agreements of the output's end with what stands before it in the output."""
        ends = np.flatnonzero(output[:-1] == output[-1]) if self._include_output else np.zeros(0, np.int64)
        return agreements(output, ends, output, self._max_context)

    def _order(self, request: Request, count: int) -> Sequence[int]:
        """In which order to copy ``count`` occurrences that agree equally long; they are numbered in order of age."""
        if self._ties == "first" or count == 0:
            return range(count)
        if self._ties == "recent":
            return range(count - 1, -1, -1)
        stream = np.random.Philox(key=request.params.seed, counter=[0, request.num_tokens, _STREAM, 0])
        first = int(stream.random_raw() % count)
        return [*range(first, count), *range(first)]
