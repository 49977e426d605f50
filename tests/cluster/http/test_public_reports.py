"""Inputs of public bug reports about comparable servers: what models write, and what clients send; whole and streamed."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openai import OpenAI

from outrider.actors.description import Description
from outrider.cluster.cli.chat import ServerBackend
from outrider.cluster.http.answers.responses import ResponseBuilder
from outrider.cluster.http.api import Service
from outrider.cluster.serving.generation import GenerationJob
from outrider.decoding.request import FinishReason, StepOutput
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.measures.metrics import EngineCounts
from outrider.engine.text.chat_format import CallForm
from tests.cluster.circle import (
    CHAT,
    CHATS,
    COMPLETIONS,
    MESSAGES,
    TEXT,
    TOKENIZER,
    LocalEngine,
    Said,
    Speaker,
    build_tokenizer,
    check_error,
    served,
    whole,
)

RESPONSES = "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "l": {"type": "array"}, "b": {"type": "boolean"}},
}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
OWN_TOOLS: list[Any] = [{"type": "function", **FUNCTION, "strict": False}]  # of the Responses API
HINTS: dict[CallForm, str] = {
    "hermes": "<tool_call>", "qwen3_coder": "<tool_call><function=a><parameter=b>", "mistral": "[TOOL_CALLS] [",
    "llama3_json": "<|python_tag|>",
}  # fmt: skip
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.role }}"
    "{% if message.name %}:{{ message.name }}{% endif %}]{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}>"
)
SEPARATORS = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\r\ne"


DESCRIPTION = Description(
    ModelInfo(
        "circle", 2048, 258, "float32", "cpu", 1, (TOKENIZER.eos_token_id,), "llma", True, "0" * 40, "0" * 40, ("prompt_lookup",)
    ),
    EngineCounts(running=0, waiting=0, free_slots=3),
    None,
)


class Scripted(LocalEngine):
    """Each answer is the same text, a few characters a step. No model runs."""

    text, reason = "", FinishReason.STOP

    async def describe(self) -> list[Description]:
        return [DESCRIPTION]

    async def _generate(self, job: GenerationJob) -> AsyncGenerator[StepOutput, None]:
        self.jobs.append(job)
        yield StepOutput(job.request_id, (), "")
        for start in range(0, len(self.text), 7):
            yield StepOutput(job.request_id, (97,), self.text[start : start + 7])
        yield StepOutput(job.request_id, (), "", self.reason)


@pytest.fixture(scope="module")
def speakers() -> Iterator[dict[CallForm, Speaker]]:
    """A server for each form of calls, over one scripted engine."""
    engine, found = Scripted(), dict[CallForm, Speaker]()
    with contextlib.ExitStack() as stack:
        for form, hint in HINTS.items():
            tokenizer = build_tokenizer()
            tokenizer.chat_template, tokenizer.name_or_path = f"{TEMPLATE}{{# {hint} #}}", "circle"
            url = stack.enter_context(served(Service(engine, tokenizer)))
            client = stack.enter_context(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60))
            found[form] = Speaker(url, client, engine, tokenizer)
        yield found


@pytest.fixture
def plain(speakers: dict[CallForm, Speaker]) -> Iterator[httpx.Client]:
    """A plain HTTP client of a server that says a word."""
    with httpx.Client(base_url=scripted(speakers["hermes"], "fine").url, timeout=60) as client:
        yield client


def scripted(speaker: Speaker, text: str, reason: FinishReason = FinishReason.STOP) -> Speaker:
    """Return a speaker that says a text."""
    assert isinstance(speaker.engine, Scripted)
    speaker.engine.text, speaker.engine.reason = text, reason
    return speaker


def said_everywhere(speaker: Speaker, **changes: Any) -> Said:
    """Return what a chat says, after a check that its stream, and a response and its stream, say the same."""
    told = whole(speaker.ask(tools=TOOLS, **changes))
    assert speaker.streamed(tools=TOOLS, **changes)[0] == told
    options: dict[str, Any] = {"model": "circle", "input": "hi", "tools": OWN_TOOLS}
    for answer in (speaker.client.responses.create(**options), list(speaker.client.responses.create(**options, stream=True))):
        found = answer[-1].response if isinstance(answer, list) else answer
        assert found.output_text.strip() == told[1].strip()
        assert [(item.name, item.arguments) for item in found.output if item.type == "function_call"] == told[2]
    return told


def hermes(inside: str) -> str:
    return f"<tool_call>{inside}</tool_call>"


def coder(name: str, value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"


HALF = r"\ud83d"
CALLED = r'{"a": "\ud83d"}'
WRITTEN: list[tuple[CallForm, str, str]] = [
    # Half a surrogate pair, before and behind the name, as a key, within a string of JSON, in a list.
    ("hermes", hermes(f'{{"arguments": {CALLED}, "name": "f"}}'), CALLED),
    ("hermes", hermes(f'{{"name": "f", "arguments": {CALLED}}}'), CALLED),
    ("hermes", hermes(r'{"arguments": {"\udc00": "é"}, "name": "f"}'), r'{"\udc00": "é"}'),
    ("hermes", hermes(r'{"arguments": "{\"a\": \"\ud83d\"}", "name": "f"}'), CALLED),
    ("qwen3_coder", coder("l", f'["{HALF}"]'), rf'{{"l": ["{HALF}"]}}'),
    ("llama3_json", f'{{"parameters": {CALLED}, "name": "f"}}', CALLED),
    ("mistral", f'[TOOL_CALLS] [{{"arguments": {CALLED}, "name": "f"}}]', CALLED),
    # Types, and marks within values.
    ("qwen3_coder", coder("a", "42"), '{"a": "42"}'),
    ("qwen3_coder", coder("b", "True"), '{"b": true}'),
    ("qwen3_coder", coder("u", "NaN"), '{"u": "NaN"}'),
    ("qwen3_coder", coder("a", "echo '</tool_call>'"), '{"a": "echo \'</tool_call>\'"}'),
    ("qwen3_coder", coder("a", SEPARATORS).removeprefix("<tool_call>\n"), json.dumps({"a": SEPARATORS}, ensure_ascii=False)),
]


@pytest.mark.parametrize(("form", "text", "arguments"), WRITTEN)
def test_calls_are_valid_json(speakers: dict[CallForm, Speaker], form: CallForm, text: str, arguments: str) -> None:
    told = said_everywhere(scripted(speakers[form], text))
    assert told[1:] == ("", [("f", arguments)], "tool_calls")
    assert isinstance(json.loads(told[2][0][1]), dict)


PROSE: list[tuple[CallForm, str]] = [
    ("llama3_json", '{"name": "Alice", "age": 30}'), ("llama3_json", '{"name": "f", "age": 30}'),
    ("hermes", f"{HALF} is no character, <tool_call> is a mark."), ("hermes", hermes(f'{{"arguments": {{}}, "name": "{HALF}"}}')),
    ("mistral", "[TOOL_CALLS] is the mark"), ("qwen3_coder", "Use <function=f> so."),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), PROSE)
def test_other_text_stays_text(speakers: dict[CallForm, Speaker], form: CallForm, text: str) -> None:
    assert said_everywhere(scripted(speakers[form], text))[1:] == (text, [], "stop")


def last_event(speaker: Speaker, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{speaker.url}{path}", json=body | {"stream": True}, timeout=60).raise_for_status()
    assert answer.text.endswith("\n\n")
    return dict(json.loads(answer.text.rstrip().rpartition("data: ")[2]))


BODIES: dict[str, dict[str, Any]] = {CHATS: CHAT, COMPLETIONS: TEXT, RESPONSES: {"model": "circle", "input": "hi"}}


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
@pytest.mark.parametrize("text", ["\ud83d", "a text, and then \udc00", "\ud83d and \ude00"])
def test_a_stream_that_fails_ends_with_an_error(speakers: dict[CallForm, Speaker], path: str, text: str) -> None:
    speaker = scripted(speakers["hermes"], text)  # text that no encoding has
    check_error(httpx.post(f"{speaker.url}{path}", json=BODIES[path], timeout=60), 500, code="internal_error")
    error = last_event(speaker, path, BODIES[path])["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")


def test_a_response_that_fails_ends_with_its_last_event(
    speakers: dict[CallForm, Speaker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("an item cannot be written")

    speaker = scripted(speakers["hermes"], "\ud83d")
    assert last_event(speaker, RESPONSES, BODIES[RESPONSES])["type"] == "response.completed"
    scripted(speaker, f"Well. {hermes(FUNCTION['name'])}")
    for name in ("push", "_end_item", "end"):
        with monkeypatch.context() as patch:
            patch.setattr(ResponseBuilder, name, fail)
            last = last_event(speaker, RESPONSES, BODIES[RESPONSES])
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
            assert last["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    "text", [SEPARATORS, "\u2028", "line\u2028sep\n\nx\u2029", hermes('{"name": "f", "arguments": {"\x85": "\u2028"}}')]
)
def test_events_are_lines_for_every_reader(speakers: dict[CallForm, Speaker], text: str) -> None:
    speaker = scripted(speakers["hermes"], text)
    for path, body in BODIES.items():
        found = ""
        with httpx.stream("POST", f"{speaker.url}{path}", json=body | {"stream": True}, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line[6:])
                    choice = (event.get("choices") or [{}])[0]
                    delta = event.get("delta") if event.get("type") == "response.output_text.delta" else choice.get("text")
                    found += delta or choice.get("delta", {}).get("content") or ""
        assert found == text
    with httpx.Client(base_url=speaker.url, timeout=60) as http:
        backend = ServerBackend(http, {"model": "circle", "max_tokens": 60})
        assert "".join(piece.text for piece in backend.answer(MESSAGES)) == text


def test_a_stop_string_within_a_call_is_no_call_that_ended(speakers: dict[CallForm, Speaker]) -> None:
    for cut in ('{"name": "f", "arguments": {"', '{"name": "f", "arguments": {"a": "x"'):
        arguments = cut.partition('"arguments": ')[2]
        told = whole(scripted(speakers["hermes"], f"<tool_call>{cut}").ask(tools=TOOLS, stop=["city"]))
        assert told[2:] == ([("f", arguments)], "stop")
        scripted(speakers["hermes"], f"<tool_call>{cut}", FinishReason.LENGTH)
        assert speakers["hermes"].streamed(tools=TOOLS)[0][2:] == ([("f", arguments)], "length")


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}} | more


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant"} | fields


RESULT = {"role": "tool", "tool_call_id": "1", "content": "ok"}
HISTORY: list[tuple[dict[str, Any], str]] = [
    # Arguments that were cut, are no JSON, are no object, hold half a pair; what a client has after adding up a stream.
    (assistant(tool_calls=[call('{"city": "Os')]), "[assistant]f{}"),
    (assistant(tool_calls=[call("[1]")]), "[assistant]f{}"),
    (assistant(tool_calls=[call("")], content=""), "[assistant]f{}"),
    (assistant(tool_calls=[call(None)]), "[assistant]f{}"),
    (assistant(tool_calls=[call('{"a": NaN')], content="x"), "[assistant]xf{}"),
    (assistant(tool_calls=[call('{"a": 1}', index=0)], content=None), '[assistant]f{"a": 1}'),
    # Messages as typed clients, LangChain, AutoGen and LiteLLM keep them.
    (assistant(content=None), "[assistant]"),
    (assistant(), "[assistant]"),
    (assistant(content=None, tool_calls=None, function_call=None, refusal=None, audio=None, annotations=[]), "[assistant]"),
    (assistant(content="x", tool_calls=[]), "[assistant]x"),
    (assistant(content="x", provider_specific_fields={"refusal": None}), "[assistant]x"),
    (assistant(content='{"a": 1}', parsed={"a": 1}), '[assistant]{"a": 1}'),
    (assistant(tool_calls=[call('{"a": 1}') | {"function": call('{"a": 1}')["function"] | {"parsed_arguments": {"a": 1}}}]),
     '[assistant]f{"a": 1}'),
    ({"role": "user", "name": "alice", "content": "x"}, "[user:alice]x"),
    (assistant(name="planner", content="x"), "[assistant:planner]x"),
    (RESULT | {"name": "f"}, "[tool:f]ok"),
    ({"role": "user", "name": None, "content": "x"}, "[user]x"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "shown"), HISTORY)
def test_history_is_taken_back(speakers: dict[CallForm, Speaker], message: dict[str, Any], shown: str) -> None:
    speaker = scripted(speakers["hermes"], "fine")
    messages = [*MESSAGES, message, RESULT]
    assert whole(speaker.ask(messages=messages)) == ("", "fine", [], "stop")
    assert speaker.streamed(messages=messages)[0][1] == "fine"
    assert speaker.prompt(messages=messages)[0] == f"[user]hi{shown}[tool]ok>"


def own_call(arguments: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments} | more


TYPED = {"type": "output_text", "text": "x", "annotations": [], "logprobs": None, "parsed": {"a": 1}}
ITEMS: list[tuple[dict[str, Any], str]] = [
    (own_call('{"city": "Os', status="incomplete"), "f{}"),
    (own_call("no", id="fc_1"), "f{}"),
    (own_call('{"a": 1}', parsed_arguments={"a": 1}), 'f{"a": 1}'),
    ({"type": "message", "role": "assistant", "content": [TYPED]}, "x"),
]


@pytest.mark.parametrize(("item", "shown"), ITEMS)
def test_items_are_taken_back(speakers: dict[CallForm, Speaker], item: dict[str, Any], shown: str) -> None:
    speaker = scripted(speakers["hermes"], "fine")
    output = {"type": "function_call_output", "call_id": "1", "output": "ok"}
    given = [{"role": "user", "content": "hi"}, item, *([output] if item["type"] == "function_call" else [])]
    for stream in (False, True):
        answer: Any = speaker.client.responses.create(model="circle", input=given, stream=stream)
        assert (list(answer)[-1].response if stream else answer).output_text == "fine"
        prompt = speaker.tokenizer.decode(speaker.engine.jobs[-1].prompt_ids)
        assert f"[user]hi[assistant]{shown}" in prompt


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


LENIENT: list[tuple[dict[str, Any], list[str]]] = [
    (closed(v={"type": "array", "items": {"enum": ["x"]}, "uniqueItems": True, "maxItems": 2}), ["properties.v.uniqueItems"]),
    (closed(v={"type": "integer", "maximum": 9, "minimum": 1, "not": {"const": 3}}), ["properties.v.not"]),
    (closed(v={"type": "string", "maxLength": 3, "format": "int64", "pattern": "(?=a)b"}),
     ["properties.v.format", "properties.v.pattern"]),
    (closed(v={"enum": ["x", "y"]}) | {"propertyNames": {"pattern": "^v"}}, ["propertyNames"]),
    (closed(v={"oneOf": [{"const": 1}, {"const": 2}]}), []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "left_out"), LENIENT)
def test_schemas_that_are_not_strict_are_held_to(http: httpx.Client, schema: dict[str, Any], left_out: list[str]) -> None:
    for strict in ({}, {"strict": False}, {"strict": None}):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **strict}}
        for path, body in ((CHATS, CHAT), (COMPLETIONS, TEXT)):
            asked = body | {"response_format": form, "max_tokens": 200, "temperature": 1.0, "seed": 1}
            answer = http.post(path, json=asked).raise_for_status().json()
            field = "response_format.json_schema.schema"
            unenforced = sorted(answer.get("unenforced", []))
            assert [one for one in unenforced if not one.endswith("oneOf")] == [f"{field}.{one}" for one in left_out]
            choice = answer["choices"][0]
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice.get("text") or choice["message"]["content"]), without(schema, left_out))
            wire = http.post(path, json=asked | {"stream": True}).raise_for_status().text
            chunks = [json.loads(line[6:]) for line in wire.split("\n") if line.startswith("data: {")]
            assert [chunk["unenforced"] for chunk in chunks if "unenforced" in chunk] == (
                [answer["unenforced"]] if unenforced else []
            )
    form = {"type": "json_schema", "name": "a", "schema": schema}
    body = {"model": "circle", "input": "hi", "max_output_tokens": 9, "text": {"format": form}}
    answer = http.post(RESPONSES, json=body).raise_for_status().json()
    assert set(answer.get("unenforced", [])) >= {f"text.format.schema.{one}" for one in left_out}
    if left_out:
        body["text"] = {"format": form | {"strict": True}}
        check_error(http.post(RESPONSES, json=body), 400, param="text.format.schema")


def without(schema: Any, paths: list[str]) -> dict[str, Any]:
    """Return a schema without the keywords at some paths."""
    found = json.loads(json.dumps(schema))
    for path in paths:
        *steps, last = path.split(".")
        node = found
        for step in steps:
            node = node[step]
        del node[last]
    return dict(found)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize(("schema", "left_out"), LENIENT[:4])
def test_tools_that_are_not_strict_are_held_to(
    speakers: dict[CallForm, Speaker], schema: dict[str, Any], left_out: list[str], choice: Any
) -> None:
    for form in ("hermes", "qwen3_coder", "llama3_json"):
        speaker = scripted(speakers[form], "")
        tools: list[Any] = [*TOOLS, {"type": "function", "function": {"name": "g", "parameters": schema}}]
        tools[0], tools[1] = tools[1] | {"function": tools[1]["function"] | {"name": "f"}}, tools[0] | {"function": {"name": "g"}}
        answer = speaker.ask(tools=tools, tool_choice=choice)
        paths = [f"tools[0].function.parameters.{one}" for one in left_out]
        assert sorted(answer.model_extra["unenforced"]) == paths and speaker.engine.jobs[-1].params.grammar
        strict = [{"type": "function", "function": tools[0]["function"] | {"strict": True}}]
        body = CHAT | {"tools": strict, "tool_choice": "required"}
        check_error(httpx.post(f"{speaker.url}{CHATS}", json=body, timeout=60), 400, param="tools[0].function.parameters")


EVERYWHERE: list[dict[str, Any]] = [
    {"seed": -1}, {"seed": -(2**63)}, {"top_p": 0}, {"top_p": 0.0, "temperature": 1.0}, {"user": None}, {"seed": 2**63 - 1},
]  # fmt: skip
NO_OPS: list[dict[str, Any]] = [
    {"best_of": 1}, {"use_beam_search": False}, {"length_penalty": 1.0}, {"length_penalty": 1}, {"documents": None},
    {"truncate_prompt_tokens": None}, {"stop": []}, {"stop": None}, {"logit_bias": {}}, {"early_stopping": False},
    {"allowed_token_ids": None}, {"bad_words": []}, {"guided_decoding_backend": None}, {"spaces_between_special_tokens": True},
    {"logits_processors": None}, {"return_tokens_as_token_ids": False}, {"echo": False},
]  # fmt: skip
CHAT_NO_OPS: list[dict[str, Any]] = [
    {"verbosity": "medium"}, {"continue_final_message": False}, {"add_special_tokens": False}, {"chat_template": None},
    {"prompt_cache_retention": "in-memory"}, {"prompt_cache_retention": "in_memory"}, {"modalities": ["text"]},
    {"logprobs": False, "top_logprobs": 0}, {"response_format": {"type": "text"}}, {"tools": []}, {"metadata": {}},
    {"tool_choice": "auto"}, {"parallel_tool_calls": True}, {"service_tier": "default"}, {"functions": []},
    {"mm_processor_kwargs": None},
]  # fmt: skip
TAKEN: dict[str, list[dict[str, Any]]] = {
    CHATS: [*EVERYWHERE, *NO_OPS, *CHAT_NO_OPS], COMPLETIONS: [*EVERYWHERE, *NO_OPS, {"suffix": None}, {"logprobs": None}],
    RESPONSES: [*EVERYWHERE, {"text": {"verbosity": "medium"}}, {"truncation": "disabled"}, {"include": []}, {"reasoning": {}},
                {"reasoning": {"summary": None}}, {"top_logprobs": 0}, {"prompt_cache_retention": "in_memory"}, {"metadata": {}}],
}  # fmt: skip


@pytest.mark.parametrize(("path", "change"), [(path, change) for path, changes in TAKEN.items() for change in changes])
def test_values_that_are_allowed_or_ask_for_nothing(plain: httpx.Client, path: str, change: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = plain.post(path, json=BODIES[path] | change | {"stream": stream})
        assert answer.status_code == 200 and "error" not in answer.text.replace('"error":null', ""), answer.text


def test_values_that_ask_for_something_are_refused(http: httpx.Client) -> None:
    changes: list[dict[str, Any]] = [
        {"verbosity": "low"}, {"best_of": 2}, {"use_beam_search": True}, {"continue_final_message": True}, {"bad_words": ["a"]},
        {"length_penalty": 1.2}, {"chat_template": "x"}, {"prompt_cache_retention": "24h"},
    ]  # fmt: skip
    for change in changes:
        check_error(http.post(CHATS, json=CHAT | change), 400, param=next(iter(change)))
    greedy = http.post(COMPLETIONS, json=TEXT).json()["choices"][0]["text"]
    assert http.post(COMPLETIONS, json=TEXT | {"temperature": 2.0, "top_p": 0, "seed": -3}).json()["choices"][0]["text"] == greedy
    seeded = [http.post(COMPLETIONS, json=TEXT | {"temperature": 2.0, "seed": seed}).json()["choices"] for seed in (-1, -1)]
    assert seeded[0] == seeded[1]


ENCODED: dict[str, bytes] = {
    "gzip": gzip.compress(json.dumps(CHAT).encode()), "deflate": zlib.compress(json.dumps(CHAT).encode()), "zstd": b"(\xb5/\xfd",
    "br": b"\x8b", "GZIP": b"\x1f\x8b", "gzip, identity": b"{}",
}  # fmt: skip
BROKEN: list[bytes] = [
    '{"prompt": "é"}'.encode("latin-1"), b'{"max_tokens": ' + b"9" * 5000 + b"}", b'{"a":' * 5000 + b"1" + b"}" * 5000,
    gzip.compress(b"{}"), b"", b"{", b"[" * 200_000,
]  # fmt: skip


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS, RESPONSES, "/tokenize"])
def test_compressed_and_broken_bodies_are_named(plain: httpx.Client, path: str) -> None:
    for encoding, content in ENCODED.items():
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        answer = plain.post(path, content=content, headers=headers)
        check_error(answer, 415, "Content-Encoding", param="Content-Encoding", code="unsupported_content_encoding")
    for content in BROKEN:
        answer = plain.post(path, content=content, headers={"Content-Type": "application/json"})
        check_error(answer, 400, code="invalid_json")
        assert len(answer.json()["error"]["message"]) > 20
    headers = {"Content-Type": "application/json", "Content-Encoding": "identity"}
    body = BODIES.get(path, {"prompt": "a"})
    assert plain.post(path, content=json.dumps(body), headers=headers).status_code == 200


def test_a_text_of_the_wrong_kind_is_named_and_paths_may_end_in_a_slash(plain: httpx.Client) -> None:
    content = b'{"model": "circle", "input": "\\ud83d"}'
    answer = plain.post(RESPONSES, content=content, headers={"Content-Type": "application/json"})
    check_error(answer, 400, "surrogate", param="input")
    models = plain.get("/v1/models").json()
    assert plain.get("/v1/models/", follow_redirects=True).json() == models
    for path in (CHATS, COMPLETIONS, RESPONSES):
        answer = plain.post(f"{path}/", json=BODIES[path], follow_redirects=True)
        assert answer.status_code == 200, path
    assert plain.get("/v1/models/circle").json()["id"] == "circle"
