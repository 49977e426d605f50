"""Anthropic's Messages API: the stock client's objects and events, the loop of tools, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from outrider.cache_service.namespace import hash_key
from outrider.cluster.http.answers.stream_guard import StreamGuard
from outrider.cluster.http.api import Service
from outrider.configs.slices import ServerOptions, TenancyOptions, TenantOptions
from tests.cluster.circle import Speaker, client_of, save_saying, speaking

CALL = '<tool_call>{"name": "add", "arguments": {"a": "é"}}</tool_call>'
SAID = ["<think>", "Two and ", "two.", "</think>", "\n\n", "Let me ", "add. ", "<tool_call>", CALL[11:-12], "</tool_call>"]
THOUGHT, TEXT, INPUT = "Two and two.", "Let me add.", {"a": "é"}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}write <tool_call>{% endif %}{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments.a }}/{{ call.id }}{% endfor %}"
    "{% if message.tool_call_id %}/{{ message.tool_call_id }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}</think>s"
    "{% elif messages[-1].role == 'tool' %}s{% else %}>{% endif %}{% endif %}{# <think> </think> #}"
)
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
BODY: dict[str, Any] = {"model": "saying", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 60}
DRAFTED: list[dict[str, Any]] = [{"reference_documents": ["".join(SAID)]}, {"speculation": {"max_draft_tokens": 0}}]


@pytest.fixture(scope="module")
def saying(circle_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    """Thinks, says something, and calls a tool."""
    with speaking(save_saying(circle_model, tmp_path_factory.mktemp("models") / "saying", SAID, TEMPLATE)) as speaker:
        yield speaker


@pytest.fixture(scope="module")
def claude(saying: Speaker) -> Iterator[Anthropic]:
    with Anthropic(base_url=saying.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: Anthropic, **changes: Any) -> Any:
    return client.messages.create(**as_sdk(changes))


def as_sdk(changes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the client, which has no temperature."""
    fields = BODY | changes
    return fields | {"extra_body": {"temperature": fields.pop("temperature")} | fields.get("extra_body", {})}


def said(message: Any) -> list[tuple[Any, ...]]:
    """The blocks of a message."""
    found: list[tuple[Any, ...]] = []
    for block in message.content:
        if block.type == "tool_use":
            found.append((block.type, block.name, block.input))
        else:
            found.append((block.type, getattr(block, block.type).rstrip()))
    return found


FULL = [("thinking", THOUGHT), ("text", TEXT), ("tool_use", "add", INPUT)]


@pytest.mark.parametrize("extra", DRAFTED)
def test_a_message_of_blocks(claude: Anthropic, extra: dict[str, Any]) -> None:
    message = ask(claude, tools=[TOOL], metadata={"user_id": "me"}, extra_body=extra)
    assert said(message) == FULL and message.stop_reason == "tool_use" and message.stop_sequence is None
    assert (message.type, message.role, message.model) == ("message", "assistant", "saying")
    assert message.id.startswith("msg_") and message.content[0].signature
    usage = message.usage
    assert (usage.output_tokens, usage.output_tokens_details.thinking_tokens) == (len(SAID) + 1, 4)
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0) and usage.input_tokens > 0


@pytest.mark.parametrize("extra", DRAFTED)
def test_events_of_a_stream(claude: Anthropic, extra: dict[str, Any]) -> None:
    with claude.messages.stream(**as_sdk({"tools": [TOOL], "extra_body": extra})) as stream:
        events = [event for event in stream if event.type in RAW]
        message = stream.get_final_message()
    assert said(message) == FULL and message.stop_reason == "tool_use" and message.usage.output_tokens == len(SAID) + 1
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    for index, (kind, *_) in enumerate(FULL):
        of_block = [event for event in events if getattr(event, "index", None) == index]
        assert [event.type for event in of_block[:1] + of_block[-1:]] == ["content_block_start", "content_block_stop"]
        assert of_block[0].content_block.type == kind  # type: ignore[union-attr]
        deltas = [event.delta for event in of_block[1:-1]]  # type: ignore[union-attr]
        names = {"thinking": ["thinking_delta", "signature_delta"], "text": ["text_delta"], "tool_use": ["input_json_delta"]}
        assert list(dict.fromkeys(delta.type for delta in deltas)) == names[kind]
    pieces = [event.delta.partial_json for event in events if getattr(getattr(event, "delta", None), "partial_json", None)]
    assert json.loads("".join(pieces)) == INPUT


RAW = {"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"}


RESULT = {"type": "text", "text": "blue"}


