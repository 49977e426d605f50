"""A conversation over documents: its retrieval, its prompts, and citations in its answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.experiments.rag.library import Library, Passage

Message = dict[str, str]
# Takes messages and further fields of the request that do not change the answer, and yields the pieces of the answer.
Stream = Callable[[list[Message], dict[str, Any]], Iterator[str]]
_MOST_GIVEN = 12  # passages in a prompt
_RUN = 3  # words in a row
_SHARE = 0.5  # minimum share of a sentence's runs in a passage
_END = re.compile(r"[.!?]['\")\]]*$")


@dataclass(slots=True)
class Conversation:
    """Questions and answers over a library that may change during the conversation.

    The documents come first in the prompt, in the order in which they were first needed, and keep their numbers, so that the
    server can reuse the keys and values of the prompt for the next question. If one of them has changed, or if there are too
    many, a new conversation begins, because earlier answers refer to texts that are gone.
    """

    library: Callable[[], AbstractContextManager[Library]]  # opened for each question
    embed: Callable[[str], list[float]]  # embeds a question
    most: int = 3  # passages for a question
    given: list[Passage] = field(default_factory=list)  # [1] is the first
    turns: list[str] = field(default_factory=list)  # question, answer, question, ...

    def retrieve(self, question: str) -> bool:
        """Add the passages for a question, for a follow-up together with the one before it; False: a new conversation began."""
        with self.library() as library:
            kept = len(self.given) <= _MOST_GIVEN and library.holds(self.given)
            if not kept:
                self.given.clear()
                self.turns.clear()
            found = library.search(self._whole(question), self.most)
        self.given += [passage for passage in found if passage not in self.given]
        return kept

    def answer(self, question: str, stream: Stream) -> Iterator[str]:
        """Yield the pieces of an answer; an interrupted one does not become part of the conversation."""
        documents = [passage.text for passage in self.given]
        said = [*self.turns, question]
        said[0] = "Context:\n" + "\n\n".join(documents) + f"\n\nQuestion: {said[0]}"
        messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
        text = ""
        extra = {"reference_documents": documents, "reference_embedding": self.embed(self._whole(question))}
        for piece in stream(messages, extra):
            text += piece
            yield piece
        self.turns += [question, text]

    def _whole(self, question: str) -> str:
        """Join a question with the one before it, without which a follow-up is hard to search for."""
        return " ".join([*self.turns[-2:-1], question])


def cited(pieces: Iterable[str], texts: Sequence[str]) -> Iterator[str]:
    """Yield an answer with the number of a passage after each sentence of which the passage contains at least half.

    Runs of three words are compared; passages with the same share are all named. Shorter sentences belong to the next one.
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
