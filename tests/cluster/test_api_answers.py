"""What a well-formed request gets: OpenAI's own client against the real application."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

# The fixtures and the circle are those of conftest.py, which states what the model does.
CIRCLE = "<abcdefgh-é_日:🦙;ijklm>"
LAP = len(CIRCLE.encode())  # tokens of one walk around
NOT_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}  # a private request reuses nothing
CHAT: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]


def stream_lines(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a stream that ends well."""
    with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line for line in response.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def test_health_and_models(api_server: Any, client: OpenAI) -> None:
    assert api_server.health() == {
        "status": "ok", "model": "circle", "replicas": 1, "running": 0, "waiting": 0, "free_slots": 3, "shared_cache": "off",
    }  # fmt: skip
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("circle", "model", "outrider")
    assert client.models.retrieve("circle") == model
    assert model.model_dump()["exact"] is True


def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="circle", prompt="xy<", max_tokens=LAP + 2, temperature=0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == CIRCLE[1:] + CIRCLE[:3]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    usage = answer.usage.model_dump(exclude_none=True)
    assert usage == {"prompt_tokens": 3, "completion_tokens": LAP + 2, "total_tokens": LAP + 5, **NOT_CACHED}


def test_completion_defaults(client: OpenAI) -> None:
    answer = client.completions.create(model="circle", prompt="<", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_the_end_token_ends_and_counts(client: OpenAI) -> None:
    answer = client.completions.create(model="circle", prompt="s", max_tokens=50, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("tuvw.", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    on = client.completions.create(model="circle", prompt="s", max_tokens=8, temperature=0, extra_body={"ignore_eos": True})
    assert (on.choices[0].text, on.choices[0].finish_reason) == ("tuvw.<a", "length")


def test_several_prompts_give_choices_in_order(client: OpenAI, http: httpx.Client) -> None:
    prompts = ["a", "s", "d", "<", "i"]
    answer = client.completions.create(model="circle", prompt=prompts, max_tokens=4, temperature=0)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(["bcde", "tuvw", "efgh", "abcd", "jklm"]))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 20)
    texts = [""] * 5
    reasons: list[str | None] = [None] * 5
    for chunk in stream_lines(http, "/v1/completions", {"model": "circle", "prompt": prompts, "max_tokens": 4, "temperature": 0}):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        assert reasons[choice["index"]] is None
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == ["bcde", "tuvw", "efgh", "abcd", "jklm"]
    assert reasons == ["length"] * 5


def test_prompts_of_token_ids(client: OpenAI, byte_ids: Any) -> None:
    one = client.completions.create(model="circle", prompt=byte_ids("xa"), max_tokens=3, temperature=0)
    assert one.choices[0].text == "bcd"
    two = client.completions.create(model="circle", prompt=[byte_ids("xa"), byte_ids("i")], max_tokens=3, temperature=0)
    assert [choice.text for choice in two.choices] == ["bcd", "jkl"]


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="circle", messages=CHAT, max_completion_tokens=9, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "<abcdefgh", "length")
    assert answer.usage is not None
    prompt_tokens = len("[system]s[user]hi>")  # the template of the tokenizer, one token a byte
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 9,
        "total_tokens": prompt_tokens + 9,
        **NOT_CACHED,
    }


def test_a_chat_runs_on_to_the_end_of_the_context(client: OpenAI, api_server: Any) -> None:
    (model,) = httpx.get(f"{api_server.url}/v1/models", timeout=30).json()["data"]
    left = 60
    filler = "x" * (model["max_model_len"] - left - len("[user]>"))
    answer = client.chat.completions.create(model="circle", messages=[{"role": "user", "content": filler}], temperature=0)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (left, model["max_model_len"])
    assert answer.choices[0].finish_reason == "length"


def test_messages_of_text_parts_and_echoed_messages(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    first = client.chat.completions.create(
        model="circle", messages=[CHAT[0], {"role": "user", "content": parts}], max_tokens=5, temperature=0
    )
    assert first.usage is not None
    assert first.usage.prompt_tokens == len("[system]s[user]hi>")
    messages: list[Any] = [*CHAT, first.choices[0].message.model_dump(), {"role": "user", "content": "on"}]
    second = client.chat.completions.create(model="circle", messages=messages, max_tokens=5, temperature=0)
    assert second.usage is not None
    assert second.usage.prompt_tokens == len("[system]s[user]hi[assistant]<abcd[user]on>")


def test_chat_stream_on_the_wire(http: httpx.Client) -> None:
    body = {"model": "circle", "messages": CHAT, "max_tokens": 4, "temperature": 0}
    chunks = stream_lines(http, "/v1/chat/completions", body)
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", "circle")
    }
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [choice["delta"] for choice in choices[1:-1]] == [{"content": character} for character in "<abc"]
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_of_a_stream(http: httpx.Client, path: str) -> None:
    prompt = {"messages": CHAT} if "chat" in path else {"prompt": "[system]s[user]hi>"}
    body = {"model": "circle", "max_tokens": 4, "temperature": 0, "stream_options": {"include_usage": True}} | prompt
    chunks = stream_lines(http, path, body)
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 18, "completion_tokens": 4, "total_tokens": 22, **NOT_CACHED}


