"""What a well-formed request gets: OpenAI's own client against the real application."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from outrider.cluster.serving.shared_answer import FRESH_S
from tests.cluster.circle import CIRCLE, LAP, Server, read_stream
from tests.helpers.waiting import eventually

NOT_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}  # a private request reuses nothing
MESSAGES: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]


def test_health_and_models(api_server: Server, client: OpenAI) -> None:
    assert api_server.health() == {
        "status": "ok", "model": "circle", "replicas": 1, "running": 0, "waiting": 0, "free_slots": 3, "shared_cache": "off",
    }  # fmt: skip
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("circle", "model", "outrider")
    assert client.models.retrieve("circle") == model
    assert model.model_dump()["exact"] is True


def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="circle", prompt="xy<", max_tokens=LAP + 2, temperature=0)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.usage is not None
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (CIRCLE[1:] + CIRCLE[:3], "length")
    usage = answer.usage.model_dump(exclude_none=True)
    assert usage == {"prompt_tokens": 3, "completion_tokens": LAP + 2, "total_tokens": LAP + 5, **NOT_CACHED}


def test_chat(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    prompt_tokens = len("[system]s[user]hi>")  # the template of the tokenizer, one token a byte
    for messages in (MESSAGES, [MESSAGES[0], {"role": "user", "content": parts}]):
        answer = client.chat.completions.create(model="circle", messages=messages, max_completion_tokens=9, temperature=0)
        assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.usage is not None
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "<abcdefgh", "length")
        usage = answer.usage.model_dump(exclude_none=True)
        total = {"prompt_tokens": prompt_tokens, "completion_tokens": 9, "total_tokens": prompt_tokens + 9}
        assert usage == {**total, **NOT_CACHED}
    messages = [*MESSAGES, choice.message.model_dump(), {"role": "user", "content": "on"}]
    second = client.chat.completions.create(model="circle", messages=messages, max_tokens=5, temperature=0)
    assert second.usage is not None
    assert second.usage.prompt_tokens == len("[system]s[user]hi[assistant]<abcdefgh[user]on>")


def test_a_chat_runs_on_to_the_end_of_the_context(client: OpenAI, api_server: Server) -> None:
    (model,) = httpx.get(f"{api_server.url}/v1/models", timeout=30).json()["data"]
    left = 60
    filler = "x" * (model["max_model_len"] - left - len("[user]>"))
    answer = client.chat.completions.create(model="circle", messages=[{"role": "user", "content": filler}], temperature=0)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (left, model["max_model_len"])
    assert answer.choices[0].finish_reason == "length"


def test_chat_stream_on_the_wire(http: httpx.Client) -> None:
    body = {"model": "circle", "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    chunks = read_stream(http, "/v1/chat/completions", body)
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
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "[system]s[user]hi>"}
    body = {"model": "circle", "max_tokens": 4, "temperature": 0, "stream_options": {"include_usage": True}} | prompt
    chunks = read_stream(http, path, body)
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 18, "completion_tokens": 4, "total_tokens": 22, **NOT_CACHED}


def test_streams_of_the_client(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="circle", messages=MESSAGES, max_tokens=LAP, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CIRCLE
    assert chunks[-1].choices[0].finish_reason == "length"
    texts = client.completions.create(model="circle", prompt="s", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts) == "tuvw."


def test_responses_of_the_client(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "circle", "input": MESSAGES, "max_output_tokens": LAP, "temperature": 0}
    whole = client.responses.create(**asked)
    assert (whole.output_text, whole.status) == (CIRCLE, "incomplete")
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == CIRCLE
    assert events[-1].type == "response.incomplete" and events[-1].response.usage == whole.usage


def test_tokens_flow_while_the_rest_is_computed(client: OpenAI, api_server: Server) -> None:
    stream = client.completions.create(model="circle", prompt="<", max_tokens=600, stream=True, extra_body={"ignore_eos": True})
    first = next(iter(stream))
    assert first.choices[0].finish_reason is None
    eventually(lambda: api_server.health()["running"] == 1)
    rest = list(stream)
    assert len(rest) > 100
    assert rest[-1].choices[0].finish_reason == "length"


def test_requests_at_once_give_what_they_give_alone(api_server: Server, client: OpenAI) -> None:
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


def test_metrics_count_what_clients_got(http: httpx.Client, client: OpenAI) -> None:
    def totals() -> dict[str, float]:
        time.sleep(FRESH_S)  # until states are asked for anew
        families = text_string_to_metric_families(http.get("/metrics").text)
        found: Counter[str] = Counter()
        for sample in (sample for family in families for sample in family.samples):
            found[sample.name] += sample.value
        return found

    before = totals()
    for number in range(5, 9):
        client.completions.create(model="circle", prompt="<abc", max_tokens=number, temperature=0)
    after = totals()
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 5 + 6 + 7 + 8
    assert after.keys() >= {"outrider:audits_total", "vllm:request_params_n_count"}
    assert after["outrider:ranks_ready"] == after["outrider:ranks"] == after["outrider:replicas"] == 1
