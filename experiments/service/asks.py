"""Requests of every kind that the HTTP interface takes, and what a client makes of the answer, whole or in events."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
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


@dataclass(slots=True)
class Told:
    """What a client was told; lists are by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)  # of those that asked for log-probabilities
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    status: int = 0
    error: str | None = None
    times: list[float] = field(default_factory=list)  # time.monotonic of each event, the beginning first

    def pause_s(self, since: float) -> float:
        """The longest time without an event that ended after ``since``."""
        return max((later - at for at, later in zip(self.times, self.times[1:], strict=False) if later > since), default=0.0)

    def read(self, event: Mapping[str, Any]) -> str:
        """Takes a chunk or a whole answer; returns the text in it."""
        added = ""
        for choice in event["choices"]:
            index = choice["index"]
            text = (
                choice["text"] if "text" in choice else (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            )
            self.texts[index] = self.texts.get(index, "") + text
            added += text
            if choice.get("finish_reason") is not None:
                self.finishes[index] = choice["finish_reason"]
            self._read_logprobs(index, choice.get("logprobs"))
        if event.get("usage"):
            self.usage = {key: event["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
        return added

    def _read_logprobs(self, index: int, logprobs: Mapping[str, Any] | None) -> None:
        if not logprobs:
            return
        if "tokens" in logprobs:
            named, values = logprobs["tokens"], logprobs["token_logprobs"]
        else:
            named = [entry["token"] for entry in logprobs["content"]]
            values = [entry["logprob"] for entry in logprobs["content"]]
        self.tokens.setdefault(index, []).extend(named)
        self.logprobs.setdefault(index, []).extend(values)

    def differs(self, right: Told) -> list[str]:
        """The names of what is not as it should be; empty where all is."""
        names = [
            name for name in ("error", "texts", "finishes", "tokens", "usage") if getattr(self, name) != getattr(right, name)
        ]
        if "tokens" not in names and any(
            abs(mine - theirs) > LOGPROB_TOLERANCE
            for index, values in right.logprobs.items()
            for mine, theirs in zip(self.logprobs[index], values, strict=True)
        ):
            names.append("logprobs")
        return names


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


async def ask(client: httpx.AsyncClient, model: str, request: Ask, came: Callable[[str], None] = lambda text: None) -> Told:
    """Sends a request and reads all of the answer.

    Args:
        client: with the server as its base.
        model: its name.
        request: what is asked.
        came: called with each piece of text of a stream.
    """
    told = Told(times=[time.monotonic()])
    try:
        async with client.stream("POST", f"/v1/{request.route}", json={"model": model, **request.body}) as response:
            told.status = response.status_code
            if response.status_code != 200 or not request.body.get("stream"):
                whole = json.loads(await response.aread())
                told.times.append(time.monotonic())
                if response.status_code != 200:
                    told.error = f"{response.status_code} {whole['error'].get('code')}: {whole['error']['message']}"
                else:
                    came(told.read(whole))
                return told
            ended = False
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                told.times.append(time.monotonic())
                ended = line == "data: [DONE]"
                if ended:
                    break
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    told.error = f"in the stream: {event['error']['message']}"
                    return told
                came(told.read(event))
            if not ended:
                told.error = "the stream ended without [DONE]"
    except (httpx.HTTPError, ValueError) as error:
        told.error = f"{type(error).__name__}: {error}"
    return told


async def play(
    client: httpx.AsyncClient, model: str, asks: Sequence[Ask], concurrency: int, came: Callable[[str], None]
) -> tuple[list[Told], float]:
    """All requests, so many at a time, and the seconds it took."""
    free, began = asyncio.Semaphore(concurrency), time.monotonic()

    async def one(request: Ask) -> Told:
        async with free:
            return await ask(client, model, request, came)

    return list(await asyncio.gather(*map(one, asks))), time.monotonic() - began