def test_streams_of_the_client(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="circle", messages=CHAT, max_tokens=LAP, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CIRCLE
    assert chunks[-1].choices[0].finish_reason == "length"
    texts = client.completions.create(model="circle", prompt="s", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts) == "tuvw."


def test_tokens_flow_while_the_rest_is_computed(client: OpenAI, api_server: Any) -> None:
    stream = client.completions.create(model="circle", prompt="<", max_tokens=600, stream=True, extra_body={"ignore_eos": True})
    first = next(iter(stream))
    assert first.choices[0].finish_reason is None
    assert api_server.health()["running"] == 1
    rest = list(stream)
    assert len(rest) > 100
    assert rest[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("references", [None, [CIRCLE * 2]])
def test_characters_of_several_tokens_stream_whole(http: httpx.Client, references: list[str] | None) -> None:
    body = {"model": "circle", "prompt": "<", "max_tokens": 2 * LAP, "temperature": 0}
    if references:
        body["reference_documents"] = references
    chunks = stream_lines(http, "/v1/completions", body)
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == (CIRCLE * 3)[1 : 2 * len(CIRCLE) + 1]
    assert not any("\ufffd" in piece for piece in pieces)
    bursts = [piece for piece in pieces if len(piece) > 1]
    assert bool(bursts) == bool(references)  # what can be copied comes several tokens at a time


@pytest.mark.parametrize("references", [[], [CIRCLE]])
@pytest.mark.parametrize("stop", ["é_", ["zzz", "é_", "日"]])
def test_stop_strings(client: OpenAI, stop: str | list[str], references: list[str]) -> None:
    extra = {"reference_documents": references}
    answer = client.completions.create(model="circle", prompt="<", max_tokens=99, temperature=0, stop=stop, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcdefgh-", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("abcdefgh-é_".encode())
    stream = client.completions.create(
        model="circle", prompt="<", max_tokens=99, temperature=0, stop=stop, stream=True, extra_body=extra
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "abcdefgh-"


def test_stop_token_ids(client: OpenAI, byte_ids: Any) -> None:
    extra = {"stop_token_ids": byte_ids("e")}
    answer = client.completions.create(model="circle", prompt="<", max_tokens=99, temperature=0, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcd", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_seeds(client: OpenAI) -> None:
    def text(**arguments: Any) -> str:
        extra = {"ignore_eos": True} | arguments.pop("extra", {})
        return client.completions.create(model="circle", prompt="<", max_tokens=60, extra_body=extra, **arguments).choices[0].text

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) == text(seed=1, extra={"reference_documents": [CIRCLE * 2]})
    assert text(seed=1) != text(seed=2)
    assert text() != text()  # drawn at random when absent
    greedy = text(temperature=0)
    assert text(seed=1, extra={"top_k": 1}) == greedy
    assert text(seed=1, top_p=0.01) == greedy
    assert text(seed=1, extra={"top_k": -1}) == text(seed=1)


def test_parameters_that_ask_for_nothing_are_taken(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="circle",
        messages=CHAT,
        max_tokens=3,
        temperature=0,
        n=1,
        stop=None,
        logprobs=False,
        frequency_penalty=0.0,
        presence_penalty=0,
        logit_bias={},
        tools=[],
        response_format={"type": "text"},
        user="someone",
    )
    assert answer.choices[0].message.content == "<ab"


def test_requests_at_once_give_what_they_give_alone(api_server: Any, client: OpenAI) -> None:
    prompts = ["<", "xyb", "s", "-", "🦙", "ijk", "é"]
    answers = [client.completions.create(model="circle", prompt=prompt, max_tokens=40, temperature=0) for prompt in prompts]
    alone = [answer.choices[0].text for answer in answers]

    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{api_server.url}/v1", api_key="none", max_retries=0) as many:

            async def streamed(prompt: str) -> str:
                stream = await many.completions.create(model="circle", prompt=prompt, max_tokens=40, temperature=0, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(streamed, prompts))

    assert asyncio.run(run()) == alone
    assert len(set(alone)) == len(prompts)


def test_a_chat_of_the_async_client(api_server: Any) -> None:
    async def run() -> tuple[str, str]:
        async with AsyncOpenAI(base_url=f"{api_server.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="circle", messages=CHAT, max_tokens=LAP, temperature=0)
            stream = await client.chat.completions.create(
                model="circle", messages=CHAT, max_tokens=LAP, temperature=0, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content or "", "".join(pieces)

    assert asyncio.run(run()) == (CIRCLE, CIRCLE)
