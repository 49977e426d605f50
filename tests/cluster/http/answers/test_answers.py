"""What a well-formed request is answered, whole and streamed, drafted or not: one text, to the letter."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from outrider.cluster.http.request_planner import choice_seed
from outrider.cluster.serving.engine_replica import EngineReplica
from outrider.cluster.serving.generation import GenerationJob
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.decoding.request import SamplingParams
from tests.cluster.circle import CHAT, CHATS, CIRCLE, COMPLETIONS, LAP, TEXT, Server, byte_ids, check_error, read_stream
from tests.helpers import waiting

DRAFTED: list[dict[str, Any]] = [
    {},
    {"reference_documents": [CIRCLE * 3]},
    {"reference_documents": [CIRCLE * 3], "speculation": {"max_draft_tokens": 0}},
    {"reference_documents": [CIRCLE * 3], "speculation": {"strategy": "prompt_lookup"}},
    {"reference_embedding": [0.5, -1, 2]},
]


def ask(http: httpx.Client, body: dict[str, Any], path: str = COMPLETIONS) -> tuple[list[str], list[str], dict[str, Any]]:
    """The texts of all choices, why each ended, and the usage: the same whether it is streamed or not."""
    answer = http.post(path, json=body).raise_for_status().json()
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    texts = [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in choices]
    streamed, reasons = [""] * len(choices), [None] * len(choices)
    *chunks, last = read_stream(http, path, body | {"stream_options": {"include_usage": True}})
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        piece = choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        assert reasons[choice["index"]] is None  # nothing comes after the end
        assert body["temperature"] or "\ufffd" not in piece  # the circle's characters come whole
        streamed[choice["index"]] += piece
        reasons[choice["index"]] = choice["finish_reason"]
    assert streamed == texts and reasons == [choice["finish_reason"] for choice in choices]
    assert last["choices"] == [] and last["usage"] == answer["usage"]
    return texts, [choice["finish_reason"] for choice in choices], answer["usage"]


def bias(**values: float) -> dict[str, float]:
    return {str(byte_ids(character)[0]): value for character, value in values.items()}


NEAR = bias(x=7)  # the peaks are 8.03: not enough by itself
# What is asked, the texts of the choices, and why they end.
ANSWERS: list[tuple[dict[str, Any], list[str], str]] = [
    ({"prompt": "xy<", "max_tokens": 2 * LAP + 2}, [CIRCLE[1:] + CIRCLE + CIRCLE[:3]], "length"),
    ({"ignore_eos": True, "max_tokens": None}, ["abcdefgh-é_日:"], "length"),  # 16 tokens
    ({"prompt": "s", "max_tokens": 50}, ["tuvw."], "stop"),  # the end token ends
    ({"prompt": "s", "max_tokens": 8, "ignore_eos": True}, ["tuvw.<a"], "length"),
    ({"prompt": "stuv", "max_tokens": 5, "ignore_eos": True}, ["w.<a"], "length"),
    ({"prompt": "stuv", "max_tokens": 5, "ignore_eos": True, "skip_special_tokens": False}, ["w.</s><a"], "length"),
    ({"prompt": ["a", "s", "d", "<", "i"]}, ["bcde", "tuvw", "efgh", "abcd", "jklm"], "length"),
    ({"prompt": byte_ids("xa")}, ["bcde"], "length"),
    ({"prompt": [byte_ids("xa"), byte_ids("i")], "n": 2}, ["bcde", "bcde", "jklm", "jklm"], "length"),
    ({"max_tokens": 99, "stop": "é_"}, ["abcdefgh-"], "stop"),
    ({"max_tokens": 99, "stop": ["zzz", "é_", "日"]}, ["abcdefgh-"], "stop"),
    ({"max_tokens": 20, "stop": ["fg", "de"]}, ["abc"], "stop"),
    ({"max_tokens": 20, "stop": ["fg", "de"], "include_stop_str_in_output": True}, ["abcde"], "stop"),
    ({"max_tokens": 20, "stop_token_ids": byte_ids("c")}, ["ab"], "stop"),
    ({"max_tokens": 20, "stop_token_ids": byte_ids("c"), "include_stop_str_in_output": True}, ["abc"], "stop"),
    ({"prompt": "é a", "max_tokens": 6, "echo": True}, ["é abcdefg"], "length"),
    ({"prompt": [byte_ids("日a"), byte_ids("<")], "max_tokens": 6, "echo": True}, ["日abcdefg", "<abcdef"], "length"),
    ({"prompt": ["<", "a"], "n": 2, "stop": "d", "echo": True}, ["<abc", "<abc", "abc", "abc"], "stop"),
    ({"logit_bias": NEAR}, ["abcd"], "length"),
    ({"logit_bias": bias(x=9)}, ["xxxx"], "length"),
    ({"logit_bias": bias(c=-100, x=1)}, ["abx<"], "length"),
    ({"logit_bias": {}, "best_of": 1, "suffix": "", "user": "someone", "stop": None}, ["abcd"], "length"),
    # Penalties of what the sequence holds make x the likeliest: 8.03 / 1.3 = 6.2 and x, which was said, 7 / 1.3 = 5.4.
    ({"prompt": "b<", "logit_bias": NEAR}, ["abcd"], "length"),
    ({"prompt": "b<", "logit_bias": NEAR, "repetition_penalty": 1.3}, ["ax<a"], "length"),
    *(
        ({"prompt": f"{CIRCLE}<", "logit_bias": NEAR, name: 1.5, "max_tokens": LAP + 1}, [CIRCLE[1:] + "<x"], "length")
        for name in ("presence_penalty", "frequency_penalty")  # which look at the output alone
    ),
    ({"prompt": "s", "max_tokens": 20, "min_tokens": 5}, ["tuvw."], "stop"),
    # The end token may not come, and the padding token is the first of the others.
    ({"prompt": "s", "max_tokens": 9, "min_tokens": 8}, ["tuvw.<ab"], "length"),
]


@pytest.mark.slow
@pytest.mark.parametrize("drafted", DRAFTED, ids=["nothing to draft", "drafts", "no drafts", "another strategy", "an embedding"])
@pytest.mark.parametrize(("body", "texts", "reason"), ANSWERS)
def test_the_answer(http: httpx.Client, body: dict[str, Any], texts: list[str], reason: str, drafted: dict[str, Any]) -> None:
    said, reasons, _ = ask(http, TEXT | body | drafted)
    assert said == texts and set(reasons) == {reason}


def test_usage_counts_a_prompt_once_and_the_tokens_that_end_a_text(http: httpx.Client) -> None:
    for body, prompt, completion in (
        ({"prompt": ["xa", "s"], "n": 3}, 3, 24), ({"prompt": "s", "max_tokens": 50}, 1, 6),
        ({"stop": "é_", "max_tokens": 99}, 1, len("abcdefgh-é_".encode())),
        ({"stop_token_ids": byte_ids("e"), "max_tokens": 99}, 1, 5),
    ):  # fmt: skip
        assert ask(http, TEXT | body)[2] == {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        }  # fmt: skip


def test_what_can_be_copied_comes_several_tokens_at_a_time(http: httpx.Client) -> None:
    for drafted, bursts in ((DRAFTED[0], False), (DRAFTED[1], True), (DRAFTED[2], False)):
        chunks = read_stream(http, COMPLETIONS, TEXT | {"max_tokens": LAP} | drafted)
        assert any(len(chunk["choices"][0]["text"]) > 1 for chunk in chunks) is bursts


@pytest.mark.slow
def test_sampled_choices_differ_and_each_is_what_its_seed_gives_alone(http: httpx.Client) -> None:
    def said(path: str = COMPLETIONS, **changes: Any) -> list[str]:
        body = {"temperature": 1.0, "seed": 5, "max_tokens": 60, "ignore_eos": True} | changes
        return ask(http, (TEXT if path == COMPLETIONS else CHAT) | body, path)[0]

    for path in (COMPLETIONS, CHATS):
        runs = [said(path, n=4, **drafted) for drafted in DRAFTED]
        assert all(run == runs[0] for run in runs) and len(set(runs[0])) == 4
        assert runs[0] == [said(path, seed=choice_seed(5, index))[0] for index in range(4)]
    assert said(prompt=["a", "s"], n=2) == [*said(prompt="a", n=2), *said(prompt="s", n=2)]
    greedy = said(temperature=0)
    assert said(top_k=1) == said(top_p=0.01) == greedy != said() == said(top_k=-1)
    assert said(temperature=2.0, min_p=0.5) == greedy != said(temperature=2.0, min_p=0.0)
    bodies = [TEXT | {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}] * 2  # whose seeds are drawn
    assert len({http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] for body in bodies}) == 2


def test_seeds_of_choices() -> None:
    assert choice_seed(7, 0) == 7
    seeds = {choice_seed(seed, choice) for seed in range(40) for choice in range(40)}
    assert len(seeds) == 1600 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("stream", [False, True])
def test_more_choices_than_the_engine_takes_leave_nothing_behind(http: httpx.Client, api_server: Server, stream: bool) -> None:
    many = TEXT | {"n": 128, "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    check_error(http.post(COMPLETIONS, json=many), 429, code="queue_full")
    api_server.becomes_idle()


def test_the_choices_of_a_request_share_the_texts_that_they_may_repeat(circle_model: Path) -> None:
    model = ModelOptions(path=str(circle_model), dtype="float32", threads=1)
    replica = EngineReplica(model, EngineOptions(max_running=2), SpeculationOptions("llma"), ParallelismOptions(), None, 60.0)
    prompt, text = np.array([5], np.int32), np.arange(5, 60, dtype=np.int32)
    jobs = [GenerationJob(name, prompt, SamplingParams(3), (text.copy(),), siblings=True) for name in ("one/0", "one/1", "two/0")]
    shared = [replica._shared(job)[0] for job in jobs]  # each came with a copy of its own
    assert shared[0] is shared[1] and shared[0] is not shared[2]

    async def ends(jobs: list[GenerationJob]) -> list[Any]:
        items = [item async for batch in replica.generate(jobs) for _, item in batch]
        return [item.finish_reason for item in items if item.finish_reason is not None]

    assert asyncio.run(ends(jobs)) == ["length"] * 3
    del shared, jobs
    waiting.eventually(lambda: gc.collect() >= 0 and not replica._references)
