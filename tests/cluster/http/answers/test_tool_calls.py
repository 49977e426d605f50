"""Tools: shown to the model by its template, and what it calls told to the client, as a whole and streamed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from transformers import PreTrainedTokenizerFast

from cluster.http.answers.tool_calls import Call, ToolCallReader
from cluster.http.api import Service
from engine.text.chat_format import CallForm
from tests.cluster.circle import MESSAGES, local_engine, save_saying, served

LOOK = '{"name": "look", "arguments": {"at": "é"}}'
CALL = f"<tool_call>{LOOK}</tool_call>"
MARKS = ["<tool_call>", LOOK, "</tool_call>"]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}write calls as <tool_call>{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}:{{ call.function.arguments.at }}{% endfor %}"
    "{% if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
SCHEMAS = {"f": {"properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def read(pieces: list[str], most: int | None = None, form: CallForm = "hermes") -> list[str | Call]:
    """What comes of a text, neighbouring pieces joined."""
    reader = ToolCallReader(form, most, SCHEMAS)
    found = list(itertools.chain(*map(reader.push, pieces), reader.finish()))
    assert all(found), "an empty piece"
    joined: list[str | Call] = []
    for part in found:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plain", ["plain"]),
        (" <tool", [" <tool"]),
        ("a < b\n", ["a < b\n"]),
        (CALL, [Call("look", '{"at": "é"}')]),
        (f"Let me see.\n{CALL}\n{CALL}\n", ["Let me see.", Call("look", '{"at": "é"}'), Call("look", '{"at": "é"}')]),
        (f"{CALL} done", [Call("look", '{"at": "é"}'), " done"]),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', [Call("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [Call("f", "{}")]),
        ("x <tool_call>no json</tool_call> y", ["x <tool_call>no json</tool_call> y"]),
        ('x <tool_call>{"name": 3}</tool_call>', ['x <tool_call>{"name": 3}</tool_call>']),
        ('x <tool_call>{"name": "f"}', ['x <tool_call>{"name": "f"}']),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", ["<tool_call>" + "[" * 100_000 + "</tool_call>"]),
    ],
)
def test_calls_are_taken_out_of_a_text(text: str, parts: list[str | Call]) -> None:
    assert read([text]) == parts
    if len(text) < 1000:
        assert read(list(text)) == parts


def test_no_more_calls_than_asked_for() -> None:
    assert read([CALL + CALL], most=1) == [Call("look", '{"at": "é"}')]


@given(st.lists(st.sampled_from([*MARKS, " ", "\n", "<", "<tool", "x", '{"name": "f"}']), max_size=10), st.data())
def test_where_a_text_is_cut_does_not_matter(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert read(pieces) == read([text])
    if not any(isinstance(part, Call) for part in read([text])):
        assert read([text]) == ([text] if text else [])


@pytest.fixture(scope="module")
def calling_model(circle_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The circle, whose model says a call and then ends where its circle would begin again."""
    return save_saying(circle_model, tmp_path_factory.mktemp("models") / "calling", MARKS, TEMPLATE)


@pytest.fixture(scope="module")
def calling(calling_model: Path) -> Iterator[str]:
    """The address of a server with this model."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(calling_model)
    with local_engine(calling_model, max_model_len=2048) as engine, served(Service(engine, tokenizer)) as url:
        yield url


@pytest.fixture
def caller(calling: str) -> Iterator[OpenAI]:
    """OpenAI's client of that server."""
    with OpenAI(base_url=f"{calling}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: OpenAI, **changes: Any) -> Any:
    fields: dict[str, Any] = {"model": "calling", "messages": MESSAGES, "max_tokens": 30, "temperature": 0, "tools": TOOLS}
    return client.chat.completions.create(**(fields | changes))


@pytest.mark.parametrize("speculation", [{}, {"max_draft_tokens": 0}])
def test_a_call_is_told(caller: OpenAI, speculation: dict[str, Any]) -> None:
    extra = {"speculation": speculation, "reference_documents": [CALL]}
    for choice in ask(caller, n=2, extra_body=extra).choices:
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "look", {"at": "é"})
        assert call.id.startswith("call_")
    calls, reasons = [], []
    for chunk in ask(caller, stream=True, extra_body=extra):
        assert not chunk.choices[0].delta.content
        calls += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [(0, "look", '{"at": "é"}')]
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])


