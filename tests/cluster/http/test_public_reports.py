"""Inputs of public bug reports about comparable servers: what models write, and what clients send; whole and streamed."""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import json
import operator
import zlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, SecretStr

from outrider.actors.description import Description
from outrider.cluster.cli.chat import ServerBackend
from outrider.cluster.http.answers.responses import ResponseBuilder
from outrider.cluster.http.api import Service
from outrider.cluster.serving.generation import GenerationJob
from outrider.decoding.request import FinishReason, StepOutput
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.measures.metrics import EngineCounts
from outrider.engine.text.chat_format import CallForm
from outrider.engine.text.grammar import lenient_schema
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
    read_stream,
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
    ("hermes", hermes(r'{"arguments": {"\udc00": "é"}, "name": "f"}'), r'{"\udc00": "é"}'),
    ("hermes", hermes(r'{"arguments": "{\"a\": \"\ud83d\"}", "name": "f"}'), CALLED),
    ("qwen3_coder", coder("l", f'["{HALF}"]'), rf'{{"l": ["{HALF}"]}}'),
    ("llama3_json", f'{{"parameters": {CALLED}, "name": "f"}}', CALLED),
    ("mistral", f'[TOOL_CALLS] [{{"arguments": {CALLED}, "name": "f"}}]', CALLED),
    # Types, and marks within values.
    ("qwen3_coder", coder("a", "42"), '{"a": "42"}'),
    ("qwen3_coder", coder("a", "echo '</tool_call>'"), '{"a": "echo \'</tool_call>\'"}'),
    ("qwen3_coder", coder("a", SEPARATORS).removeprefix("<tool_call>\n"), json.dumps({"a": SEPARATORS}, ensure_ascii=False)),
]


@pytest.mark.parametrize(("form", "text", "arguments"), WRITTEN)
def test_calls_are_valid_json(speakers: dict[CallForm, Speaker], form: CallForm, text: str, arguments: str) -> None:
    told = said_everywhere(scripted(speakers[form], text))
    assert told[1:] == ("", [("f", arguments)], "tool_calls")


def last_event(speaker: Speaker, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{speaker.url}{path}", json=body | {"stream": True}, timeout=60).raise_for_status()
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


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("arguments", ['{"', '{"a": "x"'])
def test_a_call_that_is_cut_has_the_reason(speakers: dict[CallForm, Speaker], arguments: str, reason: FinishReason) -> None:
    speaker = scripted(speakers["hermes"], f'<tool_call>{{"name": "f", "arguments": {arguments}', reason)
    assert said_everywhere(speaker)[2:] == ([("f", arguments)], reason)


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}} | more


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant"} | fields


RESULT = {"role": "tool", "tool_call_id": "1", "content": "ok"}
HISTORY: list[tuple[dict[str, Any], str]] = [
    # Arguments that were cut, are no JSON, are no object, hold half a pair; what a client has after adding up a stream.
    (assistant(tool_calls=[call('{"city": "Os')]), "[assistant]f{}"),
    (assistant(tool_calls=[call("")], content=""), "[assistant]f{}"),
    (assistant(tool_calls=[call('{"a": 1}', index=0)], content=None), '[assistant]f{"a": 1}'),
    # Messages as typed clients, LangChain, AutoGen and LiteLLM keep them.
    (assistant(), "[assistant]"),
    (assistant(content=None, tool_calls=None, function_call=None, refusal=None, audio=None, annotations=[]), "[assistant]"),
    (assistant(content="x", provider_specific_fields={"refusal": None}), "[assistant]x"),
    (assistant(content='{"a": 1}', parsed={"a": 1}), '[assistant]{"a": 1}'),
    (assistant(tool_calls=[call('{"a": 1}') | {"function": call('{"a": 1}')["function"] | {"parsed_arguments": {"a": 1}}}]),
     '[assistant]f{"a": 1}'),
    ({"role": "user", "name": "alice", "content": "x"}, "[user:alice]x"),
    (assistant(name="planner", content="x"), "[assistant:planner]x"),
    (RESULT | {"name": "f"}, "[tool:f]ok"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "shown"), HISTORY)
