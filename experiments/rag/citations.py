"""Which passage a sentence of an answer comes from, told by its words: nobody asks the model, which may be wrong about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

_RUN = 3  # words in a row
_SHARE = 0.5  # of a sentence's runs that a passage has to have
_END = re.compile(r"[.!?]['\")\]]*$")


def cited(pieces: Iterable[str], texts: Sequence[str]) -> Iterator[str]:
    """An answer as it comes, with the number of a passage after each sentence of which that passage has at least half.

    Counted are runs of three words; where several passages have the same share, all are named. Shorter sentences go with the next
    one.

    Args:
        pieces: of the answer.
        texts: of the passages, numbered from 1.
    """
    known, sentence = [_runs(text) for text in texts], ""
    for piece in pieces:
        told = ""
        for character in piece:
            ends = character == "\n" or (character.isspace() and _END.search(sentence))
            if ends and (marks := _marks(sentence, known)):
                told, sentence = told + marks, ""
            sentence, told = sentence + character, told + character
        yield told
    yield _marks(sentence, known)


def _marks(sentence: str, known: Sequence[set[tuple[str, ...]]]) -> str:
    runs = _runs(sentence)
    shared = [len(runs & of_passage) for of_passage in known]
    most = max(shared, default=0)
    if not most or most < _SHARE * len(runs):
        return ""
    return "".join(f" [{number}]" for number, count in enumerate(shared, 1) if count == most)


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[start:] for start in range(_RUN)), strict=False))
