"""``speculation: {"report": true}``: the real application says of every token who drafted it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import httpx
import pytest

from outrider.cluster.http.api import Service
from outrider.configs.slices import TenancyOptions
from tests.cluster.circle import CHAT, CHATS, CIRCLE, COMPLETIONS, TEXT, TOKENIZER, LocalEngine, client_of, read_stream

BODIES = {COMPLETIONS: TEXT | {"prompt": "hgf<", "max_tokens": 70}, CHATS: CHAT | {"max_tokens": 70}}
Steps = list[dict[str, Any]]


def body(path: str, **more: Any) -> dict[str, Any]:
    if "logprobs" in more and path == COMPLETIONS:
        more["logprobs"] = 1  # alternatives; of a chat it is a switch
    return BODIES[path] | {"speculation": {"report": True}, "reference_documents": [CIRCLE]} | more


def whole(http: httpx.Client, path: str, **more: Any) -> tuple[list[str], list[Steps], dict[str, Any]]:
    """The texts and steps of all choices, and the usage."""
    answer = http.post(path, json=body(path, **more)).raise_for_status().json()
    texts = [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in answer["choices"]]
    return texts, [choice["speculation"]["steps"] for choice in answer["choices"]], answer["usage"]


def streamed(http: httpx.Client, path: str, **more: Any) -> tuple[list[str], list[Steps]]:
    """The same of a stream, each of whose chunks with a step has its text, too."""
    texts: defaultdict[int, str] = defaultdict(str)
    steps: defaultdict[int, Steps] = defaultdict(list)
    for chunk in read_stream(http, path, body(path, **more)):
        for choice in chunk["choices"]:
            text = choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
            texts[choice["index"]] += text
            if "speculation" in choice:
                assert spelled(choice["speculation"]["steps"]) == text
                steps[choice["index"]] += choice["speculation"]["steps"]
    return [texts[index] for index in sorted(texts)], [steps[index] for index in sorted(texts)]


def spelled(steps: Steps) -> str:
    return "".join(token["text"] for step in steps for token in step["tokens"])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop": ["kl"]},
        {"stop": [":🦙;ix"], "max_tokens": 20},  # held back to the end, which is within a character
        {"temperature": 1.0, "seed": 9, "n": 3},
        {"logprobs": True},
    ],
)
def test_the_steps_are_the_whole_answer_streamed_or_not(http: httpx.Client, path: str, more: dict[str, Any]) -> None:
    texts, steps, usage = whole(http, path, **more)
    assert (texts, steps) == streamed(http, path, **more)
    assert [spelled(each) for each in steps] == texts
    tokens = [token for each in steps for step in each for token in step["tokens"]]
    assert len(tokens) == usage["completion_tokens"]
    for step in (step for each in steps for step in each):
        drafted = [token for token in step["tokens"] if token["source"] != "model"]
        assert len(drafted) == step["accepted"] <= step["drafted"]
        assert {token["source"] for token in drafted} <= {"prompt", "document", "output"}
    assert {token["source"] for token in tokens} >= {"model", "document"}


def test_who_drafted_is_told_by_what_was_copied(http: httpx.Client) -> None:
    def sources(**more: Any) -> set[str]:
        _, (steps,), _ = whole(http, COMPLETIONS, **more)
        return {token["source"] for step in steps for token in step["tokens"]}

    assert sources() == {"model", "document"}
    assert sources(reference_documents=[]) == {"model"}  # llma does not copy its output
    assert sources(prompt=CIRCLE, reference_documents=None) == {"model", "prompt"}
    looked_up = {"report": True, "strategy": "prompt_lookup"}
    assert sources(speculation=looked_up) == {"model", "output"}
    assert sources(speculation={"report": True, "max_draft_tokens": 0}) == {"model"}


@pytest.mark.slow
def test_the_same_asked_in_other_words_is_drafted_for_by_its_embedding(circle_engine: LocalEngine) -> None:
    def sources(prompt: str, embedding: list[float] | None, **more: Any) -> set[str]:
        more |= {"prompt": prompt, "reference_documents": None, "reference_embedding": embedding}
        _, (steps,), _ = whole(http, COMPLETIONS, **more)
        return {token["source"] for step in steps for token in step["tokens"]}

    with client_of(Service(circle_engine, TOKENIZER, TenancyOptions(anonymous="words"))) as http:
        assert sources("hgf<", [1, 2, 3], cache="private") == {"model"}
        assert sources("hgf<", [1, 2, 3], speculation={"report": True, "max_draft_tokens": 0}) == {"model"}
        assert sources("kji<", [1, 2, 3.1]) == {"model"}  # nobody was told of the ones before
        assert sources("cba<", [3, -2, 1]) == sources("edc<", [1, 2]) == sources("hfd<", None) == {"model"}
        assert "trie" in sources("geb<", [2, 4, 6.1])
        assert sources("mlg<", [1, 2, 3], cache="private") == {"model"}


def test_nothing_is_told_where_nobody_asks(http: httpx.Client) -> None:
    for path in BODIES:
        for speculation in (None, {"report": False}, {"strategy": "llma"}):
            (choice,) = http.post(path, json=body(path, speculation=speculation)).raise_for_status().json()["choices"]
            assert "speculation" not in choice


def test_an_echo_belongs_to_no_step(http: httpx.Client) -> None:
    (text,), (steps,), _ = whole(http, COMPLETIONS, echo=True)
    assert text == "hgf<" + spelled(steps)


@pytest.mark.parametrize("path", BODIES)
def test_acceptance_is_told_by_the_names_of_vllm(circle_engine: LocalEngine, path: str) -> None:
    """The figures are those of the report, with the usage only, and null where there are several choices."""
    with client_of(Service(circle_engine, TOKENIZER, spec_decode_metrics=True)) as http:
        answer = http.post(path, json=body(path)).raise_for_status().json()
        steps = [step for step in answer["choices"][0]["speculation"]["steps"] if step["drafted"]]
        told, accepted = answer["metrics"]["speculative_decoding"], sum(step["accepted"] for step in steps)
        drafted, counts = sum(step["drafted"] for step in steps), [step["accepted"] for step in steps]
        assert accepted > 0 and told == {
            "mean_acceptance_length": 1 + accepted / len(steps), "draft_acceptance_rate": accepted / drafted,
            "acceptance_histogram": [counts.count(count) for count in range(max(step["drafted"] for step in steps) + 1)],
            "num_spec_steps": len(steps), "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted,
            "num_spec_tokens": max(step["drafted"] for step in steps),
        }  # fmt: skip
        *chunks, last = read_stream(http, path, body(path, stream_options={"include_usage": True}))
        assert last["metrics"] == answer["metrics"] and not any("metrics" in chunk for chunk in chunks)
        assert http.post(path, json=body(path, n=2)).json()["metrics"] is None
        plain = http.post(path, json=body(path, speculation={"max_draft_tokens": 0})).json()["metrics"]["speculative_decoding"]
        assert (plain["mean_acceptance_length"], plain["acceptance_histogram"], plain["num_spec_tokens"]) == (1, [0], 0)
    with client_of(Service(circle_engine, TOKENIZER)) as http:
        assert "metrics" not in http.post(path, json=body(path)).json()
