"""Requests of every kind that the HTTP interface takes, and what a client makes of the answer, whole or in events."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

LOGPROB_TOLERANCE = 1e-3  # rows that are multiplied together decide the order of sums, and a resumed text has other rows
_LIBRARIES = (
    "The library",
    "The museum",
    "The swimming pool",
    "The town hall",
    "The post office",
    "The bakery",
    "The harbour office",
)
_HOURS = ("eight", "nine", "ten", "eleven", "noon")
_DAYS = ("Mondays", "Tuesdays", "Wednesdays", "Thursdays", "Fridays", "Saturdays", "Sundays")
_SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 40}, "open": {"type": "boolean"}, "hours": {"type": "integer"}},
    "required": ["place", "open", "hours"],
    "additionalProperties": False,
}
_SAMPLED = {"temperature": 0.8, "top_p": 0.95}
_CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 2}
# Kind, route and fields. Those without a limit of their own ignore the end token, so that there is a middle to be disturbed in.
KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("greedy", "chat/completions", {"temperature": 0, "stream": True}),
    ("sampled", "chat/completions", {**_SAMPLED, "stream": True, **_CHAT_LOGPROBS}),
    ("two choices", "chat/completions", {**_SAMPLED, "n": 2, "stream": True, **_CHAT_LOGPROBS}),
    ("whole", "chat/completions", {"temperature": 0, **_CHAT_LOGPROBS}),
    ("whole, two choices", "completions", {**_SAMPLED, "n": 2, "logprobs": 1}),
    ("text", "completions", {"temperature": 0, "stream": True, "logprobs": 2}),
    ("stop strings", "completions", {"temperature": 0.9, "stream": True, "stop": [" on", ".\n"], "logprobs": 0}),
    ("json", "chat/completions", {
        **_SAMPLED, "stream": True, "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}},
    }),
    ("whole json", "chat/completions", {
        "temperature": 0, "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}},
    }),
    ("penalties", "chat/completions", {
        **_SAMPLED, **_CHAT_LOGPROBS, "stream": True,
        "frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1,
    }),
    ("references", "chat/completions", {"temperature": 0, "stream": True, "reference_documents": ["It opens at nine."]}),
    ("plain", "chat/completions", {**_SAMPLED, "stream": True, "speculation": {"max_draft_tokens": 0}}),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    kind: str
    route: str
    body: Mapping[str, Any]  # without the model


_LAST_EVENTS = (
    "response.completed",
    "response.incomplete",
    "response.failed",
)  # of the streams of responses, which have no [DONE]


@dataclass(slots=True)
class Choice:
    """One choice of an answer."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    calls: list[list[str]] = field(default_factory=list)  # name and arguments
    tokens: list[str] = field(default_factory=list)  # those that have log-probabilities
    logprobs: list[float | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of completions
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None

    def add(self, part: Mapping[str, Any]) -> str:
        """Takes in a whole choice, or a chunk of one; returns the text in it."""
        message = part.get("message") or part.get("delta") or {}
        text: str = part.get("text") or message.get("content") or ""
        self.text += text
        self.finish_reason = part.get("finish_reason") or self.finish_reason
        self.reasoning += message.get("reasoning") or ""
        for call in message.get("tool_calls") or ():
            self.add_call(call["function"].get("name"), call["function"]["arguments"])
        self.token_ids += part.get("token_ids") or ()
        self.prompt_token_ids = part.get("prompt_token_ids") or self.prompt_token_ids
        self.prompt_logprobs = part.get("prompt_logprobs") or self.prompt_logprobs
        told = part.get("logprobs") or {}
        if "tokens" in told:
            self.tokens += told["tokens"]
            self.logprobs += told["token_logprobs"]
            self.offsets += told["text_offset"]
        for entry in told.get("content") or ():
            self.tokens.append(entry["token"])
            self.logprobs.append(entry["logprob"])
        return text

    def add_call(self, name: str | None, arguments: str) -> None:
        """Takes in a call, or more of the arguments of the last one, without a name."""
        if name is not None:
            self.calls.append([name, ""])
        self.calls[-1][1] += arguments

    def add_item(self, item: Mapping[str, Any]) -> str:
        """Takes in an item of a response, be it without its text; returns the text in it."""
        if item["type"] == "function_call":
            self.add_call(item["name"], item["arguments"])
        told = "".join(part["text"] for part in item.get("content") or ())
        if item["type"] == "reasoning":
            self.reasoning += told
            return ""
        self.text += told
        return told

    def numbers(self) -> Iterator[float]:
        """All log-probabilities of emitted and of prompt tokens."""
        yield from (value for value in self.logprobs if value is not None)
        for entry in self.prompt_logprobs or ():
            yield from (told["logprob"] for told in (entry or {}).values())

    def names(self) -> dict[str, Any]:
        """All that must be equal to the letter."""
        prompt = [list(entry or ()) for entry in self.prompt_logprobs or ()]
        return {
            "text": self.text, "reasoning": self.reasoning, "finish_reason": self.finish_reason, "calls": self.calls,
            "tokens": self.tokens,
            "offsets": self.offsets, "token_ids": self.token_ids, "prompt_token_ids": self.prompt_token_ids,
            "prompt_logprobs": prompt,
        }  # fmt: skip


@dataclass(slots=True)
class Answer:
    """What a client was told, whole or in events."""

    status: int = 0  # 0: none came
    error: str | None = None
    code: str | None = None  # of the error
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # time.monotonic of each event, the beginning first
    event_id: str | None = None  # of the last event of a stream that can be resumed
    resumed: int = 0  # how often it went on after its event_id
    broke_off: bool = False  # the connection was lost, or the server had a fault

    @property
    def texts(self) -> dict[int, str]:
        """Of all choices."""
        return {index: choice.text for index, choice in self.choices.items()}

    def pause_s(self, since: float) -> float:
        """The longest time without an event that ended after ``since``."""
        return max((later - at for at, later in zip(self.times, self.times[1:], strict=False) if later > since), default=0.0)

    def add(self, part: Mapping[str, Any]) -> str:
        """Takes in a whole answer, or a chunk of one; returns the text in it."""
        if part.get("object") == "response":
            return self._add_response(part)
        if str(part.get("type", "")).startswith("response."):
            return self._add_event(part)
        added = ""
        for choice in part.get("choices") or ():
            # Those of an answer as a whole are told beside the choices in a chat.
            beside = {name: part[name] for name in ("prompt_logprobs", "prompt_token_ids") if part.get(name)}
            added += self.choices.setdefault(choice["index"], Choice()).add(beside | choice)
        self.usage |= part.get("usage") or {}
        return added

    def _add_response(self, whole: Mapping[str, Any]) -> str:
        choice = self.choices.setdefault(0, Choice())
        added = "".join(map(choice.add_item, whole["output"]))
        self._end_response(whole)
        return added

    def _add_event(self, event: Mapping[str, Any]) -> str:
        """An event of the stream of a response."""
        choice, kind = self.choices.setdefault(0, Choice()), event["type"]
        if kind == "response.output_item.added":
            choice.add_item(event["item"])
        elif kind == "response.function_call_arguments.delta":
            choice.add_call(None, event["delta"])
        elif kind == "response.reasoning_text.delta":
            choice.reasoning += event["delta"]
        elif kind == "response.output_text.delta":
            choice.text += event["delta"]
            return str(event["delta"])
        elif kind in _LAST_EVENTS:
            self._end_response(event["response"])
        return ""

    def _end_response(self, whole: Mapping[str, Any]) -> None:
        self.choices[0].finish_reason = whole["status"]
        usage = whole["usage"] or {}
        pairs = (("prompt", "input"), ("completion", "output"))
        self.usage = {f"{name}_tokens": usage.get(f"{other}_tokens") for name, other in pairs}
        self.usage |= {"total_tokens": usage.get("total_tokens"), "completion_tokens_details": usage.get("output_tokens_details")}

    def differs(self, right: Answer, near: float = LOGPROB_TOLERANCE) -> list[str]:
        """The names of what is not as it should be; empty where all is. Log-probabilities may be ``near`` the right ones."""
        found = [name for name in ("status", "error") if getattr(self, name) != getattr(right, name)]
        if self.choices.keys() != right.choices.keys():
            return [*found, "choices"]
        for index, choice in right.choices.items():
            own = self.choices[index].names()
            found += [f"choices[{index}].{name}" for name, value in choice.names().items() if value != own[name]]
        if self.gap(right) > near:
            found.append("logprobs")
        # Which tokens of a prompt another request had computed depends on who came before, and is no part of the answer.
        counts = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")
        return found + [f"usage.{name}" for name in counts if self.usage.get(name) != right.usage.get(name)]

    def gap(self, right: Answer) -> float:
        """The largest between two log-probabilities of the same token, over the choices that are the same to the letter."""
        pairs = [(choice, right.choices[index]) for index, choice in self.choices.items() if index in right.choices]
        same = [(choice, other) for choice, other in pairs if choice.names() == other.names()]
        gaps = (abs(a - b) for choice, other in same for a, b in zip(choice.numbers(), other.numbers(), strict=True))
        return max(gaps, default=0.0)


def make_asks(count: int, max_tokens: int, seed: int, kinds: Sequence[str] = ()) -> list[Ask]:
    """Requests of all kinds in turns, each with a prompt and a seed of its own.

    Args:
        count: of requests.
        max_tokens: of an answer.
        seed: of the prompts.
        kinds: names of ``KINDS``; all when empty.
    """
    rng, chosen = random.Random(seed), [kind for kind in KINDS if not kinds or kind[0] in kinds]
    asks = []
    for number in range(count):
        kind, route, fields = chosen[number % len(chosen)]
        prompt = make_prompt(rng)
        said: dict[str, Any] = (
            {"prompt": prompt} if route == "completions" else {"messages": [{"role": "user", "content": prompt}]}
        )
        body = {"ignore_eos": True, "max_tokens": max_tokens, "seed": seed * 1_000_003 + number, **said, **fields}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        asks.append(Ask(kind, route, body))
    return asks


def make_prompt(rng: random.Random) -> str:
    """Some made-up opening hours, and a question about one of them: what the demo model was trained to answer."""
    places = rng.sample(_LIBRARIES, 3)
    lines = [f"{place} opens at {rng.choice(_HOURS)} in the morning. On {rng.choice(_DAYS)} it stays closed." for place in places]
    return "Context:\n" + "\n".join(lines) + f"\n\nQuestion: When does {rng.choice(places).lower()} open?"


async def ask(
    client: httpx.AsyncClient, model: str, request: Ask, came: Callable[[str], None] = lambda text: None,
    headers: Mapping[str, str] | None = None, told: Answer | None = None,
) -> Answer:  # fmt: skip
    """Sends a request and reads all of the answer.

    Args:
        client: with the server as its base.
        model: its name.
        request: what is asked.
        came: called with each piece of text of a stream.
        headers: of the request, beside the client's own.
        told: the answer that broke off, which goes on after its ``event_id``; a new one when absent.
    """
    if told is None:
        told = Answer(times=[time.monotonic()])
    told.error, told.code, told.broke_off = None, None, False
    if told.event_id is not None:
        headers, told.resumed = {**(headers or {}), "Last-Event-ID": told.event_id}, told.resumed + 1
    try:
        body = {"model": model, **request.body}
        async with client.stream("POST", f"/v1/{request.route}", json=body, headers=headers) as response:
            told.status = response.status_code
            if response.status_code != 200 or not request.body.get("stream"):
                whole = json.loads(await response.aread())
                told.times.append(time.monotonic())
                if response.status_code != 200:
                    told.code = whole["error"].get("code")
                    told.error = f"{response.status_code} {told.code}: {whole['error']['message']}"
                    told.broke_off = response.status_code >= 500
                else:
                    came(told.add(whole))
                return told
            ended, heard = False, told.event_id
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    heard = line.removeprefix("id: ")
                if not line.startswith("data: "):
                    continue
                told.times.append(time.monotonic())
                if line == "data: [DONE]":
                    ended = True
                    break
                event = json.loads(line.removeprefix("data: "))
                ended = event.get("type") in _LAST_EVENTS
                if "error" in event:
                    told.code = event["error"].get("code")
                    told.error = f"in the stream: {event['error']['message']}"
                    return told
                came(told.add(event))
                told.event_id = heard
            if not ended:
                told.error, told.broke_off = "the stream ended without its last event", True
    except (httpx.HTTPError, ValueError) as error:
        told.broke_off = True
        told.error = f"{type(error).__name__}: {error}"
    return told


async def play(
    client: httpx.AsyncClient, model: str, asks: Sequence[Ask], concurrency: int, came: Callable[[str], None] = lambda text: None
) -> tuple[list[Answer], float]:
    """All requests, so many at a time, and the seconds it took."""
    free, began = asyncio.Semaphore(concurrency), time.monotonic()

    async def one(request: Ask) -> Answer:
        async with free:
            return await ask(client, model, request, came)

    return list(await asyncio.gather(*map(one, asks))), time.monotonic() - began
