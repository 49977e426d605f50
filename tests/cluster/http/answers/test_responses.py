"""OpenAI's Responses API: the stock client's objects and events, the loop of tools, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from outrider.cluster.admission.controller import AdmissionOptions
from outrider.cluster.http.answers import stream_guard
from outrider.cluster.http.answers.stream_guard import StreamGuard
from outrider.cluster.http.api import Service
from outrider.cluster.http.types.responses import ResponsesRequest
from outrider.configs.slices import LimitsOptions, ServerOptions
from tests.cluster.circle import CHATS, Server, Speaker, check_error, client_of, save_saying, speaking

RESPONSES = "/v1/responses"
CALL = '<tool_call>{"name": "add", "arguments": {"a": "é"}}</tool_call>'
SAID = ["<think>", "Two and ", "two.", "</think>", "\n\n", "Let me ", "add. ", "<tool_call>", CALL[11:-12], "</tool_call>"]
THOUGHT, TEXT = "Two and two.", "Let me add."
# The model answers what a tool said without a call: the prompt ends with another character.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}write <tool_call>{% endif %}{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments.a }}/{{ call.id }}{% endfor %}"
    "{% if message.tool_call_id %}/{{ message.tool_call_id }}{% endif %}{% endfor %}"
    "{% if messages[-1].role == 'tool' %}s{% else %}>{% endif %}{# <think> </think> #}"
)
TOOL: Any = {
    "type": "function", "name": "add", "description": "Adds.", "strict": False,
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}  # fmt: skip
BODY: dict[str, Any] = {"model": "saying", "input": "hi", "temperature": 0, "max_output_tokens": 60}
ANY_SPECULATION: list[dict[str, Any]] = [{}, {"max_draft_tokens": 0}]


@pytest.fixture(scope="module")
def saying(circle_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    """Thinks, says something, and calls a tool."""
    with speaking(save_saying(circle_model, tmp_path_factory.mktemp("models") / "saying", SAID, TEMPLATE)) as speaker:
        yield speaker


@pytest.fixture
def sayer(saying: Speaker) -> OpenAI:
    return saying.client


def ask(client: OpenAI, **changes: Any) -> Any:
    return client.responses.create(**(BODY | changes))


def said(response: Response) -> list[tuple[str, ...]]:
    """The items of an answer."""
    found: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, str(item.status), item.name, item.arguments))
        else:
            assert item.type in ("message", "reasoning")
            (part,) = item.content or ()  # type: ignore[union-attr]
            found.append((item.type, str(item.status), part.text))  # type: ignore[union-attr]
    return found


FULL = [("reasoning", "completed", THOUGHT), ("message", "completed", TEXT)]
ADDED = ("function_call", "completed", "add", '{"a": "é"}')


@pytest.mark.parametrize("speculation", ANY_SPECULATION)
def test_an_answer_of_items(sayer: OpenAI, speculation: dict[str, Any]) -> None:
    extra = {"speculation": speculation, "reference_documents": ["".join(SAID)]}
    answer = ask(sayer, tools=[TOOL], metadata={"of": "me"}, instructions="Be brief.", extra_body=extra)
    assert said(answer) == [*FULL, ADDED] and answer.output_text == TEXT
    assert (answer.status, answer.object, answer.model) == ("completed", "response", "saying")
    assert (answer.metadata, answer.instructions, answer.tools[0].name) == ({"of": "me"}, "Be brief.", "add")
    assert answer.id.startswith("resp_") and answer.error is None and answer.incomplete_details is None
    usage = answer.usage
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (len(SAID) + 1, 4)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 0


def text_events(kind: str, index: int, deltas: list[str]) -> list[tuple[str, int]]:
    name = "reasoning_text" if kind == "reasoning" else "output_text"
    kinds = ["output_item.added", "content_part.added", *[f"{name}.delta"] * len(deltas)]
    return [(f"response.{one}", index) for one in (*kinds, f"{name}.done", "content_part.done", "output_item.done")]


@pytest.mark.parametrize("speculation", ANY_SPECULATION)
def test_events_of_a_stream(sayer: OpenAI, speculation: dict[str, Any]) -> None:
    extra = {"speculation": speculation, "reference_documents": ["".join(SAID)]}
    events: list[Any] = list(ask(sayer, tools=[TOOL], stream=True, extra_body=extra))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert ("".join(thoughts), "".join(texts)) == (THOUGHT, TEXT)
    calls = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert [(event.type, getattr(event, "output_index", None)) for event in events] == [
        ("response.created", None), ("response.in_progress", None),
        *text_events("reasoning", 0, thoughts), *text_events("message", 1, texts),
        *((f"response.{name}", 2) for name in calls),
        ("response.completed", None),
    ]  # fmt: skip
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert (done.name, done.arguments) == ("add", ADDED[-1])
    last = events[-1].response
    assert said(last) == [*FULL, ADDED] and last.usage.output_tokens == len(SAID) + 1
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert items == last.output
    for event in events[2:-1]:
        assert getattr(event, "item_id", None) in (None, last.output[event.output_index].id)
    with sayer.responses.stream(**BODY, tools=[TOOL], extra_body=extra) as stream:
        assert said(stream.get_final_response()) == said(last)


@pytest.mark.parametrize("speculation", ANY_SPECULATION)
@pytest.mark.parametrize(
    ("cut", "items"),
    [
        (1, [("message", "incomplete", "")]),
        (2, [("reasoning", "incomplete", "Two and")]),
        (6, [("reasoning", "completed", THOUGHT), ("message", "incomplete", "Let me")]),
        (8, [("reasoning", "completed", THOUGHT), ("message", "incomplete", "Let me add. <tool_call>")]),
    ],
)
def test_an_answer_that_is_cut(sayer: OpenAI, speculation: dict[str, Any], cut: int, items: list[Any]) -> None:
    extra = {"speculation": speculation, "reference_documents": ["".join(SAID)]}
    options = {"tools": [TOOL], "max_output_tokens": cut, "extra_body": extra}
    whole, events = ask(sayer, **options), list(ask(sayer, stream=True, **options))
    assert events[-1].type == "response.incomplete"
    for answer in (whole, events[-1].response):
        assert [(*item[:-1], item[-1].rstrip()) for item in said(answer)] == items
        assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_the_loop_of_a_tool(sayer: OpenAI, saying: Speaker, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]}]
    first: Any = ask(sayer, input=items, tools=[TOOL], stream=stream)
    first = list(first)[-1].response if stream else first
    items += first.output
    call = first.output[-1]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "blue"})
    second = ask(sayer, input=items, tools=[TOOL], instructions="Be brief.")
    assert said(second) == [("message", "completed", "tuvw.")]
    prompt = saying.tokenizer.decode(saying.engine.jobs[-1].prompt_ids)
    history = f"[user]hi[assistant]({THOUGHT}){TEXT}add:é/{call.call_id}[tool]blue/{call.call_id}s"
    assert prompt.endswith(f"[system]Be brief.{history}")


def test_one_system_message_goes_first(sayer: OpenAI, saying: Speaker) -> None:
    items: Any = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hi", "type": "message"}]
    ask(sayer, input=items, instructions="Be brief.")
    assert saying.tokenizer.decode(saying.engine.jobs[-1].prompt_ids) == "[system]Be brief.\n\nBe kind.[user]hi>"


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "extra_body": {"seed": 4}}])
def test_the_form_of_the_answer(sayer: OpenAI, options: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    outputs = set()
    for speculation in ANY_SPECULATION:
        extra = {"speculation": speculation, **options.get("extra_body", {})}
        answer = ask(sayer, text=form, max_output_tokens=400, **options | {"extra_body": extra})
        events = list(ask(sayer, text=form, max_output_tokens=400, stream=True, **options | {"extra_body": extra}))
        assert said(answer) == said(events[-1].response)
        if answer.status == "completed":
            assert json.loads(answer.output_text)["a"] in (1, 2)
        outputs.add(answer.output_text)
    assert len(outputs) == 1 and answer.text.format.type == "json_schema"
    assert ask(sayer, text={"format": {"type": "text"}}).output_text.startswith(TEXT)


def test_a_call_that_must_come(sayer: OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    strict = TOOL | {"strict": True, "parameters": parameters}
    for choice in ("required", {"type": "function", "name": "add"}):
        answer = ask(sayer, tools=[strict], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=300)
        kinds = [item.type for item in answer.output]
        assert kinds == ["reasoning", "function_call"] and json.loads(answer.output[-1].arguments) == {"a": "x"}
    plain = ask(sayer, tools=[TOOL], tool_choice="none")
    assert plain.output_text == f"{TEXT} {CALL}"


def test_what_the_extensions_tell(sayer: OpenAI) -> None:
    extra: dict[str, Any] = {"speculation": {"report": True}, "top_k": 1, "include_reasoning": False}
    for stream in (False, True):
        answer: Any = ask(sayer, stream=stream, extra_body=extra)
        answer = list(answer)[-1].response if stream else answer
        tokens = [token["text"] for step in answer.speculation["steps"] for token in step["tokens"]]
        assert "".join(tokens) == "".join(SAID) and answer.lossless
        assert [item.type for item in answer.output] == ["message"]
        assert answer.usage.output_tokens_details.reasoning_tokens == 4


def test_lang_chain(saying: Speaker) -> None:
    langchain = pytest.importorskip("langchain_openai")
    arguments: dict[str, Any] = {"model": "saying", "base_url": f"{saying.url}/v1", "api_key": "none", "use_responses_api": True}
    model = langchain.ChatOpenAI(**arguments, temperature=0, max_retries=0)
    with_tool = model.bind_tools(
        [{"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters")}}]
    )
    answer = with_tool.invoke("hi")
    assert answer.text == TEXT and answer.tool_calls[0]["args"] == {"a": "é"}
    chunks = list(with_tool.stream("hi"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.text == TEXT and [call["args"] for call in whole.tool_calls] == [{"a": "é"}]
    for first in (answer, whole):
        told = {"role": "tool", "tool_call_id": first.tool_calls[0]["id"], "content": "blue"}
        assert with_tool.invoke([{"role": "user", "content": "hi"}, first, told]).text == "tuvw."


# By the field that the error names: its wrong values, or those of the field that holds it.
WRONG: dict[str, list[Any]] = {
    "previous_response_id": ["resp_1"],
    "store": [True],
    "input": [[], 3, [{"role": "robot", "content": "a"}], "a" * 4000],
    "input[0]": [[{"type": "item_reference", "id": "x"}]],
    "input[0].content[0].type": [[{"role": "user", "content": [{"type": "input_image"}]}]],
    "tools[0].type": [[{"type": "web_search"}]],
    "tools[0].parameters": [[TOOL | {"parameters": {"type": "object", "not": {}}, "strict": True}]],
    "tool_choice": ["required", {"type": "function", "name": "no"}],
    "text.format.schema": [
        {"format": {"type": "json_schema", "name": "n"}},
        {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}, "strict": True}},
    ],
    "text.verbosity": [{"verbosity": "low"}],
    "reasoning.effort": [{"effort": "high"}],
    "reasoning.summary": [{"summary": "auto"}],
    "chat_template_kwargs.depth": [{"depth": 3}],
    "include": [["message.output_text.logprobs"]],
    "max_output_tokens": [5000, 0],
    "max_tokens": [3],
    "min_tokens": [90],
    "messages": [[]],
    "max_output_token": [3],
    "metadata.a": [{"a": 3}],
    "background": [True],
    "stream_options": [{"include_obfuscation": True}],
}
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL | {"parameters": {"type": "array"}}], "tool_choice": "required"}, "tools[0].parameters"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
]


def test_wrong_fields(saying: Speaker) -> None:
    alone = [({re.split(r"[.\[]", param)[0]: value}, param) for param, values in WRONG.items() for value in values]
    for change, param in [*alone, *TOGETHER]:
        check_error(httpx.post(f"{saying.url}{RESPONSES}", json=BODY | change, timeout=60), 400, param=param)


def test_other_refusals(saying: Speaker, sayer: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        ask(sayer, model="gpt-9")
    with pytest.raises(openai.NotFoundError, match="does not support the Embeddings API"):
        sayer.embeddings.create(model="saying", input="hi")
    document = httpx.get(f"{saying.url}/openapi.json", timeout=60).json()
    body = document["paths"][RESPONSES]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].endswith("/ResponsesRequest") and "ResponseObject" in document["components"]["schemas"]


def test_limits_and_deadlines_hold(saying: Speaker) -> None:
    options = AdmissionOptions(limits=LimitsOptions(max_output_tokens=20))
    with client_of(Service(saying.engine, saying.tokenizer, admission=options)) as client:
        check_error(client.post(RESPONSES, json=BODY), 400, "at most 20", param="max_output_tokens")
        late = BODY | {"max_output_tokens": 20, "timeout": 1e-6}
        check_error(client.post(RESPONSES, json=late), 504, "timeout", code="deadline_exceeded")


@pytest.mark.parametrize("guard", ["pad", "cadence"])
def test_a_guarded_stream(saying: Speaker, guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_guard, "PERIOD_S", 0.005)
    server = ServerOptions(stream_guard=guard)
    with client_of(Service(saying.engine, saying.tokenizer, guard=StreamGuard(server))) as client:
        wire = client.post(RESPONSES, json=BODY | {"stream": True}).raise_for_status().text
        events = [event + "\n\n" for event in wire.split("\n\n")[:-1]]
        assert guard != "pad" or all(len(event.encode()) % 512 == 0 for event in events)
        found = [json.loads(event.split("data: ", 1)[1]) for event in events]
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        assert found[-1]["type"] == "response.completed"
        texts = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
        assert "".join(texts) == f"{TEXT} {CALL}"
        check_error(
            client.post(RESPONSES, json=BODY | {"speculation": {"report": True}}), 400, "stream_guard", param="speculation.report"
        )


def test_a_stream_that_breaks_off_says_so(saying: Speaker) -> None:
    options = AdmissionOptions(limits=LimitsOptions(request_timeout_s=0.3))
    with client_of(Service(saying.engine, saying.tokenizer, admission=options)) as client:
        body = BODY | {
            "input": [{"role": "user", "content": "hi"}],
            "stream": True,
            "max_output_tokens": 2000,
            "ignore_eos": True,
        }
        wire = client.post(RESPONSES, json=body).raise_for_status().text
    last = json.loads(wire.rstrip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "timeout" in last["response"]["error"]["message"] and last["response"]["usage"]["output_tokens"] > 0


def test_who_goes_away_frees_the_slot(saying: Speaker) -> None:
    body = BODY | {"stream": True, "max_output_tokens": 2000, "ignore_eos": True}
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{saying.url}{RESPONSES}", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: response.created" and Server(saying.url).load()[0] == 1
    Server(saying.url).becomes_idle()


def test_the_chat_of_a_request_is_that_of_a_chat(saying: Speaker) -> None:
    chat = {"model": "saying", "messages": [{"role": "user", "content": "hi"}], "temperature": 1, "seed": 7, "max_tokens": 40}
    answer = httpx.post(f"{saying.url}{CHATS}", json=chat, timeout=60).raise_for_status().json()["choices"][0]["message"]
    body = {"model": "saying", "input": "hi", "temperature": 1, "seed": 7, "max_output_tokens": 40}
    items = httpx.post(f"{saying.url}{RESPONSES}", json=body, timeout=60).raise_for_status().json()["output"]
    texts = {item["type"]: item["content"][0]["text"] for item in items}
    assert texts.get("message") == answer["content"] and texts.get("reasoning") == answer.get("reasoning")
    assert ResponsesRequest.model_validate(body).chat.most_tokens == ("max_completion_tokens", 40)
