"""Attribution of emitted tokens to their draft source, for requests with ``report``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.decoding.arrays import Int32Array, Int64Array
from outrider.decoding.request import Request, StepReport
from outrider.decoding.sources.history import Histories, History
from outrider.decoding.sources.log.chains import BLOCK, MAX_MATCH
from outrider.decoding.tree import SOURCES, DraftTree

MODEL = "model"  # the target's own token, not drafted
DOCUMENT, PROMPT, OUTPUT, TRIE, PUBLIC = "document", "prompt", "output", "trie", "public"
_SEQUENCE = "sequence"  # prompt and output so far
_MOST_ENDS = 1024  # maximum occurrences of a token pair considered per text
# Texts that each drafter copies from. The first of equally long agreements wins; a later group is used if no earlier one agrees.
_COPIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "prompt_lookup": ((_SEQUENCE,),),
    "context_ngram": ((_SEQUENCE,),),
    "llma": ((DOCUMENT, PROMPT), (_SEQUENCE,)),  # output only with include_output
    "suffix": ((DOCUMENT, _SEQUENCE),),
    "copy": ((DOCUMENT, _SEQUENCE),),
    "trie": ((DOCUMENT, _SEQUENCE, TRIE, PUBLIC),),
    "history": ((TRIE, PUBLIC),),
    "similar": ((TRIE,),),
}


@dataclass(frozen=True, slots=True)
class _CopySource:
    """Position of a token in a source text."""

    kind: str
    text: Int32Array
    position: int

    def next(self, token: int, end: int) -> _CopySource | None:
        """Return the next position if it holds ``token``. The sequence itself is known only before ``end``."""
        at, end = self.position + 1, end if self.kind == _SEQUENCE else len(self.text)
        return _CopySource(self.kind, self.text, at) if at < end and int(self.text[at]) == token else None

    def source(self, num_prompt: int) -> str:
        if self.kind == _SEQUENCE:
            return PROMPT if self.position < num_prompt else OUTPUT
        return self.kind


def step_report(
    request: Request, tree: DraftTree, rows: Sequence[int], pieces: Sequence[str], memory: Histories | None
) -> StepReport:
    """Build the report of a step, before its tokens are committed, from the emitted rows and the text released by each token."""
    sources = origins(request, tree, rows, memory)
    sources += [MODEL] * (len(pieces) - len(sources))
    return StepReport(tuple(pieces), tuple(sources), tree.num_candidates - 1)


def origins(request: Request, tree: DraftTree, rows: Sequence[int], memory: Histories | None) -> list[str]:
    """Return the source of each accepted row of one path from the root, not yet committed: the drafter, or the text it copied.

    Returns:
        Per row ``prompt``, ``output`` (the request's own), ``document`` (one of its references), ``trie`` (past outputs of its
        tenant), ``public`` (public texts), or the name of a drafter that does not copy (``SOURCES``).
    """
    sources: list[str] = []
    sequence = np.concatenate([request.tokens, tree.tokens[list(rows)]])
    copy: _CopySource | None = None
    for end, row in enumerate(rows, start=request.num_tokens):
        drafter, token = SOURCES[tree.sources[row]], int(sequence[end])
        groups = _COPIES.get(drafter)
        if groups is None:
            copy = None
            sources.append(drafter)
            continue
        # Drafters do not record positions. A row that continues in the chosen text keeps it; else the text with the longest run,
        # up to 32 tokens, that agrees with the tokens before the row is chosen.
        copy = None if copy is None else copy.next(token, end)
        if copy is None:
            found = (_longest(request, group, sequence, end, memory) for group in groups)
            copy = next((candidate for candidate in found if candidate is not None), None)
        # No match means a past text that the ring buffer has overwritten. Texts of the request itself stay.
        sources.append(copy.source(request.num_prompt) if copy is not None else TRIE)
    return sources


def _longest(
    request: Request, kinds: Sequence[str], sequence: Int32Array, end: int, memory: Histories | None
) -> _CopySource | None:
    """Return the place of ``sequence[end]`` with the longest agreeing run before it, or None if no token agrees."""
    context, token = sequence[max(0, end - MAX_MATCH) : end], int(sequence[end])
    best, longest = None, 0
    past = _past_texts(request, kinds, memory)
    for kind, text in _own_texts(request, kinds, sequence[:end]):
        ends = _ends(text, int(context[-1]), token)
        length, last = _agreement(text, ends, context)
        if length > longest:
            best, longest = _CopySource(kind, sequence if kind == _SEQUENCE else text, last + 1), length
    if best is None and len(past) == 1:
        return _CopySource(past[0][0], context[:0], 0)  # the only possible source, so a large text need not be searched
    # An agreement of ``MAX_MATCH`` tokens cannot be exceeded.
    for kind, history in past if longest < MAX_MATCH else ():
        text = history.log.arrays.tokens
        length, last = _agreement(text, _others(history, request, _ends(text, int(context[-1]), token)), context)
        if length > longest:
            best, longest = _CopySource(kind, text, last + 1), length
    return best


def _own_texts(request: Request, kinds: Sequence[str], known: Int32Array) -> Iterator[tuple[str, Int32Array]]:
    for kind in kinds:
        if kind == DOCUMENT:
            yield from ((kind, reference) for reference in request.references)
        elif kind == PROMPT:
            yield kind, request.prompt_ids
        elif kind == _SEQUENCE:
            yield kind, known


def _past_texts(request: Request, kinds: Sequence[str], memory: Histories | None) -> list[tuple[str, History]]:
    found: list[tuple[str, History]] = []
    if memory is not None:
        tenant = memory.of(request.cache_namespace) if TRIE in kinds else None
        public = memory.public if PUBLIC in kinds and request.public else None
        found = [(kind, history) for kind, history in ((TRIE, tenant), (PUBLIC, public)) if history is not None]
    return [(kind, history) for kind, history in found if history.log.end]


def _ends(text: Int32Array, root: int, token: int) -> Int64Array:
    """Return the latest positions of ``root`` that are followed by ``token``: ascending, at most 1024."""
    # Without the last position, which no token follows.
    ends = np.flatnonzero(text[:-1] == root)
    latest: Int64Array = ends[text[ends + 1] == token][-_MOST_ENDS:]
    return latest


def _others(history: History, request: Request, ends: Int64Array) -> Int64Array:
    """Return the positions that are not in this request's own output."""
    own = history.number(request.text)
    return ends if own < 0 else ends[history.log.arrays.owners[ends // BLOCK] != own]


def _agreement(text: Int32Array, ends: Int64Array, context: Int32Array) -> tuple[int, int]:
    """Return the longest agreement with the end of ``context`` among the positions, and the first such position."""
    if not len(ends):
        return 0, -1
    before = ends[:, None] - np.arange(len(context))  # [m, c]
    # Positions before the beginning would index from the end: they read the first token and are masked.
    same = (text[np.maximum(before, 0)] == context[::-1]) & (before >= 0)
    lengths = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    at = int(lengths.argmax())
    return int(lengths[at]), int(ends[at])