def test_logprobs_come_for_the_tokens_of_calls_too(caller: OpenAI) -> None:
    whole = ask(caller, logprobs=True)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 4
    chunks = [chunk.choices[0].logprobs for chunk in ask(caller, logprobs=True, stream=True)]
    assert [entry.token for one in chunks if one for entry in one.content] == [*MARKS, "</s>"]


def test_without_tools_it_is_text(caller: OpenAI) -> None:
    for changes in ({"tool_choice": "none"}, {"tools": []}):
        answer = ask(caller, **changes)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
        assert answer.choices[0].message.tool_calls is None
        assert answer.usage.prompt_tokens == len("[user]hi>")


def test_the_template_shows_tools_calls_and_their_answers(caller: OpenAI, calling: str) -> None:
    first = ask(caller).choices[0].message
    messages = [*MESSAGES, first.model_dump(), {"role": "tool", "tool_call_id": "c1", "content": "blue"}]
    body = {"messages": messages, "tools": TOOLS}
    tokens = httpx.post(f"{calling}/tokenize", json=body, timeout=60).raise_for_status().json()["tokens"]
    shown = httpx.post(f"{calling}/detokenize", json={"tokens": tokens}, timeout=60).raise_for_status().json()["prompt"]
    assert shown.endswith("write calls as <tool_call>[user]hi[assistant]<tool_call>look:é[tool]blue(c1)>")
    assert '"name": "look"' in shown and '"parameters"' in shown
    assert ask(caller, messages=messages).usage.prompt_tokens == len(tokens)


PLACES = {"type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"], "additionalProperties": False}
PLACES |= {"$defs": {"place": {"enum": ["here", "there"]}}}
FIND: dict[str, Any] = {"type": "function", "function": {"name": "find", "parameters": PLACES}}
LIST = {"type": "array"}
NAMED = {"type": "function", "function": {"name": "find"}}


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    assert not choice.message.content, choice
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


@pytest.mark.parametrize("speculation", [{}, {"max_draft_tokens": 0}])
def test_a_call_that_must_come(caller: OpenAI, speculation: dict[str, Any]) -> None:
    extra = {"speculation": speculation, "reference_documents": [CALL]}
    tools = [*TOOLS, FIND]
    for options in ({"temperature": 0}, {"temperature": 1, "seed": 3}):
        single = {"tools": tools, "parallel_tool_calls": False, "max_tokens": 300, **options, "extra_body": extra}
        required = ask(caller, tool_choice="required", **single).choices[0]
        assert required.finish_reason == "tool_calls" and {name for name, _ in calls_of(required)} <= {"look", "find"}
        named = ask(caller, tool_choice=NAMED, **single).choices[0]
        ((name, arguments),) = calls_of(named)
        assert name == "find" and arguments in ({"at": "here"}, {"at": "there"})
        assert ask(caller, tool_choice="auto", **single).choices[0].finish_reason in ("tool_calls", "length", "stop")


def test_strict_tools_bind_calls_and_leave_text_alone(caller: OpenAI) -> None:
    strict = {"type": "function", "function": {**FIND["function"], "name": "look", "strict": True}}
    calls = ask(caller, tools=[strict], max_tokens=300).choices[0].message.tool_calls
    assert calls and all(json.loads(call.function.arguments)["at"] in ("here", "there") for call in calls)
    free = ask(caller, tools=[strict], max_tokens=6, logit_bias={"2": -100, "3": -100, "4": -100}).choices[0]
    assert free.finish_reason == "length" and len(free.message.content) > 3


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", ["no tool 'no'"]),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format", ["cannot both"]),
        ({"tool_choice": "required", "tools": [FIND, FIND]}, "tools", ["same name"]),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": LIST}}]},
            "tools[0].function.parameters",
            ["object", "array"],
        ),
    ],
)
def test_calls_that_cannot_be_bound(calling: str, change: dict[str, Any], param: str, words: list[str]) -> None:
    body = {"model": "calling", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 4} | change
    response = httpx.post(f"{calling}/v1/chat/completions", json=body, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert all(word in error["message"] for word in words), error
