"""Several choices and echoed prompts: OpenAI's own client against the real application."""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from cluster.app import EngineReplica
from cluster.http.job_planner import choice_seed
from cluster.serving.generation import Job
from configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from decoding.request import SamplingParams
from tests import waiting

PLAIN = {"max_draft_tokens": 0}
CHAT: list[Any] = [{"role": "user", "content": "hi"}]
SPECULATION: list[dict[str, Any]] = [{}, PLAIN, {"strategy": "prompt_lookup"}]


def texts(client: OpenAI, **arguments: Any) -> list[str]:
    """The choices of a completion in order, the same whether it is streamed or not."""
    extra = {"ignore_eos": True, "reference_documents": ["<abcdefgh-é_日:🦙;ijklm>"]} | arguments.pop("extra", {})
    fields: dict[str, Any] = {"model": "circle", "max_tokens": 30, "seed": 5, "extra_body": extra} | arguments
    whole = client.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == list(range(len(whole.choices)))
    found: defaultdict[int, str] = defaultdict(str)
    ended: dict[int, str] = {}
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            assert choice.index not in ended
            found[choice.index] += choice.text
            if choice.finish_reason:
                ended[choice.index] = choice.finish_reason
    said = [choice.text for choice in whole.choices]
    assert [found[index] for index in range(len(found))] == said
    assert [ended[index] for index in range(len(found))] == [choice.finish_reason for choice in whole.choices]
    return said


def test_choices_differ_and_each_is_what_its_seed_gives_alone(client: OpenAI) -> None:
    runs = [texts(client, prompt="<", n=4, extra={"speculation": speculation}) for speculation in SPECULATION]
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) == 4
    alone = [texts(client, prompt="<", seed=choice_seed(5, index))[0] for index in range(4)]
    assert runs[0] == alone and alone[0] == texts(client, prompt="<")[0]


def test_choices_of_several_prompts_lie_side_by_side(client: OpenAI, byte_ids: Any) -> None:
    prompts = [byte_ids("a"), byte_ids("s")]
    assert texts(client, prompt=prompts, n=2, temperature=0, max_tokens=4) == ["bcde", "bcde", "tuvw", "tuvw"]
    assert texts(client, prompt=["a", "s"], n=2) == [*texts(client, prompt="a", n=2), *texts(client, prompt="s", n=2)]


def test_seeds_of_choices() -> None:
    assert choice_seed(7, 0) == 7
    seeds = {choice_seed(seed, choice) for seed in range(40) for choice in range(40)}
    assert len(seeds) == 1600 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_prompt_counts_once(client: OpenAI) -> None:
    answer = client.completions.create(model="circle", prompt=["xa", "s"], n=3, max_tokens=4, temperature=0)
    assert answer.usage is not None
    usage = answer.usage.model_dump(exclude_none=True)
    assert usage == {
        "prompt_tokens": 3, "completion_tokens": 24, "total_tokens": 27, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_chats_have_choices_too(client: OpenAI) -> None:
    def chat(**arguments: Any) -> Any:
        fields: dict[str, Any] = {"model": "circle", "messages": CHAT, "max_tokens": 20, "seed": 3} | arguments
        return client.chat.completions.create(**fields)

    answers = [chat(n=3, extra_body={"speculation": speculation}) for speculation in SPECULATION]
    said = [[(choice.index, choice.message.content) for choice in answer.choices] for answer in answers]
    assert said[0] == said[1] == said[2] and len({text for _, text in said[0]}) > 1
    assert said[0][0][1] == chat().choices[0].message.content
    streamed = ["", "", ""]
    for chunk in chat(n=3, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == [text for _, text in said[0]]
    assert chunk.usage.completion_tokens == answers[0].usage.completion_tokens


@pytest.mark.parametrize("speculation", SPECULATION)
def test_echo(client: OpenAI, byte_ids: Any, speculation: dict[str, Any]) -> None:
    extra = {"speculation": speculation}
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "echo": True, "extra": extra}
    assert texts(client, prompt="é a", **greedy) == ["é abcdefg"]
    assert texts(client, prompt=[byte_ids("日s"), byte_ids("<")], **greedy) == ["日stuvw.", "<abcdef"]
    assert texts(client, prompt=["<", "s"], n=2, stop="d", **greedy) == ["<abc", "<abc", "stuvw.", "stuvw."]
    assert texts(client, prompt="a", **(greedy | {"echo": False})) == ["bcdefg"]


def test_more_choices_than_the_engine_takes_are_refused_and_leave_nothing_behind(client: OpenAI, api_server: Any) -> None:
    for stream in (False, True):
        many: dict[str, Any] = {"prompt": "<", "n": 128, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="circle", stream=stream, **many)
        assert refused.value.code == "queue_full"
        waiting.eventually(lambda: (api_server.health()["running"], api_server.health()["waiting"]) == (0, 0))


def test_the_choices_of_a_request_share_the_texts_that_they_may_repeat(circle_model: Path) -> None:
    model = ModelOptions(path=str(circle_model), dtype="float32", threads=1)
    replica = EngineReplica(model, EngineOptions(max_running=2), SpeculationOptions("llma"), ParallelismOptions(), None, 60.0)
    prompt, text = np.array([5], np.int32), np.arange(5, 60, dtype=np.int32)
    jobs = [Job(name, prompt, SamplingParams(3), (text.copy(),), siblings=True) for name in ("one/0", "one/1", "two/0")]
    shared = [replica._shared(job)[0] for job in jobs]  # each came with a copy of its own
    assert shared[0] is shared[1] and shared[0] is not shared[2]

    async def answer(jobs: list[Job]) -> list[list[Any]]:
        async def outputs(job: Job) -> list[Any]:
            return [output async for output in replica.generate(job)]

        return await asyncio.gather(*map(outputs, jobs))

    assert all(outputs[-1].finish_reason == "length" for outputs in asyncio.run(answer(jobs)))
    del shared, jobs
    waiting.eventually(lambda: gc.collect() >= 0 and not replica._references)
