"""Tools: shown to the model by its template, and what it calls told to the client, as a whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.circle import CHATS, MESSAGES, Speaker, check_error, save_saying, speaking

LOOK = '{"name": "look", "arguments": {"at": "é"}}'
CALL = f"<tool_call>{LOOK}</tool_call>"
MARKS = ["<tool_call>", LOOK, "</tool_call>"]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}write calls as <tool_call>{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}:{{ call.function.arguments.at }}{% endfor %}"
    "{% if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def caller(circle_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    """The circle, whose model says a call and then ends where its circle would begin again."""
    with speaking(save_saying(circle_model, tmp_path_factory.mktemp("models") / "calling", MARKS, TEMPLATE)) as speaker:
        yield speaker


def ask(caller: Speaker, **changes: Any) -> Any:
    return caller.ask(**({"tools": TOOLS} | changes))


@pytest.mark.parametrize("speculation", [{}, {"max_draft_tokens": 0}])
def test_a_call(caller: Speaker, speculation: dict[str, Any]) -> None:
    extra = {"speculation": speculation, "reference_documents": [CALL]}
    for choice in ask(caller, n=2, extra_body=extra).choices:
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "look", {"at": "é"})
        assert call.id.startswith("call_")
    assert caller.streamed(tools=TOOLS, extra_body=extra)[0] == ("", "", [("look", '{"at": "é"}')], "tool_calls")
    asked: dict[str, Any] = {"model": "calling", "messages": MESSAGES, "temperature": 0, "tools": TOOLS, "max_tokens": 30}
    with caller.client.chat.completions.stream(**asked) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (told,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert "".join(deltas) == told.function.arguments == '{"at": "é"}'


def test_logprobs_come_for_the_tokens_of_calls_too(caller: Speaker) -> None:
    whole = ask(caller, logprobs=True)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 4
    chunks = [chunk.choices[0].logprobs for chunk in ask(caller, logprobs=True, stream=True)]
    assert [entry.token for one in chunks if one for entry in one.content] == [*MARKS, "</s>"]


def test_without_tools_it_is_text(caller: Speaker) -> None:
    for changes in ({"tool_choice": "none"}, {"tools": []}):
        answer = ask(caller, **changes)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")
        assert answer.choices[0].message.tool_calls is None
        assert answer.usage.prompt_tokens == len("[user]hi>")


def test_the_template_shows_tools_calls_and_their_answers(caller: Speaker) -> None:
    first = ask(caller).choices[0].message
    messages = [*MESSAGES, first.model_dump(), {"role": "tool", "tool_call_id": "c1", "content": "blue"}]
    shown, count = caller.prompt(messages=messages, tools=TOOLS)
    assert shown.endswith("write calls as <tool_call>[user]hi[assistant]<tool_call>look:é[tool]blue(c1)>")
    assert '"name": "look"' in shown and '"parameters"' in shown
    assert ask(caller, messages=messages).usage.prompt_tokens == count


PLACES = {"type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"], "additionalProperties": False}
PLACES |= {"$defs": {"place": {"enum": ["here", "there"]}}}
FIND: dict[str, Any] = {"type": "function", "function": {"name": "find", "parameters": PLACES}}
LIST = {"type": "array"}
NAMED = {"type": "function", "function": {"name": "find"}}


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    assert not choice.message.content, choice
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [{}, {"max_draft_tokens": 0}])
def test_a_call_that_must_come(caller: Speaker, speculation: dict[str, Any]) -> None:
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


def test_strict_tools_bind_calls_and_leave_text_alone(caller: Speaker) -> None:
    strict = {"type": "function", "function": {**FIND["function"], "name": "look", "strict": True}}
    bound = ask(caller, tools=[strict], max_tokens=300).choices[0]
    calls = bound.message.tool_calls
    assert bound.finish_reason == "length" and len(calls) > 1  # the last one is cut
    assert all(json.loads(call.function.arguments)["at"] in ("here", "there") for call in calls[:-1])
    free = ask(caller, tools=[strict], max_tokens=6, logit_bias={"2": -100, "3": -100, "4": -100}).choices[0]
    assert free.finish_reason == "length" and len(free.message.content) > 3


COSTLY = [
    {"type": "integer", "multipleOf": 9999991},
    {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrst"]},
]  # take too long to compile


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [FIND, FIND]}, "tools"),
        ({"tool_choice": "required", "tools": [tool("f", LIST)]}, "tools[0].function.parameters"),
        *(
            (
                {
                    "tools": [*TOOLS, tool("costly", {"type": "object", "properties": {"p": schema}, "required": ["p"]})],
                    "tool_choice": "required",
                    "stream": stream,
                },
                "tools[1].function.parameters",
            )
            for schema, stream in zip(COSTLY, (False, True), strict=True)
        ),
    ],
)
def test_calls_that_cannot_be_bound(caller: Speaker, change: dict[str, Any], param: str) -> None:
    body = {"model": "calling", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 4} | change
    check_error(httpx.post(f"{caller.url}{CHATS}", json=body, timeout=60), 400, param=param)