def test_the_loop_of_a_tool(claude: Anthropic, saying: Speaker) -> None:
    first = ask(claude, tools=[TOOL])
    call = first.content[-1]
    turns: Any = [
        *BODY["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": [RESULT]}]},
    ]
    options: dict[str, Any] = {"messages": turns, "tools": [TOOL], "system": [{"type": "text", "text": "Be brief."}]}
    second = ask(claude, **options)
    assert said(second) == [("text", "tuvw.")] and second.stop_reason == "end_turn"
    prompt = saying.tokenizer.decode(saying.engine.jobs[-1].prompt_ids)
    assert prompt.endswith(f"[system]Be brief.[user]hi[assistant]({THOUGHT}){TEXT}add:é/{call.id}[tool]blue/{call.id}s")
    assert saying.tokenizer.encode(prompt) and "Adds." in prompt
    counted = claude.messages.count_tokens(model="saying", **options)
    assert counted.input_tokens == second.usage.input_tokens == len(saying.engine.jobs[-1].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "blocks", "reason", "stop"),
    [
        ({"max_tokens": 3}, [("thinking", THOUGHT)], "max_tokens", None),
        ({"max_tokens": 100_000}, FULL[:2], "end_turn", None),
        ({"stop_sequences": ["add."]}, [("thinking", THOUGHT), ("text", "Let me")], "stop_sequence", "add."),
        ({"stop_sequences": ["nothing"]}, FULL[:1], "end_turn", None),
        ({"thinking": {"type": "disabled"}}, [("text", "tuvw.")], "end_turn", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, [("thinking", "")], "end_turn", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"}}, [("text", TEXT)], "end_turn", None),
        ({"messages": [*BODY["messages"], {"role": "assistant", "content": "s"}]}, [("text", "tuvw.")], "end_turn", None),
    ],
)  # fmt: skip
def test_how_a_message_ends(
    claude: Anthropic, stream: bool, changes: dict[str, Any], blocks: list[Any], reason: str, stop: str | None
) -> None:
    if stream:
        with claude.messages.stream(**as_sdk(changes)) as events:
            message: Any = events.get_final_message()
    else:
        message = ask(claude, **changes)
    found = said(message)
    assert (message.stop_reason, message.stop_sequence) == (reason, stop)
    assert [(block[0], block[1][: len(wanted[1])]) for block, wanted in zip(found, blocks, strict=False)] == blocks


@pytest.mark.parametrize("changes", [{}, {"stream": True}, {"speculation": {"max_draft_tokens": 0}}])
def test_a_tool_that_must_be_called(claude: Anthropic, changes: dict[str, Any]) -> None:
    kinds = ({"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True})
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    tool = TOOL | {"input_schema": schema}  # whose call ends
    for choice in kinds:
        if changes.get("stream"):
            with claude.messages.stream(**as_sdk({"tools": [tool], "tool_choice": choice, "max_tokens": 200})) as stream:
                message = stream.get_final_message()
        else:
            message = ask(claude, tools=[tool], tool_choice=choice, max_tokens=200, extra_body=changes)
        assert said(message)[-1][:2] == ("tool_use", "add") and message.stop_reason == "tool_use"
    none = ask(claude, tools=[TOOL], tool_choice={"type": "none"})
    assert all(block[0] != "tool_use" for block in said(none))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "custom"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"stop": ["a"]}, "stop"),
        ({"n": 2}, "n is not"),
        ({"nothing": 1}, "nothing"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"speculation": {"report": True}}, "report"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_what_is_refused(saying: Speaker, changes: dict[str, Any], word: str) -> None:
    answer = httpx.post(f"{saying.url}/v1/messages", json=BODY | changes, timeout=60, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", "invalid_request_error", "mine")
    assert word in error["error"]["message"] and answer.headers["X-Request-Id"] == "mine"


def test_keys_models_and_methods_in_the_clients_words(saying: Speaker) -> None:
    tenancy = TenancyOptions(tenants={"acme": TenantOptions(keys=(hash_key("secret"),))})
    with client_of(Service(saying.engine, saying.tokenizer, tenancy)) as http:
        client = Anthropic(base_url=str(http.base_url), api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            ask(client)
        client = Anthropic(base_url=str(http.base_url), api_key="secret", max_retries=0)
        with pytest.raises(anthropic.NotFoundError):
            ask(client, model="other")
        long = [{"role": "user", "content": "hi " * 40}]  # a short beginning is computed again
        first, second = ask(client, messages=long), ask(client, messages=long)
        assert saying.engine.jobs[-1].tenant == "acme"
        assert first.usage.cache_read_input_tokens == 0 < second.usage.cache_read_input_tokens
        assert second.usage.cache_read_input_tokens + second.usage.input_tokens == first.usage.input_tokens
        answer = http.get("/v1/messages", headers={"x-api-key": "secret"})
        assert answer.status_code == 405 and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_stream_at_a_cadence_pings(saying: Speaker) -> None:
    guard = StreamGuard(ServerOptions(stream_guard="both"))
    with client_of(Service(saying.engine, saying.tokenizer, guard=guard)) as http:
        text = http.post("/v1/messages", json=BODY | {"stream": True}).text
    events = [event for event in text.split("\n\n") if event]
    assert all((len(event) + 2) % 512 == 0 for event in events), [len(event) for event in events]
    assert events[-1].startswith("event: message_stop")
