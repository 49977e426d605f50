"""Construction and checks of request grammars in threads, scheduled fairly by API key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from outrider.cluster.http.turns import Turns
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.text.grammar import vocabulary_of
from outrider.engine.text.grammar_check import NO_VOCABULARY, GrammarChecker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Fault = Callable[[str], str]  # from a grammar to its error for the model; empty if it is valid


class GrammarTurns:
    """Threads for grammars, separate from those for texts, so that slow grammars do not delay texts of other keys."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._turns = tokenizer, Turns("grammars")
        self._lock = threading.Lock()
        self._known: tuple[int, tuple[int, ...]] | None = None  # (vocab_size, eos_token_ids) that the checker is for
        self._checker = GrammarChecker()

    async def build(self, info: ModelInfo, build: Callable[[Fault], str]) -> str:
        """Call ``build`` with a check for the model in a thread, and return its grammar. Raises the errors of ``Turns.run``."""
        return await self._turns.run(lambda: build(lambda grammar: self._fault(info, grammar)))

    def _fault(self, info: ModelInfo, grammar: str) -> str:
        with self._lock:
            if self._known != (info.vocab_size, info.eos_token_ids):
                try:
                    vocabulary = vocabulary_of(self._tokenizer, info.vocab_size, info.eos_token_ids)
                except ValueError as error:
                    return f"{NO_VOCABULARY}: {error}"
                self._checker.close()
                self._checker, self._known = GrammarChecker(vocabulary), (info.vocab_size, info.eos_token_ids)
            checker = self._checker
        return checker.fault(grammar)
