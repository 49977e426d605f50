"""Optional response fields: token ids, log-probabilities and prompt log-probabilities, in the formats of vLLM and OpenAI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from outrider.cluster.http.answers.logprobs import LogprobWriter, TokenBytes, finite
from outrider.cluster.http.answers.pieces import PIECE, Pauses, to_json
from outrider.cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from outrider.cluster.serving.generation import GenerationJob
from outrider.decoding.request import StepOutput, TokenLogprob

_ALTERNATIVE = 100  # approximate bytes of JSON of a token with its log-probability


class ResponseExtras:
    """Buffer of the requested extra fields of each choice, until the next chunk of that choice is built.

    Example: steps emit ``7 8``, whose text is held back, and ``9``: the chunk with the text has ``token_ids`` ``[7, 8, 9]``.
    """

    def __init__(
        self,
        body: ChatCompletionRequest | CompletionRequest,
        jobs: Sequence[GenerationJob],  # one per choice
        token_bytes: TokenBytes,
        pauses: Pauses,
        echoes: Sequence[str] = (),  # prompt that the text of each choice begins with; empty without ``echo``
    ) -> None:
        self._jobs, self._bytes, self._echoes = jobs, token_bytes, echoes
        self._tells_ids, self._is_chat = bool(body.return_token_ids), isinstance(body, ChatCompletionRequest)
        self._alternatives = body.prompt_logprobs  # in vLLM's format
        self._echoed_alternatives = body.num_logprobs if echoes else None  # in OpenAI's format, before those of the output
        self._kind: Literal["chat", "text"] = "chat" if self._is_chat else "text"
        self._skip_special, self._pauses = body.skips_special, pauses
        self._ids: dict[int, list[int]] = {}
        self._scores: dict[int, list[bytes]] = {}  # prompt log-probabilities as JSON
        self._writers: dict[int, LogprobWriter] = {}
        self._logprobs: dict[int, dict[str, Any]] = {}
        self._begun: set[int] = set()  # choices that have reported their prompt token ids

    async def on_output(self, index: int, output: StepOutput) -> None:
        """Store the extra fields of a choice's output. Call it before the output's chunks are built."""
        scores = output.prompt_logprobs
        if self._tells_ids:
            self._ids.setdefault(index, []).extend(output.token_ids)
        if scores is not None and self._alternatives is not None and not (self._is_chat and index):
            found = self._scores[index] = [b"null"]
            for part, size in _parts(scores, self._alternatives):
                found += [to_json(self._shown(entry, self._alternatives)) for entry in part]
                await self._pauses.after(size)
        if scores is not None and self._echoed_alternatives is not None:
            writer = self._writer(index)
            self._add(index, writer.begin_prompt(int(self._jobs[index].prompt_ids[0])))
            await self._score(index, scores, self._echoed_alternatives)
            writer.end_prompt(self._echoes[index])
        if output.logprobs:
            await self._score(index, output.logprobs)

    def logprobs(self, index: int) -> dict[str, Any] | None:
        """Return the ``logprobs`` object of a choice's tokens since the last call; None if there are none."""
        return self._logprobs.pop(index, None)

    async def _score(self, index: int, entries: Sequence[TokenLogprob], count: int | None = None) -> None:
        for part, size in _parts(entries, count):
            self._add(index, self._writer(index).write(part, count))
            await self._pauses.after(size)

    def _writer(self, index: int) -> LogprobWriter:
        if index not in self._writers:
            self._writers[index] = LogprobWriter(self._kind, self._bytes, self._skip_special)
        return self._writers[index]

    def _add(self, index: int, logprobs: dict[str, Any]) -> None:
        found = self._logprobs.setdefault(index, logprobs)
        if found is not logprobs:
            for name, values in logprobs.items():
                if isinstance(values, list):
                    found[name] += values

    def take(self, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields since the last call, for the next chunk of a choice: those of the choice, and of the response."""
        of_choice: dict[str, Any] = {}
        of_prompt: dict[str, Any] = {}
        if self._tells_ids:
            of_choice["token_ids"] = self._ids.pop(index, [])
            if index not in self._begun:
                self._begun.add(index)
                of_prompt["prompt_token_ids"] = self._jobs[index].prompt_ids.tolist()
        if (scores := self._scores.pop(index, None)) is not None:
            of_prompt["prompt_logprobs"] = scores
        if not self._is_chat:
            return of_choice | of_prompt, {}
        return of_choice, of_prompt if index == 0 else {}  # prompt fields are sent once for all choices

    def _shown(self, entry: TokenLogprob, count: int) -> dict[str, dict[str, Any]]:
        """Return a prompt token and its alternatives by id, in vLLM's format; the token itself comes first."""
        entries = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(entry.top[:count], start=1):
            entries.setdefault(token, (logprob, rank))
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": self._bytes(token).decode("utf-8", "replace")}
            for token, (logprob, rank) in entries.items()
        }


def _parts(entries: Sequence[TokenLogprob], count: int | None) -> Iterator[tuple[Sequence[TokenLogprob], int]]:
    """Yield slices of entries of about ``PIECE`` bytes of JSON, and their sizes, with ``count`` or all alternatives."""
    size = _ALTERNATIVE * (1 + len(entries[0].top[:count])) if entries else 1
    # Entries are converted in slices, between which the event loop runs.
    step = max(1, PIECE // size)
    for start in range(0, len(entries), step):
        part = entries[start : start + step]
        yield part, len(part) * size