def test_history_is_taken_back(speakers: dict[CallForm, Speaker], message: dict[str, Any], shown: str) -> None:
    speaker = scripted(speakers["hermes"], "fine")
    messages = [*MESSAGES, message, RESULT]
    assert whole(speaker.ask(messages=messages)) == ("", "fine", [], "stop")
    assert speaker.streamed(messages=messages)[0][1] == "fine"
    assert speaker.prompt(messages=messages)[0] == f"[user]hi{shown}[tool]ok>"


OWN_CALL = {"type": "function_call", "call_id": "1", "name": "f"}
TYPED = {"type": "output_text", "text": "x", "annotations": [], "logprobs": None, "parsed": {"a": 1}}
ITEMS: list[tuple[dict[str, Any], str]] = [
    (OWN_CALL | {"arguments": '{"city": "Os', "status": "incomplete"}, "f{}"), (OWN_CALL | {"arguments": "no"}, "f{}"),
    (OWN_CALL | {"arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}, 'f{"a": 1}'),
    ({"type": "message", "role": "assistant", "content": [TYPED]}, "x"),
]  # fmt: skip


@pytest.mark.parametrize(("item", "shown"), ITEMS)
def test_items_are_taken_back(speakers: dict[CallForm, Speaker], item: dict[str, Any], shown: str) -> None:
    speaker = scripted(speakers["hermes"], "fine")
    output = {"type": "function_call_output", "call_id": "1", "output": "ok"}
    given: list[Any] = [*MESSAGES, item, *([output] if item["type"] == "function_call" else [])]
    assert speaker.client.responses.create(model="circle", input=given).output_text == "fine"
    assert f"[user]hi[assistant]{shown}" in speaker.tokenizer.decode(speaker.engine.jobs[-1].prompt_ids)


class Place(BaseModel):
    """Structured answer of a client, and arguments of its tool."""

    a: str


def test_clients_go_on_with_what_they_keep(speakers: dict[CallForm, Speaker]) -> None:
    """OpenAI's SDK and LangChain, unchanged: typed answers, whole and cut calls, calls that failed."""
    speaker = scripted(speakers["hermes"], '{"a": "é"}')
    chats, asked = speaker.client.chat.completions, [HumanMessage("hi", name="alice")]
    langchain = ChatOpenAI(base_url=f"{speaker.url}/v1", api_key=SecretStr("none"), model="circle", max_retries=0)
    message: Any = chats.parse(model="circle", messages=MESSAGES, response_format=Place).choices[0].message
    again = chats.parse(model="circle", messages=[*MESSAGES, message, *MESSAGES], response_format=Place)
    assert message.parsed == again.choices[0].message.parsed == Place(a="é")
    output: Any = speaker.client.responses.parse(model="circle", input="hi", text_format=Place).output
    assert speaker.client.responses.create(model="circle", input=[*MESSAGES, *output, *MESSAGES]).output_text == '{"a": "é"}'
    assert langchain.with_structured_output(Place, method="json_schema").invoke(asked) == Place(a="é")
    tools = [pydantic_function_tool(Place)]
    called = hermes('{"name": "Place", "arguments": {"a": "é"}}')
    for text, reason in ((called, FinishReason.STOP), (called[:53], FinishReason.LENGTH)):
        scripted(speaker, text, reason)
        message = chats.create(model="circle", messages=MESSAGES, tools=tools).choices[0].message
        bound = langchain.bind_tools([Place])
        chunk, *chunks = bound.stream(asked)
        turns = [bound.invoke(asked), functools.reduce(operator.add, chunks, chunk)]
        scripted(speaker, "fine")
        failed: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "it failed"}
        answer = chats.create(model="circle", messages=[*MESSAGES, message, failed], tools=tools)
        assert answer.choices[0].message.content == "fine"
        for turn in turns:
            (one,) = turn.tool_calls or turn.invalid_tool_calls
            told = ToolMessage("it failed", tool_call_id=one["id"], status="error", name="Place")
            assert bound.invoke([*asked, turn, told]).content == "fine"


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


LENIENT: list[tuple[dict[str, Any], list[str]]] = [
    (closed(v={"type": "array", "items": {"enum": ["x"]}, "uniqueItems": True, "maxItems": 2}), ["properties.v.uniqueItems"]),
    (closed(v={"type": "integer", "maximum": 9, "minimum": 1, "not": {"const": 3}}), ["properties.v.not"]),
    (closed(v={"type": "string", "maxLength": 3, "format": "int64", "pattern": "(?=a)b"}),
     ["properties.v.format", "properties.v.pattern"]),
    (closed(v={"enum": ["x", "y"]}) | {"propertyNames": {"pattern": "^v"}}, ["propertyNames"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "left_out"), LENIENT)
def test_formats_that_are_not_strict_are_held_to(http: httpx.Client, schema: dict[str, Any], left_out: list[str]) -> None:
    paths = [f"response_format.json_schema.schema.{one}" for one in left_out]
    for path, strict in itertools.product((CHATS, COMPLETIONS), ({}, {"strict": False}, {"strict": None})):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **strict}}
        asked = BODIES[path] | {"response_format": form, "max_tokens": 200, "temperature": 1.0, "seed": 1}
        answer = http.post(path, json=asked).raise_for_status().json()
        (choice,) = answer["choices"]
        assert sorted(answer["unenforced"]) == paths and choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice.get("text") or choice["message"]["content"]), lenient_schema(schema)[0])
        chunks = read_stream(http, path, asked)
        assert [chunk["unenforced"] for chunk in chunks if "unenforced" in chunk] == [answer["unenforced"]]
    own: dict[str, Any] = {"type": "json_schema", "name": "a", "schema": schema}
    body = BODIES[RESPONSES] | {"max_output_tokens": 9, "text": {"format": own}}
    found = http.post(RESPONSES, json=body).raise_for_status().json()["unenforced"]
    assert sorted(found) == [f"text.format.schema.{one}" for one in left_out]
    check_error(http.post(RESPONSES, json=body | {"text": {"format": own | {"strict": True}}}), 400, param="text.format.schema")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
