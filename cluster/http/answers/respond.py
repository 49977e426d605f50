"""HTTP response of a generation: one JSON object, or server-sent events while it runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi.responses import Response, StreamingResponse

from outrider.cluster.http import errors
from outrider.cluster.http.answers.call_parts import Call, Schemas
from outrider.cluster.http.answers.harmony import HarmonyReader
from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.answers.openai_shapes import (
    Answer,
    AnswerBuilder,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from outrider.cluster.http.answers.pieces import Pauses
from outrider.cluster.http.answers.predicted import Predicted, PredictionMatch
from outrider.cluster.http.answers.reasoning import ReasoningReader, ReasoningTokens, Thought
from outrider.cluster.http.answers.resume import EventIds
from outrider.cluster.http.answers.stream_guard import StreamShape
from outrider.cluster.http.answers.tool_calls import Arguments, ToolCallReader, call_id
from outrider.cluster.serving.generation import Generation
from outrider.decoding.request import FinishReason, StepOutput
from outrider.engine.text.chat_format import HARMONY, CallForm, Tags

# Proxies must not buffer chunks.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
OUTPUT = 1024  # cost of parsing one output, in bytes of JSON that take as long to build


Part = str | Thought | Call | Arguments  # part of a response


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Options for parsing reasoning."""

    tags: Tags
    begins_within: bool | None  # see ReasoningReader
    token_bytes: TokenBytes
    is_included: bool = True  # false counts the reasoning and removes it from the response

    def reader(self, calls: ToolCallFormat | None) -> ReasoningReader | HarmonyReader:
        """Return a new parser for one choice; that of harmony parses calls too."""
        if self.tags is not HARMONY:
            return ReasoningReader(self.tags, self.begins_within)
        if calls is None:
            return HarmonyReader(self.begins_within)
        return HarmonyReader(self.begins_within, True, calls.most, calls.schemas)


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Options for parsing tool calls; see ``ToolCallReader``."""

    form: CallForm
    most: int | None = None
    schemas: Schemas = field(default_factory=dict)
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """Requested form of a response."""

    stream: bool
    include_usage: bool = False  # end the stream with a usage chunk
    reports_usage: bool = False  # put the usage so far into every chunk
    echoes: Sequence[str] = ()  # text that each choice begins with; empty without ``echo``
    prediction: Predicted | None = None  # predicted output
    reasoning: ReasoningFormat | None = None  # None if the output has no reasoning
    calls: ToolCallFormat | None = None  # None if tool calls are not parsed
    shape: StreamShape = field(default_factory=StreamShape)  # padding and cadence of the stream
    ids: EventIds | None = None  # generator of event ids; None disables them

    async def event(self, chunk: Answer, pauses: Pauses) -> str:
        """Return the event of a chunk; empty if the client has it already. Raises the errors of ``EventIds.rest``."""
        if self.ids is None:
            return self.shape.pad(await chunk.to_event(self.include_usage, pauses))
        rest = self.ids.rest(chunk)
        return "" if rest is None else self.shape.pad(self.ids.line() + await rest.to_event(self.include_usage, pauses))


class ChoiceReader:
    """Incremental parser of one choice: reasoning, text, tool calls, and matches of the prediction."""

    def __init__(self, form: ResponseForm, index: int, answer_id: str) -> None:
        self._name, self._called = f"{answer_id}/{index}", 0
        self._echo = form.echoes[index] if form.echoes else ""
        thinks, calls = form.reasoning, form.calls
        self._reasoning = None if thinks is None else thinks.reader(calls)
        self.reasoned = None if thinks is None else ReasoningTokens(thinks.reader(calls), thinks.token_bytes)
        self._tells_thoughts = thinks is not None and thinks.is_included
        self._calls, self._form = None, None if calls is None else calls.form
        if calls is not None and calls.form != "harmony":
            self._calls = ToolCallReader(calls.form, calls.most, calls.schemas, calls.hidden)
        self.match = None if form.prediction is None else PredictionMatch(form.prediction)

    def read(self, output: StepOutput) -> list[Part]:
        """Parse an output and return the new parts; text, reasoning and arguments are never empty."""
        if self.match is not None:
            self.match.push(output.token_ids)
        if self.reasoned is not None:
            self.reasoned.push(output.token_ids)
        echo, self._echo = self._echo, ""
        text, ended = echo + output.text, output.finish_reason is not None
        parts: list[Part] = [text] if text else []
        if self._reasoning is not None:
            parts = [*self._reasoning.push(text), *(self._reasoning.finish() if ended else ())]
        found: list[Part] = []
        for part in parts:
            if isinstance(part, Thought):
                if self._tells_thoughts:
                    found.append(part)
            elif self._calls is not None and isinstance(part, str):
                found += self._calls.push(part)
            else:
                found.append(part)
        if ended and self._calls is not None:
            found += self._calls.finish()
        for at, part in enumerate(found):
            if isinstance(part, Call) and self._form is not None:
                found[at] = replace(part, id=call_id(self._form, self._name, self._called))
                self._called += 1
        return found

    def reason(self, reason: FinishReason | None) -> Any:
        """Return OpenAI's finish reason of the choice: ``stop`` if a stop string cut a call's arguments."""
        if isinstance(self._reasoning, HarmonyReader):
            is_cut = self._reasoning.ends_in_call
        else:
            is_cut = self._calls is not None and self._calls.is_within
        return "tool_calls" if self._called and not is_cut and reason is FinishReason.STOP else reason


async def respond(answer: AnswerBuilder, generation: Generation, form: ResponseForm) -> Response:
    """Run a generation and return its response, whole or streamed."""
    choices = range(generation.num_choices)
    readers = [ChoiceReader(form, index, answer.id) for index in choices]
    if form.stream:
        await generation.__aenter__()  # started before the response, so that a refusal has its HTTP status in streams too
        events = _events(answer, generation, readers, form)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)
    pieces: list[list[Part]] = [[] for _ in choices]
    reasons: list[Any] = [None for _ in choices]
    async with generation:
        async for index, output in generation.outputs():
            await answer.on_output(index, output)
            pieces[index] += readers[index].read(output)
            reasons[index] = readers[index].reason(output.finish_reason)
            await answer.pauses.after(OUTPUT)
    whole = await answer.whole(pieces, reasons, usage_so_far(generation, readers))
    return Response(whole, media_type="application/json")


async def _events(
    answer: AnswerBuilder, generation: Generation, readers: Sequence[ChoiceReader], form: ResponseForm
) -> AsyncIterator[str]:
    """Yield the events of a started generation. After a failure, an error event is the last, without ``[DONE]``."""
    include_usage, shape = form.include_usage, form.shape
    opened, called = [False] * len(readers), [0] * len(readers)
    outputs = shape.outputs(generation.outputs(), len(readers))
    try:
        async for index, output in outputs:
            chunks: list[Answer | None] = []
            await answer.on_output(index, output)
            await answer.pauses.after(OUTPUT)
            if not opened[index]:
                opened[index] = True
                chunks.append(answer.opening(index))
            pieces: list[Part] = readers[index].read(output)
            untold = output.logprobs or output.report or output.prompt_logprobs
            if (untold or shape.has_period) and not (pieces and isinstance(pieces[0], str | Thought)):
                pieces = ["", *pieces]  # logprobs and reports are sent with text, which may be empty
            for piece in pieces:
                if isinstance(piece, Call | Arguments):
                    called[index] += isinstance(piece, Call)
                    chunks.append(answer.call(index, piece, called[index] - 1))
                else:
                    chunks.append(answer.piece(index, piece))
            if output.finish_reason is not None:
                chunks.append(answer.end(index, readers[index].reason(output.finish_reason)))
            for chunk in chunks:
                if chunk is not None:
                    if form.reports_usage:
                        chunk.usage = usage_so_far(generation, readers)
                    if event := await form.event(chunk, answer.pauses):
                        yield event
        if include_usage and (event := await form.event(answer.usage(usage_so_far(generation, readers)), answer.pauses)):
            yield event
        yield "data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001  # logged_error logs it
        yield shape.pad(f"data: {json.dumps(errors.logged_error(error, 'a stream broke off').body())}\n\n")
    finally:
        # Also when the client has left: the slots must be freed.
        await outputs.aclose()
        await generation.__aexit__()


def usage_so_far(generation: Generation, readers: Sequence[ChoiceReader]) -> Usage:
    """Return the token counts and the energy of a generation so far; each choice has a reader."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    cached = PromptTokensDetails(cached_tokens=generation.cached_tokens)
    total = prompt + completion
    usage = Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=total, prompt_tokens_details=cached)
    matches = [reader.match for reader in readers if reader.match is not None]
    reasoned = [reader.reasoned.count for reader in readers if reader.reasoned is not None]
    details: dict[str, int] = {"reasoning_tokens": sum(reasoned)} if reasoned else {}
    if matches:
        details["accepted_prediction_tokens"] = sum(match.accepted for match in matches)
        details["rejected_prediction_tokens"] = sum(match.rejected for match in matches)
    if details:
        usage.completion_tokens_details = CompletionTokensDetails(**details)
    if generation.energy_j is not None:
        usage.energy_joules = round(generation.energy_j, 3)
    return usage
