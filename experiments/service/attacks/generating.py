"""Forms of attack by requests that generate: costly answers, bodies, grammars and streams that go on."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from experiments.service.attacks.form import CHAT, RESPONSES, Form, Shots, chat, chats, completion, completions, ids, same, words
from experiments.service.attacks.shots import Shot, Target, every, post
from experiments.service.attacks.texts import AMBIGUOUS, deep_schema, many_patterns, many_rules

_NOT_THE_END = {"ignore_eos": True}
_LONG = 1900  # tokens of a prompt
_EVENT_ID = re.compile(rb"^id: (\S+)", re.MULTILINE)


def _scored(prompts: int, tokens: int, **fields: Any) -> Shots:
    """Return one completion of several prompts of token ids, no two alike."""

    def shots(target: Target) -> list[Shot]:
        count = target.scaled(prompts)
        lists = [[ids(target, tokens, 1000 * turn + at) for at in range(count)] for turn in range(3)]
        return [completion(target, prompt=each, max_tokens=1, **fields) for each in lists]

    return shots


def log_probabilities() -> list[Form]:
    """Return attacks by answers that tell very many log-probabilities."""
    kind = "log-probabilities"
    told: dict[str, Any] = {"max_tokens": 200, **_NOT_THE_END}
    report: dict[str, Any] = {"return_token_ids": True, "speculation": {"report": True}, "stream": True}
    return [
        Form(kind, "completion, n=128, 20 each", completions(n=128, logprobs=20, **told),
             completions(n=128, **told), 2, emits=True),
        Form(kind, "chat, n=64, 20 each", chats(n=64, logprobs=True, top_logprobs=20, **told),
             chats(n=64, **told), 2, emits=True),
        Form(kind, "20 of each token of 24 prompts", _scored(24, _LONG, prompt_logprobs=20), _scored(24, _LONG), 2),
        Form(kind, "20 of each token of 128 prompts", _scored(128, _LONG, prompt_logprobs=20), _scored(24, _LONG), 2),
        Form(kind, "echo of 128 prompts", _scored(128, 900, echo=True, logprobs=0), _scored(128, 900), 2),
        Form(
            kind, "streams with ids and reports", completions(n=32, logprobs=20, **told, **report),
            completions(n=32, stream=True, **told), 4, emits=True,
        ),
    ]  # fmt: skip


def _messages(count: int, message: Callable[[int], dict[str, Any]], **fields: Any) -> Shots:
    def shots(target: Target) -> list[Shot]:
        messages = [message(at) for at in range(target.scaled(count))]
        body = {"model": target.model, "messages": messages, "max_tokens": 1, **fields}
        return [post(CHAT, body, target.keys[0])]

    return shots


def _parts(count: int) -> list[dict[str, str]]:
    return [{"type": "text", "text": ""}] * count


def _calls(count: int, arguments: str = "{}") -> list[dict[str, Any]]:
    return [{"id": f"c{at}", "type": "function", "function": {"name": "f", "arguments": arguments}} for at in range(count)]


def _items(kind: str, count: int) -> Shots:
    def item(at: int) -> dict[str, Any]:
        if kind == "messages":
            return {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 100}
        return {"type": "function_call", "call_id": f"c{at}", "name": "f", "arguments": "{}"}

    def shots(target: Target) -> list[Shot]:
        items = [item(at) for at in range(target.scaled(count))]
        asked = {"role": "user", "content": "hi"}
        return [post(RESPONSES, {"model": target.model, "input": [*items, asked], "max_output_tokens": 1}, target.keys[0])]

    return shots


def bodies() -> list[Form]:
    """Return attacks by bodies that are costly to check."""
    kind, polite = "bodies", chats(max_tokens=1)
    wide: dict[str, Any] = {
        "logit_bias": {str(token): 0.5 for token in range(1024)}, "stop_token_ids": list(range(10, 1034)),
        "reference_embedding": [0.5] * 4096, "stop": ["x" * 60] * 4,
    }  # fmt: skip
    unknown = {f"field{at}": at for at in range(200_000)}
    return [
        Form(kind, "8,192 empty parts", _messages(8, lambda at: {"role": "user", "content": _parts(1024)}), polite),
        Form(kind, "307,200 empty parts", _messages(300, lambda at: {"role": "user", "content": _parts(1024)}), polite),
        Form(kind, "21,120 calls", _messages(165, lambda at: {"role": "assistant", "tool_calls": _calls(128)}), polite),
        Form(kind, "4,096 messages", _messages(4096, lambda at: {"role": "user", "content": [*_parts(1), *_parts(1)]}), polite),
        Form(kind, "60,000 parts of responses", _items("messages", 600), polite),
        Form(kind, "50,000 calls of responses", _items("calls", 50_000), polite),
        Form(kind, "a million token ids", same(lambda target: completion(target, prompt=[1] * target.scaled(10**6))), polite),
        Form(kind, "every list at its bound", same(lambda target: chat(target, max_tokens=1, **wide)), polite, 8),
        Form(kind, "200,000 unknown fields", same(lambda target: chat(target, **unknown)), polite),
    ]


def _bound(*grammars: Any, field: str = "grammar", size: int = 0, **fields: Any) -> Shots:
    """Return chats whose answer is bound, in turns by each of some grammars."""
    told = {"max_tokens": 100} | fields
    content = words(size) if size else "go on"
    return lambda target: [chat(target, content=content, structured_outputs={field: each}, **told) for each in grammars]


def grammars() -> list[Form]:
    """Return attacks by grammars: costly to compile, costly in each step, or such that end in the middle of an answer."""
    endless: dict[str, Any] = {"logit_bias": {"0": -100}, "temperature": 1.0}
    simple, integer = _bound('start: "a"+', **endless), _bound({"type": "integer", "minimum": 1, "maximum": 9}, field="json")
    schemas = [{"type": "integer", "multipleOf": number} for number in (499_979, 999_983, 9_999_991, 86_399)]
    ambiguous = {"anyOf": [{"type": "string", "pattern": f"^(a|aa|a{{1,{at}}})*$"} for at in range(3, 9)]}
    rows = [many_rules(2500 + at) for at in range(8)]
    later = [many_rules(2500 + at, first="ab") for at in range(4)]
    cycles = [{"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, {"$ref": "#"}]
    fails, costs, compiles = "grammars that fail", "ambiguous grammars", "grammars that compile long"
    return [
        Form(costs, "four words of itself", _bound(AMBIGUOUS[0], **endless), simple),
        Form(costs, "two words of itself", _bound(AMBIGUOUS[1], **endless), simple),
        Form(costs, "three rules", _bound(AMBIGUOUS[2], AMBIGUOUS[3], **endless), simple, 8),
        Form(costs, "patterns of a schema", _bound(ambiguous, field="json", **endless), integer),
        Form(fails, "at the first mask", _bound(*rows), simple, 8),
        Form(fails, "at the first mask, long prompts", _bound(*rows, size=1500, max_tokens=8), simple, 8),
        Form(fails, "at a later mask", _bound(*later), simple, 8),
        Form(fails, "schemas without an end", _bound(*cycles, field="json"), integer, 8),
        Form(compiles, "multipleOf", _bound(*schemas, field="json"), integer),
        Form(compiles, "products of patterns", _bound(*(many_patterns(at) for at in (8, 12, 16, 20)), field="json"), integer),
        Form(compiles, "deep choices", _bound(*(deep_schema(at) for at in (50, 120, 180)), field="json"), integer),
        Form(
            compiles, "counted repetitions",
            _bound(*(f"((a|b){{0,{at}}}c){{0,{at}}}(a|b|c)*a.{{{at}}}" for at in (90, 300, 900)), field="regex"),
            _bound("(a|b|c){300}", field="regex"),
        ),
    ]  # fmt: skip


def event_ids(target: Target, body: dict[str, Any]) -> list[str]:
    """Stream an answer and return the ids of its events; none where the server gives none."""
    shot = post(CHAT, body, target.keys[0], {"Accept": "text/event-stream"})
    with socket.create_connection((target.host, target.port), timeout=30) as connection:
        connection.sendall(shot.pieces[0])
        told = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return [found.decode() for found in _EVENT_ID.findall(told)]


def _resuming(change: Callable[[list[str], int], str], count: int) -> Shots:
    """Return clients that go on with a stream, each with what ``change`` makes of the ids of its events."""

    def shots(target: Target) -> list[Shot]:
        messages = [{"role": "user", "content": "When does the library open?"}]
        body = {"model": target.model, "messages": messages, "max_tokens": 64, "stream": True, "temperature": 0, **_NOT_THE_END}
        told = event_ids(target, body) or [f"chatcmpl-{'0' * 32}.1764000000.{'0' * 16}.00000000.0.2f-5ab1c3d4-0-0-1"]
        headers = ({"Accept": "text/event-stream", "Last-Event-ID": change(told, at)} for at in range(count))
        return [post(CHAT, body, target.keys[0], each) for each in headers]

    return shots


def _forged(told: list[str], at: int) -> str:
    """Return an id that no server made."""
    parts = told[0].split(".")
    counts = ("ffffffff-ffffffff-ffffffff-ffffffff-ffffffff", "0-0-0-0-0", ".".join(["1-0-0-0-0"] * 129))[at % 3]
    return ".".join([f"chatcmpl-{at:032x}", "999999999999", *parts[2:5], counts, "0" * 32])


def _flipped(told: list[str], at: int) -> str:
    """Return an id with one character changed."""
    own = told[at % len(told)]
    place = at * 7 % len(own)
    return own[:place] + ("0" if own[place] != "0" else "1") + own[place + 1 :]


def resumed_streams() -> list[Form]:
    """Return attacks by streams that go on."""
    kind, polite = "streams that go on", chats(40, max_tokens=64, stream=True, **_NOT_THE_END)
    return [
        Form(kind, "40 clients with one id", _resuming(lambda told, at: told[0], 40), polite, 40, emits=True),
        Form(kind, "ids of chosen answers", _resuming(_forged, 40), polite, 16, emits=True),
        Form(kind, "ids with a changed character", _resuming(_flipped, 60), polite, 16, emits=True),
        Form(kind, "each event's id at once", _resuming(lambda told, at: told[at % len(told)], 40), polite, 16, emits=True),
    ]


def _unread(**how: Any) -> Shots:
    def shots(target: Target) -> list[Shot]:
        told = {"n": 8, "max_tokens": 300, "stream": True, "logprobs": 20, **_NOT_THE_END}
        return [replace(completion(target, prompt=f"Library {at}", **told), **how) for at in range(8)]

    return shots


def _sessions(target: Target) -> list[Shot]:
    return [chat(target, max_tokens=1, prompt_cache_key=f"session {at}") for at in range(320)]


def streams_and_memory() -> list[Form]:
    """Return attacks by streams that nobody reads, references and sessions."""
    documents = [words(100_000, 1)[:330_000]]
    streams = completions(n=8, max_tokens=300, stream=True, **_NOT_THE_END)
    compare = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 200, **_NOT_THE_END}
    return [
        Form("streams", "never read", _unread(reads=False, stay_s=8.0), streams, 16, emits=True),
        Form("streams", "left at once", _unread(stay_s=0.05), streams, 16, emits=True),
        Form("streams", "compared", same(lambda target: post("/v1/compare", {"model": target.model, **compare}, target.keys[0])),
             chats(max_tokens=200, **_NOT_THE_END), 8, emits=True),
        Form("references", "330 kB", same(lambda target: chat(target, reference_documents=documents)), chats()),
        Form("references", "330 kB, n=100",
             same(lambda target: chat(target, reference_documents=documents, n=100)), chats(n=100), 2, emits=True),
        Form("references", "1,000 documents",
             same(lambda target: chat(target, reference_documents=every(["The library opens at nine. " * 9], 1000))), chats()),
        Form("sessions", "320 names", _sessions, chats(max_tokens=1), 16),
    ]  # fmt: skip
