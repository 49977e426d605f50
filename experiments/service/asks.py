"""The asking client: requests of every kind that the HTTP interface takes, and its answers, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

LOGPROB_TOLERANCE = 1e-3  # the order of sums depends on the rows of a forward, which differ for a resumed text
_PLACES = (
    "The library", "The museum", "The swimming pool", "The town hall", "The post office", "The bakery", "The harbour office",
)  # fmt: skip
_HOURS = ("eight", "nine", "ten", "eleven", "noon")
_DAYS = ("Mondays", "Tuesdays", "Wednesdays", "Thursdays", "Fridays", "Saturdays", "Sundays")
_SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 40}, "open": {"type": "boolean"}, "hours": {"type": "integer"}},
    "required": ["place", "open", "hours"],
    "additionalProperties": False,
}
_JSON = {
    "ignore_eos": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}},
}
_SAMPLED = {"temperature": 0.8, "top_p": 0.95}
_CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 2}
# Kind, route and fields. Kinds without a length limit set ignore_eos, so that a fault can hit them in the middle.
KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("greedy", "chat/completions", {"temperature": 0, "stream": True}),
    ("sampled", "chat/completions", {**_SAMPLED, "stream": True, **_CHAT_LOGPROBS}),
    ("two choices", "chat/completions", {**_SAMPLED, "n": 2, "stream": True, **_CHAT_LOGPROBS}),
    ("whole", "chat/completions", {"temperature": 0, **_CHAT_LOGPROBS}),
    ("whole, two choices", "completions", {**_SAMPLED, "n": 2, "logprobs": 1}),
    ("text", "completions", {"temperature": 0, "stream": True, "logprobs": 2}),
    ("stop strings", "completions", {"temperature": 0.9, "stream": True, "stop": [" on", ".\n"], "logprobs": 0}),
    ("json", "chat/completions", {**_SAMPLED, "stream": True, **_JSON}),
    ("whole json", "chat/completions", {"temperature": 0, **_JSON}),
    ("penalties", "chat/completions", {
        **_SAMPLED, **_CHAT_LOGPROBS, "stream": True,
        "frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1,
    }),
    ("references", "chat/completions", {"temperature": 0, "stream": True, "reference_documents": ["It opens at nine."]}),
    ("plain", "chat/completions", {**_SAMPLED, "stream": True, "speculation": {"max_draft_tokens": 0}}),
)  # fmt: skip
_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")  # of /v1/responses, which sends no [DONE]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    kind: str
    route: str
    body: Mapping[str, Any]  # without the model


@dataclass(slots=True)
class Choice:
    """One choice of an answer."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    calls: list[list[str]] = field(default_factory=list)  # name and arguments
    tokens: list[str] = field(default_factory=list)  # those with log-probabilities
    logprobs: list[float | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of completions
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None

    def add(self, part: Mapping[str, Any]) -> str:
        """Merge a whole choice or a chunk of one, and return the text in it."""
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
        logprobs = part.get("logprobs") or {}
        if "tokens" in logprobs:
            self.tokens += logprobs["tokens"]
            self.logprobs += logprobs["token_logprobs"]
            self.offsets += logprobs["text_offset"]
        for entry in logprobs.get("content") or ():
            self.tokens.append(entry["token"])
            self.logprobs.append(entry["logprob"])
        return text

    def add_call(self, name: str | None, arguments: str) -> None:
        """Add a tool call, or without a name more arguments of the last one."""
        if name is not None:
            self.calls.append([name, ""])
        self.calls[-1][1] += arguments

    def add_item(self, item: Mapping[str, Any]) -> str:
        """Merge an item of a response, and return the text in it."""
        if item["type"] == "function_call":
            self.add_call(item["name"], item["arguments"])
        text = "".join(part["text"] for part in item.get("content") or ())
        if item["type"] == "reasoning":
            self.reasoning += text
            return ""
        self.text += text
        return text

    def numbers(self) -> Iterator[float]:
        """Yield all log-probabilities of emitted and of prompt tokens."""
        yield from (value for value in self.logprobs if value is not None)
        for entry in self.prompt_logprobs or ():
            yield from (token["logprob"] for token in (entry or {}).values())

    def exact(self) -> dict[str, Any]:
        """Return all fields that have to be exactly equal."""
        fields = ("text", "reasoning", "finish_reason", "calls", "tokens", "offsets", "token_ids", "prompt_token_ids")
        prompt = [list(entry or ()) for entry in self.prompt_logprobs or ()]
        return {name: getattr(self, name) for name in fields} | {"prompt_logprobs": prompt}


@dataclass(slots=True)
class Answer:
    """An answer as its client saw it."""

    status: int = 0  # 0: none came
    error: str | None = None
    code: str | None = None  # of the error
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # time.monotonic of the start, of each event and of the end
    event_id: str | None = None  # of the last event of a stream that can be resumed
    resumed: int = 0  # number of resumptions after event_id
    broke_off: bool = False  # the connection was lost, or the server had a fault
    retry_after: str | None = None

    @property
    def texts(self) -> dict[int, str]:
        """Texts of all choices."""
        return {index: choice.text for index, choice in self.choices.items()}

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last event."""
        return self.times[-1] - self.times[0]

    @property
    def first_s(self) -> float | None:
        """Seconds to the first event of a stream; None for other answers."""
        return self.times[1] - self.times[0] if len(self.times) > 2 else None

    def pause_s(self, since: float) -> float:
        """Return the longest time without an event that ended after ``since``."""
        return max((later - at for at, later in zip(self.times, self.times[1:], strict=False) if later > since), default=0.0)

    def add(self, part: Mapping[str, Any]) -> str:
        """Merge a whole answer or a chunk of one, and return the text in it."""
        if part.get("object") == "response":
            choice = self.choices.setdefault(0, Choice())
            added = "".join(map(choice.add_item, part["output"]))
            self._end_response(part)
            return added
        if str(part.get("type", "")).startswith("response."):
            return self._add_event(part)
        added = ""
        for choice in part.get("choices") or ():
            # A chat has these fields beside its choices.
            beside = {name: part[name] for name in ("prompt_logprobs", "prompt_token_ids") if part.get(name)}
            added += self.choices.setdefault(choice["index"], Choice()).add(beside | choice)
        self.usage |= part.get("usage") or {}
        return added

    def _add_event(self, event: Mapping[str, Any]) -> str:
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
        self.usage = {
            "prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens"),
            "total_tokens": usage.get("total_tokens"), "completion_tokens_details": usage.get("output_tokens_details"),
        }  # fmt: skip

    def differs(self, right: Answer, near: float = LOGPROB_TOLERANCE) -> list[str]:
        """Return the names of fields that differ from the expected answer; log-probabilities may differ by ``near``."""
        found = [name for name in ("status", "error") if getattr(self, name) != getattr(right, name)]
        if self.choices.keys() != right.choices.keys():
            return [*found, "choices"]
        for index, choice in right.choices.items():
            own = self.choices[index].exact()
            found += [f"choices[{index}].{name}" for name, value in choice.exact().items() if value != own[name]]
        if self.gap(right) > near:
            found.append("logprobs")
        # The number of cached prompt tokens depends on earlier requests and is not compared.
        counts = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")
        return found + [f"usage.{name}" for name in counts if self.usage.get(name) != right.usage.get(name)]

    def gap(self, right: Answer) -> float:
        """Return the largest difference of log-probabilities, over the choices that are otherwise equal."""
        pairs = [(choice, right.choices[index]) for index, choice in self.choices.items() if index in right.choices]
        same = [(choice, other) for choice, other in pairs if choice.exact() == other.exact()]
        gaps = (abs(a - b) for choice, other in same for a, b in zip(choice.numbers(), other.numbers(), strict=True))
        return max(gaps, default=0.0)


def make_asks(count: int, max_tokens: int, seed: int, kinds: Sequence[str] = ()) -> list[Ask]:
    """Return requests of the given kinds of ``KINDS`` (all if empty) in turns, each with its own prompt and seed."""
    rng, chosen = random.Random(seed), [kind for kind in KINDS if not kinds or kind[0] in kinds]
    asks = []
    for number in range(count):
        kind, route, fields = chosen[number % len(chosen)]
        prompt = make_prompt(rng)
        content: dict[str, Any] = (
            {"prompt": prompt} if route == "completions" else {"messages": [{"role": "user", "content": prompt}]}
        )
        body = {"ignore_eos": True, "max_tokens": max_tokens, "seed": seed * 1_000_003 + number, **content, **fields}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        asks.append(Ask(kind, route, body))
    return asks


def make_prompt(rng: random.Random) -> str:
    """Return opening hours and a question about one of them, as in the training data of the demo model."""
    places = rng.sample(_PLACES, 3)
    lines = [f"{place} opens at {rng.choice(_HOURS)} in the morning. On {rng.choice(_DAYS)} it stays closed." for place in places]
    return "Context:\n" + "\n".join(lines) + f"\n\nQuestion: When does {rng.choice(places).lower()} open?"


async def ask(
    client: httpx.AsyncClient, model: str, request: Ask, came: Callable[[str], None] = lambda text: None,
    headers: Mapping[str, str] | None = None, told: Answer | None = None,
) -> Answer:  # fmt: skip
    """Send a request and read the answer to its end.

    ``came`` gets each piece of text of a stream; ``told`` is an answer that broke off, to resume after its ``event_id``.
    """
    if told is None:
        told = Answer(times=[time.monotonic()])
    told.error, told.code, told.broke_off = None, None, False
    if told.event_id is not None:
        headers, told.resumed = {**(headers or {}), "Last-Event-ID": told.event_id}, told.resumed + 1
    try:
        body = {"model": model, **request.body}
        async with client.stream("POST", f"/v1/{request.route}", json=body, headers=headers) as response:
            told.status, told.retry_after = response.status_code, response.headers.get("retry-after")
            if response.status_code == 200 and request.body.get("stream"):
                await _read_events(response, told, came)
                return told
            whole = json.loads(await response.aread())
            told.times.append(time.monotonic())
            if response.status_code == 200:
                came(told.add(whole))
            else:
                told.code, told.broke_off = whole["error"].get("code"), response.status_code >= 500
                told.error = f"{response.status_code} {told.code}: {whole['error']['message']}"
    except (httpx.HTTPError, ValueError) as error:
        told.broke_off = True
        told.error = f"{type(error).__name__}: {error}"
    return told


async def _read_events(response: httpx.Response, told: Answer, came: Callable[[str], None]) -> None:
    ended, event_id = False, told.event_id
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        if not line.startswith("data: "):
            continue
        told.times.append(time.monotonic())
        if line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        ended = event.get("type") in _LAST_EVENTS
        if "error" in event:
            told.code = event["error"].get("code")
            told.error = f"in the stream: {event['error']['message']}"
            return
        came(told.add(event))
        told.event_id = event_id
    if not ended:
        told.error, told.broke_off = "the stream ended without its last event", True


async def play(
    client: httpx.AsyncClient, model: str, asks: Sequence[Ask], concurrency: int, came: Callable[[str], None] = lambda text: None
) -> tuple[list[Answer], float]:
    """Send all requests with a limit on those in flight, and return their answers and the seconds taken."""
    free, began = asyncio.Semaphore(concurrency), time.monotonic()

    async def one(request: Ask) -> Answer:
        async with free:
            return await ask(client, model, request, came)

    return list(await asyncio.gather(*map(one, asks))), time.monotonic() - began
