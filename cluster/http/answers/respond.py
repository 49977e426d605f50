"""The answer to a generation: one object, or server-sent events while it is computed."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import Response, StreamingResponse

from cluster.http import errors
from cluster.http.answers.openai_shapes import Answer, AnswerBuilder, CompletionTokensDetails, Usage, usage_of
from cluster.http.answers.predicted import Predicted, PredictionMatch
from cluster.http.answers.stream_guard import StreamShape
from cluster.http.answers.tool_calls import Call, ToolCallReader
from cluster.serving.generation import Generation
from decoding.request import FinishReason, StepOutput, StepReport, TokenLogprob

logger = logging.getLogger(__name__)

# A proxy must not collect chunks before it passes them on.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class Form:
    """How a request wants to be answered."""

    stream: bool
    include_usage: bool = False  # a stream ends with the usage
    reports_usage: bool = False  # and every chunk holds it as far as it is known
    echoes: Sequence[str] = ()  # what the text of each choice begins with
    prediction: Predicted | None = None  # of the output
    reads_calls: bool = False  # of tools, out of the text
    most_calls: int | None = None  # that are told of each choice; None: all
    shape: StreamShape = field(default_factory=StreamShape)  # of a stream


class _ChoiceReader:
    """One choice while it comes: its text and the calls in it, and what came true of a prediction."""

    def __init__(self, form: Form, index: int) -> None:
        self._echo = form.echoes[index] if form.echoes else ""
        self._calls = ToolCallReader(form.most_calls) if form.reads_calls else None
        self.match = None if form.prediction is None else PredictionMatch(form.prediction)

    def read(self, output: StepOutput) -> list[str | Call]:
        """What an output adds: pieces of text, none of them empty, and calls."""
        if self.match is not None:
            self.match.push(output.token_ids)
        echo, self._echo = self._echo, ""
        if self._calls is None:
            return [echo + output.text] if echo or output.text else []
        found = self._calls.push(output.text)
        return found if output.finish_reason is None else found + self._calls.finish()

    def reason(self, reason: FinishReason | None) -> Any:
        """Why the choice ended, in OpenAI's words."""
        called = self._calls is not None and self._calls.calls
        return "tool_calls" if called and reason is FinishReason.STOP else reason


async def respond(answer: AnswerBuilder, generation: Generation, form: Form) -> Response:
    """Starts the generation, so that a refusal is an HTTP status also for a stream, and answers with it."""
    choices = range(generation.num_choices)
    readers = [_ChoiceReader(form, index) for index in choices]
    if form.stream:
        await generation.__aenter__()
        events = _events(answer, generation, readers, form)
        return StreamingResponse(events, media_type="text/event-stream", headers=_STREAM_HEADERS)
    pieces: list[list[str | Call]] = [[] for _ in choices]
    reasons: list[Any] = [None for _ in choices]
    logprobs: list[list[TokenLogprob]] = [[] for _ in choices]
    reports: list[list[StepReport]] = [[] for _ in choices]
    async with generation:
        async for index, output in generation.outputs():
            answer.hear(index, output)
            pieces[index] += readers[index].read(output)
            reasons[index] = readers[index].reason(output.finish_reason)
            logprobs[index] += output.logprobs or ()
            if output.report is not None:
                reports[index].append(output.report)
    whole = answer.whole(pieces, reasons, logprobs, _usage(generation, readers), reports)
    return Response(whole.to_json(), media_type="application/json")


async def _events(
    answer: AnswerBuilder, generation: Generation, readers: Sequence[_ChoiceReader], form: Form
) -> AsyncIterator[str]:
    """The server-sent events of a started generation. A failure is an event with the error, and no ``[DONE]`` follows it."""
    include_usage, shape = form.include_usage, form.shape
    opened, called = [False] * len(readers), [0] * len(readers)
    outputs = shape.outputs(generation.outputs(), len(readers))
    try:
        async for index, output in outputs:
            chunks: list[Answer | None] = []
            answer.hear(index, output)
            if not opened[index]:
                opened[index] = True
                chunks.append(answer.opening(index))
            pieces, logprobs = readers[index].read(output), output.logprobs or ()
            reports = () if output.report is None else (output.report,)
            untold = logprobs or reports or output.prompt_logprobs
            if (untold or shape.has_period) and not (pieces and isinstance(pieces[0], str)):
                pieces = ["", *pieces]  # they come with text, be it none
            for piece in pieces:
                if isinstance(piece, Call):
                    chunks.append(answer.call(index, piece, called[index]))
                    called[index] += 1
                else:
                    chunks.append(answer.piece(index, piece, logprobs, reports))
                    logprobs = reports = ()
            if output.finish_reason is not None:
                chunks.append(answer.end(index, readers[index].reason(output.finish_reason)))
            for chunk in chunks:
                if chunk is not None:
                    if form.reports_usage:
                        chunk.usage = _usage(generation, readers)
                    yield shape.pad(chunk.to_event(include_usage))
        if include_usage:
            yield shape.pad(answer.usage(_usage(generation, readers)).to_event(include_usage))
        yield "data: [DONE]\n\n"
    except Exception as error:
        logger.exception("a stream broke off")
        yield shape.pad(f"data: {json.dumps(errors.api_error(error).body())}\n\n")
    finally:
        await outputs.aclose()
        await generation.__aexit__()


def _usage(generation: Generation, readers: Sequence[_ChoiceReader]) -> Usage:
    usage = usage_of(generation)
    matches = [reader.match for reader in readers if reader.match is not None]
    if matches:
        usage.completion_tokens_details = CompletionTokensDetails(
            accepted_prediction_tokens=sum(match.accepted for match in matches),
            rejected_prediction_tokens=sum(match.rejected for match in matches),
        )
    if generation.energy_j is not None:
        usage.energy_joules = round(generation.energy_j, 3)
    return usage
