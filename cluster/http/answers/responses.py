"""Responses in the format of OpenAI's Responses API, as one object or as events."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from outrider.cluster.http import errors
from outrider.cluster.http.answers.call_parts import Call
from outrider.cluster.http.answers.openai_shapes import Reported, Usage, reported_end, reported_step
from outrider.cluster.http.answers.pieces import Pauses, event_data, written
from outrider.cluster.http.answers.reasoning import Thought
from outrider.cluster.http.answers.respond import OUTPUT, STREAM_HEADERS, ChoiceReader, Part, ResponseForm, usage_so_far
from outrider.cluster.http.answers.tool_calls import Arguments
from outrider.cluster.http.types.responses import ResponsesRequest, own_name, response_fields
from outrider.cluster.serving.generation import Generation
from outrider.decoding.request import FinishReason, StepOutput
from outrider.engine.loading.model_info import ModelInfo

logger = logging.getLogger(__name__)

# By item type: prefix of its ids, and name of its content events.
_KINDS = {
    "reasoning": ("rs", "reasoning_text"), "message": ("msg", "output_text"), "function_call": ("fc", "function_call_arguments"),
}  # fmt: skip

_EMPTY: dict[str, dict[str, Any]] = {
    "reasoning": {"content": [], "summary": []}, "message": {"content": [], "role": "assistant"},
    "function_call": {"arguments": ""},
}  # fmt: skip

Event = dict[str, Any]
Item = dict[str, Any]
Ending = Literal["completed", "incomplete", "failed"]


class ResponseObject(BaseModel):
    """Response object. It has more fields than those listed here."""

    id: str
    object: Literal["response"]
    created_at: int  # Unix time in seconds
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    lossless: bool  # same as in chats
    output: list[Item]  # items of type reasoning, message and function_call
    incomplete_details: dict[str, str] | None
    error: dict[str, str] | None
    usage: dict[str, Any] | None
    unenforced: list[str] | None = None  # same as in chats
    speculation: Reported | None = None  # draft report, on request


class ResponseBuilder:
    """Builder of one response. Its methods yield the events of each part, which callers without streaming discard."""

    def __init__(
        self, answer_id: str, created: int, body: ResponsesRequest, info: ModelInfo, left_out: Sequence[str] = ()
    ) -> None:
        self.id = answer_id
        self._fields = {
            "id": answer_id, "object": "response", "created_at": created, "model": info.served_name,
            "lossless": info.is_lossless(body.drafting.strategy, body.drafting.max_draft_tokens), **response_fields(body),
        }  # fmt: skip
        if left_out:
            self._fields["unenforced"] = [own_name(path) for path in left_out]
        self._output: list[Item] = []
        self._is_open = False  # whether the last item is unfinished
        self._texts: list[str] = []  # texts of the open item
        self._number = 0  # sequence number of the next event
        self._strategy = body.drafting.strategy or info.strategy
        self._steps: list[bytes] = []  # step reports as JSON
        self._end: dict[str, Any] = {}  # see ``reported_end``
        self.pauses = Pauses()

    def response(self, status: str, usage: Usage | None = None, error: errors.ApiError | None = None) -> Event:
        """Return the response object in its current state."""
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        failure = None if error is None else {"code": "server_error", "message": error.body()["error"]["message"]}
        whole = {**self._fields, "status": status, "error": failure, "incomplete_details": reason, "output": list(self._output)}
        if self._steps:
            whole["speculation"] = {"steps": self._steps} | self._end
        return {**whole, "usage": None if usage is None else _usage(usage)}

    def begin(self) -> Iterator[Event]:
        """Yield the first events."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self.response("in_progress"))

    def report(self, output: StepOutput) -> None:
        """Store the report of a step, if any."""
        if output.report is not None:
            self._steps.append(reported_step(output.report))
            self._end = reported_end(output, self._strategy)

    def push(self, part: Part) -> Iterator[Event]:
        """Add a part and yield its events."""
        if isinstance(part, Call):
            yield from self._end_item("completed")
            yield from self._begin_item("function_call", call_id=part.id, name=part.name)
            part = Arguments(part.arguments)
        kind, text = ("message", part) if isinstance(part, str) else ("reasoning", part.text)
        if isinstance(part, Arguments):
            kind = "function_call"
        if not self._is_open or self._output[-1]["type"] != kind:
            yield from self._end_item("completed")
            yield from self._begin_item(kind)
        if text or not isinstance(part, Arguments):
            self._texts.append(text)
            yield self._event(f"response.{_KINDS[kind][1]}.delta", **self._place(), delta=text, **_beside(kind))

    def tick(self) -> Iterator[Event]:
        """Yield an event without new content, for streams with a cadence."""
        kind = self._output[-1]["type"] if self._is_open else None
        if kind in ("reasoning", "message"):
            yield from self.push(Thought("") if kind == "reasoning" else "")
        else:
            yield self._event("response.in_progress", response=self.response("in_progress"))

    def end(self, ending: Ending, usage: Usage | None, error: errors.ApiError | None = None) -> Iterator[Event]:
        """Yield the last events. An empty response gets one message without text."""
        if not self._output and ending != "failed":
            yield from self._begin_item("message")
        yield from self._end_item("completed" if ending == "completed" else "incomplete")
        yield self._event(f"response.{ending}", response=self.response(ending, usage, error))

    def failure(self, usage: Usage | None, error: errors.ApiError) -> Event:
        """Return the last event of a failed response, without output."""
        self._output, self._steps = [], []
        return self._event("response.failed", response=self.response("failed", usage, error))

    def _begin_item(self, kind: str, **fields: str) -> Iterator[Event]:
        item: Item = {
            "id": f"{_KINDS[kind][0]}_{uuid.uuid4().hex}",
            "type": kind,
            "status": "in_progress",
            **_EMPTY[kind],
            **fields,
        }
        self._output.append(item)
        self._is_open, self._texts = True, []
        yield self._event("response.output_item.added", output_index=self._place()["output_index"], item=dict(item))
        if kind != "function_call":
            yield self._event("response.content_part.added", **self._place(), content_index=0, part=_content(kind, ""))

    def _end_item(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item, text = self._output[-1], "".join(self._texts)
        kind, name = item["type"], _KINDS[item["type"]][1]
        self._is_open = False
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            yield self._event(f"response.{name}.done", **self._place(), name=item["name"], arguments=text)
        else:
            item["content"] = [_content(kind, text)]
            yield self._event(f"response.{name}.done", **self._place(), text=text, **_beside(kind))
            yield self._event("response.content_part.done", **self._place(), content_index=0, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=self._place()["output_index"], item=dict(item))

    def _place(self) -> Event:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


async def respond_items(answer: ResponseBuilder, generation: Generation, form: ResponseForm) -> Response:
    """Run a generation of one choice and return its response, like ``respond``."""
    reader = ChoiceReader(form, 0, answer.id)
    if form.stream:
        await generation.__aenter__()
        return StreamingResponse(
            _events(answer, generation, reader, form), media_type="text/event-stream", headers=STREAM_HEADERS
        )
    ending: Ending = "completed"
    async with generation:
        async for _, output in generation.outputs():
            answer.report(output)
            await answer.pauses.after(OUTPUT)
            for part in reader.read(output):
                list(answer.push(part))
            if output.finish_reason is FinishReason.LENGTH:
                ending = "incomplete"
    *_, last = answer.end(ending, usage_so_far(generation, [reader]))
    return Response(await written(last["response"], answer.pauses, _json), media_type="application/json")


async def _events(
    answer: ResponseBuilder, generation: Generation, reader: ChoiceReader, form: ResponseForm
) -> AsyncIterator[str]:
    """Yield the events of a started generation; after a failure, ``response.failed`` is the last."""
    outputs = form.shape.outputs(generation.outputs(), 1)
    ending: Ending = "completed"
    try:
        for event in answer.begin():
            yield form.shape.pad(await _sent(event, answer.pauses))
        async for _, output in outputs:
            answer.report(output)
            await answer.pauses.after(OUTPUT)
            parts: Sequence[Part] = reader.read(output)
            events = [event for part in parts for event in answer.push(part)]
            if output.finish_reason is FinishReason.LENGTH:
                ending = "incomplete"
            if not events and form.shape.has_period:
                events = list(answer.tick())
            for event in events:
                yield form.shape.pad(await _sent(event, answer.pauses))
        for event in answer.end(ending, usage_so_far(generation, [reader])):
            yield form.shape.pad(await _sent(event, answer.pauses))
    except Exception as error:  # noqa: BLE001  # logged_error logs it
        reported = errors.logged_error(errors.renamed(error, own_name, "input"), "a stream broke off")
        # The HTTP status has been sent, so the failure has to be an event.
        for sent in await _failed(answer, usage_so_far(generation, [reader]), reported):
            yield form.shape.pad(sent)
    finally:
        await outputs.aclose()
        await generation.__aexit__()


async def _failed(answer: ResponseBuilder, usage: Usage, error: errors.ApiError) -> list[str]:
    """Return the last events of a failed response; only ``response.failed``, without output, if the output cannot be written."""
    try:
        return [await _sent(event, answer.pauses) for event in answer.end("failed", usage, error)]
    except Exception:
        logger.exception("the output of a failed response cannot be written")
        return [await _sent(answer.failure(usage, error), answer.pauses)]


async def _sent(event: Event, pauses: Pauses) -> str:
    data = await written(event, pauses, _json) if "response" in event else _json(event)
    return f"event: {event['type']}\n{event_data(data)}"


def _json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value, separators=(",", ":")).encode()


def _beside(kind: str) -> Event:
    beside: dict[str, Event] = {"message": {"content_index": 0, "logprobs": []}, "reasoning": {"content_index": 0}}
    return beside.get(kind, {})


def _content(kind: str, text: str) -> Event:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> Event:
    details = usage.completion_tokens_details
    found: Event = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": (details.reasoning_tokens if details else None) or 0},
        "total_tokens": usage.total_tokens,
    }
    return found if usage.energy_joules is None else found | {"energy_joules": usage.energy_joules}
