"""Extra fields of answers: token ids, and log-probabilities of the prompt, in vLLM's shapes and OpenAI's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.http.answers.logprobs import LogprobWriter, TokenBytes, finite
from cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from cluster.serving.generation import Job
from decoding.request import StepOutput, TokenLogprob


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants to be told."""

    token_ids: bool = False
    prompt_logprobs: int | None = None  # alternatives, in vLLM's shape
    echoed_logprobs: int | None = None  # alternatives, in OpenAI's shape: those of the prompt come before those of the text
    echoes: Sequence[str] = ()  # the prompt that the text of each choice begins with
    is_chat: bool = False  # what is told of the prompt is told once for all choices

    @classmethod
    def by(cls, body: ChatCompletionRequest | CompletionRequest, echoes: Sequence[str] = ()) -> Wanted:
        """What the body of a request says."""
        echoed = body.num_logprobs if echoes else None
        return cls(bool(body.return_token_ids), body.prompt_logprobs, echoed, echoes, isinstance(body, ChatCompletionRequest))


class Extras:
    """Keeps what the outputs tell of each choice until the next object about that choice is built.

    Example: a step emits ``7 8``, whose text is held back, and the next one ``9``: the chunk with the text has ``token_ids``
    ``[7, 8, 9]``.
    """

    def __init__(self, wanted: Wanted, jobs: Sequence[Job], token_bytes: TokenBytes) -> None:
        """
        Args:
            wanted: by the request.
            jobs: one for each choice.
            token_bytes: of the model's tokenizer.
        """
        self._wanted, self._jobs, self._bytes = wanted, jobs, token_bytes
        self._ids: dict[int, list[int]] = {}
        self._scores: dict[int, Sequence[TokenLogprob]] = {}
        self._echoed: dict[int, Sequence[TokenLogprob]] = {}
        self._begun: set[int] = set()  # choices of whose prompt the ids were told

    @classmethod
    def asked(
        cls,
        body: ChatCompletionRequest | CompletionRequest,
        jobs: Sequence[Job],
        token_bytes: TokenBytes,
        echoes: Sequence[str] = (),
    ) -> Extras | None:
        """Those that the body of a request asks for, with what it has echoed; None for none."""
        if not body.return_token_ids and body.num_prompt_logprobs is None:
            return None
        return cls(Wanted.by(body, echoes), jobs, token_bytes)

    def heard(self, index: int, output: StepOutput) -> None:
        """Takes in an output of a choice."""
        wanted, scores = self._wanted, output.prompt_logprobs
        if wanted.token_ids:
            self._ids.setdefault(index, []).extend(output.token_ids)
        if scores is not None and wanted.prompt_logprobs is not None:
            self._scores[index] = scores
        if scores is not None and wanted.echoed_logprobs is not None:
            self._echoed[index] = scores

    def told(self, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields of the next object about a choice that say what was heard since the last: of the choice, and of the answer."""
        wanted = self._wanted
        of_choice: dict[str, Any] = {}
        of_prompt: dict[str, Any] = {}
        if wanted.token_ids:
            of_choice["token_ids"] = self._ids.pop(index, [])
            if index not in self._begun:
                self._begun.add(index)
                of_prompt["prompt_token_ids"] = self._jobs[index].prompt_ids.tolist()
        scores = self._scores.pop(index, None)
        if scores is not None and wanted.prompt_logprobs is not None:
            of_prompt["prompt_logprobs"] = [None, *(self._shown(entry, wanted.prompt_logprobs) for entry in scores)]
        if not wanted.is_chat:
            return of_choice | of_prompt, {}
        return of_choice, of_prompt if index == 0 else {}

    def echoed(self, index: int, writer: LogprobWriter) -> dict[str, Any] | None:
        """The prompt's part of a choice's ``logprobs``, once; None where there is none. ``writer`` has not written before."""
        scores, count = self._echoed.pop(index, None), self._wanted.echoed_logprobs
        if scores is None or count is None:
            return None
        return writer.write_prompt(int(self._jobs[index].prompt_ids[0]), scores, count, self._wanted.echoes[index])

    def _shown(self, entry: TokenLogprob, count: int) -> dict[str, dict[str, Any]]:
        """A token of the prompt and its alternatives, by id as vLLM has it: the token itself comes first."""
        told = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(entry.top[:count], start=1):
            told.setdefault(token, (logprob, rank))
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": self._bytes(token).decode("utf-8", "replace")}
            for token, (logprob, rank) in told.items()
        }