@pytest.mark.parametrize(("schema", "left_out"), LENIENT)
def test_tools_that_are_not_strict_are_held_to(
    speakers: dict[CallForm, Speaker], schema: dict[str, Any], left_out: list[str], choice: Any
) -> None:
    function = {"name": "g", "parameters": schema}
    for form in ("hermes", "qwen3_coder", "llama3_json"):
        speaker = scripted(speakers[form], "")
        answer = speaker.ask(tools=[*TOOLS, {"type": "function", "function": function}], tool_choice=choice)
        paths = [f"tools[1].function.parameters.{one}" for one in left_out]
        assert sorted(answer.model_extra["unenforced"]) == paths and speaker.engine.jobs[-1].params.grammar
        body = CHAT | {"tools": [{"type": "function", "function": function | {"strict": True}}], "tool_choice": "required"}
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
        {"verbosity": "low"}, {"best_of": 2}, {"use_beam_search": True},
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
    gzip.compress(b"{}"), b"", b"{", b"[" * 20_000,
]  # fmt: skip


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS, RESPONSES, "/tokenize"])
def test_compressed_and_broken_bodies_are_named(plain: httpx.Client, path: str) -> None:
    for encoding, content in ENCODED.items():
        answer = plain.post(path, content=content, headers={"Content-Type": "application/json", "Content-Encoding": encoding})
        check_error(answer, 415, "Content-Encoding", param="Content-Encoding", code="unsupported_content_encoding")
    file = plain.post("/v1/documents/text", content=b"a", headers={"Content-Encoding": "gzip"})
    check_error(file, 415, param="Content-Encoding")
    for content in BROKEN:
        check_error(plain.post(path, content=content, headers={"Content-Type": "application/json"}), 400, code="invalid_json")
    headers = {"Content-Type": "application/json", "Content-Encoding": "identity"}
    body = BODIES.get(path, {"prompt": "a"})
    assert plain.post(path, content=json.dumps(body), headers=headers).status_code == 200


def test_a_text_of_the_wrong_kind_is_named_and_paths_may_end_in_a_slash(plain: httpx.Client) -> None:
    content = b'{"model": "circle", "input": "\\ud83d"}'
    answer = plain.post(RESPONSES, content=content, headers={"Content-Type": "application/json"})
    check_error(answer, 400, "surrogate", param="input")
    assert plain.get("/v1/models/", follow_redirects=True).json() == plain.get("/v1/models").json()
    for path, body in BODIES.items():
        assert plain.post(f"{path}/", json=body, follow_redirects=True).status_code == 200, path
