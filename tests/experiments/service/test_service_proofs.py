"""The asking client, and the commands of the room."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from outrider.experiments.bench.__main__ import COMMANDS, main
from outrider.experiments.service.asks import KINDS, Answer, Ask, Choice, ask, make_asks

ENTRY = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
RIGHT = {"text": "ab", "finish_reason": "stop", "tokens": ["a", "b"], "logprobs": [-0.1, -0.2]}


def told(*events: dict[str, Any]) -> Answer:
    made = Answer()
    for event in events:
        made.add(event)
    return made


def chunk(index: int, text: str, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish, "logprobs": logprobs}]}


def test_a_stream_and_a_whole_answer_are_the_same_to_a_client() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    streamed = told(
        chunk(1, "x"),
        chunk(0, "a", logprobs={"content": [ENTRY]}),
        chunk(0, "b", "stop", {"content": [ENTRY | {"token": "b"}]}),
        chunk(1, "", "length"),
        {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 2}}},
    )
    logprobs = {"content": [ENTRY, ENTRY | {"token": "b"}]}
    choices = [
        {"index": 0, "message": {"content": "ab"}, "finish_reason": "stop", "logprobs": logprobs},
        {"index": 1, "message": {"content": "x"}, "finish_reason": "length", "logprobs": None},
    ]
    whole = told({"choices": choices, "usage": usage})
    assert whole.texts == {0: "ab", 1: "x"} and whole.choices[0].tokens == ["a", "b"] and whole.usage == usage
    assert streamed.differs(whole) == []


@pytest.mark.parametrize(
    ("changes", "near", "differs"),
    [
        ({"text": "ac"}, 0.001, ["choices[0].text"]),
        ({"finish_reason": "length"}, 0.001, ["choices[0].finish_reason"]),
        ({"tokens": ["a", "c"]}, 0.001, ["choices[0].tokens"]),
        ({"token_ids": [1]}, 0.001, ["choices[0].token_ids"]),
        ({"calls": [["f", "{}"]]}, 0.001, ["choices[0].calls"]),
        ({"logprobs": [-0.1, -0.21]}, 0.001, ["logprobs"]),
        ({"logprobs": [-0.1, -0.21]}, 0.02, []),
    ],
)
def test_every_different_part_of_an_answer_is_named(changes: dict[str, Any], near: float, differs: list[str]) -> None:
    right = Answer(200, choices={0: Choice(**RIGHT)})
    assert Answer(200, choices={0: Choice(**RIGHT | changes)}).differs(right, near) == differs
    assert Answer(200, error="gone", choices={0: Choice(**RIGHT)}).differs(right) == ["error"]
    assert Answer(400, "no").differs(right) == ["status", "error", "choices"]
    used = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    assert Answer(200, choices={0: Choice(**RIGHT)}, usage=used).differs(right) == ["usage.completion_tokens"]


def test_a_broken_stream_and_a_missing_server_are_errors() -> None:
    events = "".join(f"data: {json.dumps(chunk(0, text))}\n\n" for text in ("a", "b"))

    async def heard(answer: httpx.Response | None) -> Answer:
        transport = None if answer is None else httpx.MockTransport(lambda request: answer)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            base = f"http://127.0.0.1:{probe.getsockname()[1]}"
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await ask(client, "tiny", Ask("", "chat/completions", {"stream": True}))

    whole, cut = (asyncio.run(heard(httpx.Response(200, text=text))) for text in (f"{events}data: [DONE]\n\n", events))
    assert (whole.texts, whole.error) == ({0: "ab"}, None) and whole.first_s is not None and whole.seconds >= whole.first_s
    assert (cut.texts, cut.error) == ({0: "ab"}, "the stream ended without its last event")
    refusal = {"error": {"code": "busy", "message": "later"}}
    refused = asyncio.run(heard(httpx.Response(429, json=refusal, headers={"Retry-After": "2"})))
    assert (refused.status, refused.code, refused.retry_after, refused.broke_off) == (429, "busy", "2", False)
    gone = asyncio.run(heard(None))
    assert gone.texts == {} and gone.error is not None and gone.error.startswith("ConnectError")


def test_requests_are_of_all_kinds_with_their_own_seeds_and_reproducible() -> None:
    asks = make_asks(2 * len(KINDS), 30, seed=5)
    assert [request.kind for request in asks] == [kind[0] for kind in KINDS] * 2
    assert len({request.body["seed"] for request in asks}) == len(asks)
    assert asks == make_asks(2 * len(KINDS), 30, seed=5) != make_asks(2 * len(KINDS), 30, seed=6)
    assert {request.kind for request in make_asks(4, 30, 0, ["json", "whole"])} == {"json", "whole"}


@pytest.mark.parametrize("name", COMMANDS["service"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["service", name, "--help"])
    assert f"usage: outrider bench service {name} " in capsys.readouterr().out
