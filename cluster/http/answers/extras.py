"""Extra fields of answers: token ids, and log-probabilities of the prompt, in vLLM's shapes and OpenAI's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.http.answers.logprobs import LogprobWriter, TokenBytes, finite
from cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from cluster.serving.generation import Job
from decoding.request import StepOutput, TokenLogprob


class Extras:
    """Keeps what the outputs tell of each choice until the next object about that choice is built, as far as it is asked for.

    Example: a step emits ``7 8``, whose text is held back, and the next one ``9``: the chunk with the text has ``token_ids``
    ``[7, 8, 9]``.
    """

    def __init__(
        self,
        body: ChatCompletionRequest | CompletionRequest,
        jobs: Sequence[Job],
        token_bytes: TokenBytes,
        echoes: Sequence[str] = (),
    ) -> None:
        """
        Args:
            body: of the request; says what is to be told.
            jobs: one for each choice.
            token_bytes: of the model's tokenizer.
            echoes: the prompt that the text of each choice begins with, if any.
        """
        self._jobs, self._bytes, self._echoes = jobs, token_bytes, echoes
        self._tells_ids, self._is_chat = bool(body.return_token_ids), isinstance(body, ChatCompletionRequest)
        self._alternatives = body.prompt_logprobs  # in vLLM's shape
        self.echoed_alternatives = body.num_logprobs if echoes else None  # in OpenAI's: those of the prompt before the text's
        self._ids: dict[int, list[int]] = {}
        self._scores: dict[int, Sequence[TokenLogprob]] = {}
        self._echoed: dict[int, Sequence[TokenLogprob]] = {}
        self._begun: set[int] = set()  # choices of whose prompt the ids were told

    def hear(self, index: int, output: StepOutput) -> None:
        """Takes in an output of a choice, before anything is built of it."""
        scores = output.prompt_logprobs
        if self._tells_ids:
            self._ids.setdefault(index, []).extend(output.token_ids)
        if scores is not None and self._alternatives is not None:
            self._scores[index] = scores
        if scores is not None and self.echoed_alternatives is not None:
            self._echoed[index] = scores

    def told(self, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields of the next object about a choice that say what was heard since the last: of the choice, and of the answer."""
        of_choice: dict[str, Any] = {}
        of_prompt: dict[str, Any] = {}
        if self._tells_ids:
            of_choice["token_ids"] = self._ids.pop(index, [])
            if index not in self._begun:
                self._begun.add(index)
                of_prompt["prompt_token_ids"] = self._jobs[index].prompt_ids.tolist()
        scores = self._scores.pop(index, None)
        if scores is not None and self._alternatives is not None:
            of_prompt["prompt_logprobs"] = [None, *(self._shown(entry, self._alternatives) for entry in scores)]
        if not self._is_chat:
            return of_choice | of_prompt, {}
        return of_choice, of_prompt if index == 0 else {}  # what is told of the prompt is told once for all choices

    def echoed(self, index: int, writer: LogprobWriter) -> dict[str, Any] | None:
        """The prompt's part of a choice's ``logprobs``, once; None where there is none. ``writer`` has not written before."""
        scores, count = self._echoed.pop(index, None), self.echoed_alternatives
        if scores is None or count is None:
            return None
        return writer.write_prompt(int(self._jobs[index].prompt_ids[0]), scores, count, self._echoes[index])

    def _shown(self, entry: TokenLogprob, count: int) -> dict[str, dict[str, Any]]:
        """A token of the prompt and its alternatives, by id as vLLM has it: the token itself comes first."""
        told = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(entry.top[:count], start=1):
            told.setdefault(token, (logprob, rank))
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": self._bytes(token).decode("utf-8", "replace")}
            for token, (logprob, rank) in told.items()
        }
