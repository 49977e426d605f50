"""Responses in the format of Anthropic's Messages API, as one object or as events."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from outrider.cluster.http import errors
from outrider.cluster.http.answers.openai_shapes import Usage
from outrider.cluster.http.answers.pieces import Pauses, event_data
from outrider.cluster.http.answers.respond import OUTPUT, STREAM_HEADERS, ChoiceReader, Part, ResponseForm, usage_so_far
from outrider.cluster.http.answers.tool_calls import Arguments, Call
from outrider.cluster.http.types.anthropic import MessagesRequest, own_name
from outrider.cluster.http.types.chat import read_arguments
from outrider.cluster.serving.generation import Generation
from outrider.decoding.request import FinishReason, StepOutput
from outrider.engine.loading.model_info import ModelInfo

Event = dict[str, Any]
# Kind of a content block -> (its fields before its content, kind of its deltas, field of a delta that holds the text).
_KINDS: dict[str, tuple[Event, str, str]] = {
    "text": ({"text": ""}, "text_delta", "text"),
    "thinking": ({"thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "tool_use": ({"input": {}}, "input_json_delta", "partial_json"),
}


class MessageObject(BaseModel):
    """Message of the assistant."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]  # blocks of type thinking, text and tool_use
    stop_reason: str | None  # end_turn, max_tokens, stop_sequence, tool_use or model_context_window_exceeded
    stop_sequence: str | None
    usage: dict[str, Any]
    lossless: bool  # same as in chats
    unenforced: list[str] | None = None  # same as in chats


class MessageBuilder:
    """Builder of one message. Its methods yield the events of each part, which callers without streaming discard."""

    def __init__(self, answer_id: str, body: MessagesRequest, info: ModelInfo, room: int, left_out: Sequence[str] = ()) -> None:
        """Begin a message. ``room`` is the number of tokens that the context leaves for it."""
        self.id, self.pauses = answer_id, Pauses()
        self._body, self._room = body, room
        self._fields: Event = {"id": answer_id, "type": "message", "role": "assistant", "model": body.model}
        self._more: Event = {"lossless": info.is_lossless(body.drafting.strategy, body.drafting.max_draft_tokens)}
        if left_out:
            self._more["unenforced"] = [own_name(path) for path in left_out]
        self._content: list[Event] = []
        self._texts: list[str] = []  # of the open block
        self._is_open = False
        self._stop: Event = {"stop_reason": None, "stop_sequence": None}

    def message(self, usage: Usage) -> Event:
        """Return the message in its current state."""
        return {**self._fields, "content": list(self._content), **self._stop, "usage": _usage(usage), **self._more}

    def begin(self, usage: Usage) -> Iterator[Event]:
        """Yield the first events."""
        yield {"type": "message_start", "message": self.message(usage)}
        yield {"type": "ping"}

    def read(self, reader: ChoiceReader, output: StepOutput) -> Iterator[Event]:
        """Add an output and yield its events."""
        if output.finish_reason is not None:
            output = self._stopped(output)
        for part in reader.read(output):
            yield from self._push(part)
        if output.finish_reason is not None:
            if reader.reason(output.finish_reason) == "tool_calls":
                self._stop = {"stop_reason": "tool_use", "stop_sequence": None}
            yield from self._end_block()

    def end(self, usage: Usage) -> Iterator[Event]:
        """Yield the last events."""
        yield {"type": "message_delta", "delta": dict(self._stop), "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def _stopped(self, output: StepOutput) -> StepOutput:
        """Set the stop reason, and return the last output without the stop string."""
        reason, stop = "end_turn", None
        if output.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens" if self._body.max_tokens <= self._room else "model_context_window_exceeded"
        else:
            stop = next((text for text in self._body.stop_sequences or () if output.text.endswith(text)), None)
        if stop is not None:
            reason, output = "stop_sequence", dataclasses.replace(output, text=output.text.removesuffix(stop))
        self._stop = {"stop_reason": reason, "stop_sequence": stop}
        return output

    def _push(self, part: Part) -> Iterator[Event]:
        if isinstance(part, Call):
            yield from self._end_block()
            yield from self._begin_block("tool_use", id=part.id, name=part.name)
            part = Arguments(part.arguments)
        kind, text = ("text", part) if isinstance(part, str) else ("thinking", part.text)
        if isinstance(part, Arguments):
            kind = "tool_use"
        if not self._is_open or self._content[-1]["type"] != kind:
            yield from self._end_block()
            yield from self._begin_block(kind)
        if text:
            self._texts.append(text)
            _, name, field = _KINDS[kind]
            yield self._delta({"type": name, field: text})

    def _begin_block(self, kind: str, **fields: str) -> Iterator[Event]:
        block = {"type": kind, **fields, **_KINDS[kind][0]}
        self._content.append(block)
        self._is_open, self._texts = True, []
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}

    def _end_block(self) -> Iterator[Event]:
        if not self._is_open:
            return
        block, text = self._content[-1], "".join(self._texts)
        self._is_open = False
        if block["type"] == "tool_use":
            block["input"] = read_arguments(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            # Clients send it back with the block; nothing here verifies it.
            block["signature"] = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}


async def respond_message(answer: MessageBuilder, generation: Generation, form: ResponseForm) -> Response:
    """Run a generation of one choice and return its response, like ``respond``."""
    reader = ChoiceReader(form, 0, answer.id)
    if form.stream:
        await generation.__aenter__()
        return StreamingResponse(
            _events(answer, generation, reader, form), media_type="text/event-stream", headers=STREAM_HEADERS
        )
    async with generation:
        async for _, output in generation.outputs():
            list(answer.read(reader, output))
            await answer.pauses.after(OUTPUT)
    return Response(_json(answer.message(usage_so_far(generation, [reader]))), media_type="application/json")


async def _events(answer: MessageBuilder, generation: Generation, reader: ChoiceReader, form: ResponseForm) -> AsyncIterator[str]:
    """Yield the events of a started generation. After a failure, an event ``error`` is the last."""
    outputs = form.shape.outputs(generation.outputs(), 1)
    try:
        for event in answer.begin(usage_so_far(generation, [reader])):
            yield form.shape.pad(_sent(event))
        async for _, output in outputs:
            events = list(answer.read(reader, output))
            await answer.pauses.after(OUTPUT)
            if not events and form.shape.has_period:
                events = [{"type": "ping"}]
            for event in events:
                yield form.shape.pad(_sent(event))
        for event in answer.end(usage_so_far(generation, [reader])):
            yield form.shape.pad(_sent(event))
    except Exception as error:  # noqa: BLE001  # logged_error logs it
        reported = errors.logged_error(errors.renamed(error, own_name, "messages"), "a stream broke off")
        yield form.shape.pad(_sent(reported.anthropic_body()))
    finally:
        await outputs.aclose()
        await generation.__aexit__()


def _sent(event: Event) -> str:
    return f"event: {event['type']}\n{event_data(_json(event))}"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()  # in ASCII, because arguments may hold a lone surrogate


def _usage(usage: Usage) -> Event:
    cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    found: Event = {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": (details.reasoning_tokens if details else None) or 0},
    }
    return found if usage.energy_joules is None else found | {"energy_joules": usage.energy_joules}
