"""Attribution of emitted tokens to who drafted them, for requests that ask (``Request.report``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from decoding.request import Request, StepReport
from decoding.sources.history import Histories, History
from decoding.sources.log.chains import BLOCK, MAX_MATCH, Int64Array
from decoding.tree import SOURCES, DraftTree, Int32Array

MODEL = "model"  # the target's own token: nobody had drafted it
DOCUMENT, PROMPT, OUTPUT, TRIE, PUBLIC = "document", "prompt", "output", "trie", "public"
_SEQUENCE = "sequence"  # the prompt, and the output up to here
_MOST_ENDS = 1024  # occurrences of two tokens in a text that are looked at
# What a drafter copies from. Of texts that agree equally long the first counts; a later group counts where none before it agrees.
_COPIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "prompt_lookup": ((_SEQUENCE,),),
    "context_ngram": ((_SEQUENCE,),),
    "llma": ((DOCUMENT, PROMPT), (_SEQUENCE,)),  # of its output only where it is told to
    "suffix": ((DOCUMENT, _SEQUENCE),),
    "copy": ((DOCUMENT, _SEQUENCE),),
    "trie": ((DOCUMENT, _SEQUENCE, TRIE, PUBLIC),),
    "history": ((TRIE, PUBLIC),),
    "similar": ((TRIE,),),
}


@dataclass(frozen=True, slots=True)
class _Copy:
    """A token that stands in a text, and where."""

    kind: str
    text: Int32Array
    position: int

    def next(self, token: int, end: int) -> _Copy | None:
        """The token behind it, if it is this one; before ``end`` where the text is the sequence, of which no more is known."""
        at, end = self.position + 1, end if self.kind == _SEQUENCE else len(self.text)
        return _Copy(self.kind, self.text, at) if at < end and int(self.text[at]) == token else None

    def source(self, num_prompt: int) -> str:
        """The name of the text."""
        if self.kind == _SEQUENCE:
            return PROMPT if self.position < num_prompt else OUTPUT
        return self.kind


def step_report(
    request: Request, tree: DraftTree, rows: Sequence[int], pieces: Sequence[str], memory: Histories | None
) -> StepReport:
    """What a request is told of a step.

    Args:
        request: before the step's tokens are committed.
        tree: that was verified.
        rows: the accepted ones of it that are emitted, in order.
        pieces: the text that each emitted token released, that of the bonus token, if it is emitted, last.
        memory: what the drafter remembers of other requests.
    """
    sources = origins(request, tree, rows, memory)
    sources += [MODEL] * (len(pieces) - len(sources))
    return StepReport(tuple(pieces), tuple(sources), tree.num_candidates - 1)


def origins(request: Request, tree: DraftTree, rows: Sequence[int], memory: Histories | None) -> list[str]:
    """For each accepted row whose proposal it was, or, where the drafter copies, what it was copied from.

    A drafter that copies does not say where from, and what it drafts often stands in several texts. So the text is told in which
    the longest run of tokens agrees with what stands before the token, up to 32, as these drafters themselves prefer. From one
    accepted row to the next the copy goes on where it was.

    Example: document ``4 5 6 7``, prompt ``8 5 6 9``, output ``4``, and ``5 6 9`` accepted. ``5`` follows ``4`` in the document
    alone, and ``6`` goes on there; ``9`` is not what the document has next, and is the prompt's.

    Args:
        request: before they are committed.
        tree: with the rows.
        rows: on one path from the root, in order.
        memory: what the drafter remembers of other requests.

    Returns:
        For each row ``prompt``, ``output`` (the request's own), ``document`` (one of its references), ``trie`` (past outputs of
        its tenant), ``public`` (the public texts), or the name of a drafter that copies nothing (``SOURCES``).
    """
    told: list[str] = []
    sequence = np.concatenate([request.tokens, tree.tokens[list(rows)]])
    copy: _Copy | None = None
    for end, row in enumerate(rows, start=request.num_tokens):
        drafter, token = SOURCES[tree.sources[row]], int(sequence[end])
        groups = _COPIES.get(drafter)
        if groups is None:
            copy = None
            told.append(drafter)
            continue
        copy = None if copy is None else copy.next(token, end)
        if copy is None:
            found = (_longest(request, group, sequence, end, memory) for group in groups)
            copy = next((candidate for candidate in found if candidate is not None), None)
        # A past text may be gone by now: the ring is as large as it is. Texts of the request itself stay.
        told.append(copy.source(request.num_prompt) if copy is not None else TRIE)
    return told


def _longest(request: Request, kinds: Sequence[str], sequence: Int32Array, end: int, memory: Histories | None) -> _Copy | None:
    """Where ``sequence[end]`` stands behind the longest run that agrees with what is before it; None where no token agrees."""
    context, token = sequence[max(0, end - MAX_MATCH) : end], int(sequence[end])
    best, longest = None, 0
    past = _past_texts(request, kinds, memory)
    for kind, text in _own_texts(request, kinds, sequence[:end]):
        ends = _ends(text, int(context[-1]), token)
        length, last = _agreement(text, ends, context)
        if length > longest:
            best, longest = _Copy(kind, sequence if kind == _SEQUENCE else text, last + 1), length
    if best is None and len(past) == 1:
        return _Copy(past[0][0], context[:0], 0)  # it can be nowhere else: a large text need not be looked through
    for kind, history in past if longest < MAX_MATCH else ():
        text = history.log.arrays.tokens
        length, last = _agreement(text, _others(history, request, _ends(text, int(context[-1]), token)), context)
        if length > longest:
            best, longest = _Copy(kind, text, last + 1), length
    return best


def _own_texts(request: Request, kinds: Sequence[str], known: Int32Array) -> Iterator[tuple[str, Int32Array]]:
    """The request's texts of some kinds, in their order."""
    for kind in kinds:
        if kind == DOCUMENT:
            yield from ((kind, reference) for reference in request.references)
        elif kind == PROMPT:
            yield kind, request.prompt_ids
        elif kind == _SEQUENCE:
            yield kind, known


def _past_texts(request: Request, kinds: Sequence[str], memory: Histories | None) -> list[tuple[str, History]]:
    """The texts of others of some kinds, where there are any."""
    found: list[tuple[str, History]] = []
    if memory is not None:
        tenant = memory.of(request.memory) if TRIE in kinds else None
        public = memory.public if PUBLIC in kinds and request.public else None
        found = [(kind, history) for kind, history in ((TRIE, tenant), (PUBLIC, public)) if history is not None]
    return [(kind, history) for kind, history in found if history.log.end]


def _ends(text: Int32Array, root: int, token: int) -> Int64Array:
    """[<= 1024] ascending positions of ``root`` that ``token`` follows, the latest ones."""
    ends = np.flatnonzero(text[:-1] == root)
    latest: Int64Array = ends[text[ends + 1] == token][-_MOST_ENDS:]
    return latest


def _others(history: History, request: Request, ends: Int64Array) -> Int64Array:
    """Those of some positions that do not stand in the output of this request."""
    own = history.number(request.text)
    return ends if own < 0 else ends[history.log.arrays.owners[ends // BLOCK] != own]


def _agreement(text: Int32Array, ends: Int64Array, context: Int32Array) -> tuple[int, int]:
    """The most tokens that end at one of some positions and agree with the end of ``context``, and the first such position."""
    if not len(ends):
        return 0, -1
    before = ends[:, None] - np.arange(len(context))  # [m, c]
    same = (text[np.maximum(before, 0)] == context[::-1]) & (before >= 0)
    lengths = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    at = int(lengths.argmax())
    return int(lengths[at]), int(ends[at])
