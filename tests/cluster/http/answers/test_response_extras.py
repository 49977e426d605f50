"""What vLLM's clients and evaluation harnesses ask for besides a text: scored prompts, token ids, usage as it grows."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.cluster.circle import CHATS, CIRCLE, COMPLETIONS, TEXT, byte_ids, read_stream


def complete(http: httpx.Client, prompt: Any = "<", **fields: Any) -> dict[str, Any]:
    body = TEXT | {"prompt": prompt, "max_tokens": 6} | fields
    return dict(http.post(COMPLETIONS, json=body).raise_for_status().json())


def chunks(http: httpx.Client, prompt: Any = "<", **fields: Any) -> list[dict[str, Any]]:
    return read_stream(http, COMPLETIONS, TEXT | {"prompt": prompt, "max_tokens": 6} | fields)


@pytest.mark.parametrize("speculation", [{}, {"max_draft_tokens": 0}])
def test_a_prompt_is_scored_as_it_would_have_been_said(http: httpx.Client, speculation: dict[str, Any]) -> None:
    said = complete(http, max_tokens=16, logprobs=2, speculation=speculation)["choices"][0]
    whole = complete(http, "<" + said["text"], max_tokens=0, echo=True, logprobs=2, speculation=speculation)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("<" + said["text"], "length")
    assert whole["usage"]["completion_tokens"] == 0 and whole["usage"]["prompt_tokens"] == 17
    told, before = choice["logprobs"], said["logprobs"]
    assert told["tokens"] == ["<", *before["tokens"]]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(before["token_logprobs"], abs=1e-4)
    assert [set(top) for top in told["top_logprobs"][1:]] == [set(top) for top in before["top_logprobs"]]
    assert told["text_offset"] == [0, *(offset + 1 for offset in before["text_offset"])]
    streamed = chunks(http, "<" + said["text"], max_tokens=0, echo=True, logprobs=2)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]
    assert [chunk["choices"][0]["logprobs"] for chunk in streamed if chunk["choices"][0]["logprobs"]] == [told]


def test_echo_goes_on_with_the_text(http: httpx.Client) -> None:
    (choice,) = complete(http, ["<abé"], max_tokens=5, echo=True, logprobs=0)["choices"]
    told = choice["logprobs"]
    assert choice["text"] == "<abé_日:" and len(told["tokens"]) == 5 + 5 == len(told["token_logprobs"])
    assert told["text_offset"] == [0, 1, 2, 3, 3, 4, 5, 5, 5, 6]


def test_prompt_logprobs_in_both_shapes(http: httpx.Client) -> None:
    ids = byte_ids("<ab")
    answer = complete(http, [ids, ids[:2]], prompt_logprobs=1, n=2)
    first, second, third, _ = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert first == second and first[:2] == third and first[0] is None
    entry = first[1][str(ids[1])]
    assert entry == {"logprob": entry["logprob"], "rank": 1, "decoded_token": "a"} and entry["logprob"] < 0
    body = {"model": "circle", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2, "prompt_logprobs": 0}
    chat = http.post(CHATS, json=body).raise_for_status().json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and "prompt_logprobs" not in chat["choices"][0]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])


def test_token_ids(http: httpx.Client) -> None:
    (choice,) = complete(http, return_token_ids=True)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (byte_ids("<"), byte_ids("abcdef"))
    streamed = [chunk["choices"][0] for chunk in chunks(http, CIRCLE[:10], return_token_ids=True, max_tokens=9)]
    assert [token for part in streamed for token in part["token_ids"]] == byte_ids("é_日:🦙")[:9]
    assert streamed[0]["prompt_token_ids"] == byte_ids(CIRCLE[:10]) and "prompt_token_ids" not in streamed[-1]
    body: dict[str, Any] = {"model": "circle", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
    body |= {"temperature": 0, "return_token_ids": True}
    chat = http.post(CHATS, json=body).raise_for_status().json()
    assert chat["prompt_token_ids"] == byte_ids("[user]ab>") and chat["choices"][0]["token_ids"] == byte_ids("<a")


def test_special_tokens_have_offsets(http: httpx.Client) -> None:
    (choice,) = complete(http, "stuv", max_tokens=5, ignore_eos=True, skip_special_tokens=False, logprobs=0)["choices"]
    assert choice["text"] == "w.</s><a" and choice["logprobs"]["text_offset"] == [0, 1, 2, 6, 7]


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(http, stream_options=options)]
    assert counts[-1] == 6 and counts[0] > 0 and counts == sorted(counts)
    plain = [chunk["usage"] for chunk in chunks(http, stream_options={"include_usage": True})]
    assert plain[-1] and not any(plain[:-1])
