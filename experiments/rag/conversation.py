"""A conversation over documents: what is retrieved for a question, and what the model is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from experiments.rag.library import Library, Passage

Message = dict[str, str]
# Given messages, and what goes along with them without a change to the answer: its pieces.
Stream = Callable[[list[Message], dict[str, Any]], Iterator[str]]
_MOST_GIVEN = 12  # passages in a prompt


@dataclass(slots=True)
class Conversation:
    """Questions and answers over a library that may change meanwhile.

    The documents come first in the prompt, in the order in which they were first needed, and keep their numbers: what a server
    has computed of a prompt serves the next question, too. Where one of them has changed, or they have become too many, the
    conversation begins anew, as earlier answers are of texts that are no longer there.
    """

    library: Callable[[], AbstractContextManager[Library]]  # opened for a question
    embed: Callable[[str], list[float]]  # of a question
    most: int = 3  # passages for a question
    given: list[Passage] = field(default_factory=list)  # [1] is the first
    turns: list[str] = field(default_factory=list)  # question, answer, question, ...

    def retrieve(self, question: str) -> bool:
        """Adds the passages for a question, those for a follow-up with the question before it. False: it began anew."""
        with self.library() as library:
            kept = len(self.given) <= _MOST_GIVEN and library.holds(self.given)
            if not kept:
                self.given.clear()
                self.turns.clear()
            found = library.search(self._whole(question), self.most)
        self.given += [passage for passage in found if passage not in self.given]
        return kept

    def answer(self, question: str, stream: Stream) -> Iterator[str]:
        """The pieces of an answer; one that is cut off is not remembered."""
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
        """A question with the one before it, without which a follow-up says little."""
        return " ".join([*self.turns[-2:-1], question])
