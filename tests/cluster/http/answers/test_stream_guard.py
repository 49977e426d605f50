"""Guarded streams: what a client reads is what it reads without a guard, and what the packets show does not follow the steps."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from outrider.cluster.http.answers import stream_guard
from outrider.cluster.http.answers.stream_guard import PAD_BYTES, StreamGuard, StreamShape, paced
from outrider.cluster.http.api import Service
from outrider.cluster.serving.generation import EnginePort
from outrider.configs.slices import ServerOptions
from outrider.decoding.request import FinishReason, StepOutput, TokenLogprob, merge_outputs
from tests.cluster.circle import TEXT, TOKENIZER, served
from tests.helpers.waiting import eventually

PERIOD_S = 0.02
GUARDS = ("cadence", "pad", "both")
PLAIN = {"speculation": {"strategy": "autoregressive"}}
Outputs = AsyncGenerator[tuple[int, StepOutput], None]


@pytest.fixture(scope="module")
def urls(circle_engine: EnginePort) -> Iterator[Callable[[str], str]]:
    """The address of a server by its guard."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_guard, "PERIOD_S", PERIOD_S)

        @functools.cache
        def url(guard: Any) -> str:
            server = ServerOptions(stream_guard=guard)
            return stack.enter_context(served(Service(circle_engine, TOKENIZER, guard=StreamGuard(server))))

        yield url


def completion(**changes: Any) -> dict[str, Any]:
    return TEXT | {"prompt": "<abcdefgh-<abc", "max_tokens": 150, "stream": True, "ignore_eos": True} | changes


def events(url: str, body: dict[str, Any], path: str = "completions") -> list[bytes]:
    """The events of a stream as they are on the wire, the last of them ``[DONE]``."""
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/v1/{path}", json=body) as response:
        assert response.status_code == 200, response.read()
        wire = b"".join(response.iter_bytes())
    found = [event + b"\n\n" for event in wire.split(b"\n\n")[:-1]]
    assert found.pop() == b"data: [DONE]\n\n"
    return found


def chunks(found: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in found]


def text(found: list[bytes], choice: int = 0) -> str:
    pieces = (entry for chunk in chunks(found) for entry in chunk["choices"] if entry["index"] == choice)
    return "".join(piece["text"] for piece in pieces)


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS)
def test_client_reads_the_same(urls: Callable[[str], str], guard: str) -> None:
    def read(url: str) -> tuple[Any, ...]:
        texts, reasons, logprobs, roles = ["", ""], [None, None], [[], []], 0
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            stream = client.chat.completions.create(
                model="circle", messages=[{"role": "user", "content": "<abc"}], max_tokens=80, temperature=0.7, seed=3, n=2,
                logprobs=True, top_logprobs=2, stop=["zz"], stream=True, stream_options={"include_usage": True},
            )  # fmt: skip
            for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    roles += choice.delta.role == "assistant"
                    reasons[choice.index] = choice.finish_reason
                    logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
                usage = chunk.usage
        assert usage is not None
        return texts, reasons, logprobs, roles, usage.prompt_tokens, usage.completion_tokens

    assert read(urls(guard)) == read(urls("none"))


def test_padded_events_have_one_size_whatever_they_hold(urls: Callable[[str], str]) -> None:
    sizes = [set(map(len, events(urls("pad"), completion(**extra)))) for extra in ({}, PLAIN)]
    assert sizes[0] == sizes[1] == {PAD_BYTES}
    bare = [set(map(len, events(urls("none"), completion(**extra)))) for extra in ({}, PLAIN)]
    assert bare[0] != bare[1]  # what a guard is for
    long = chunks(events(urls("pad"), completion(echo=True, prompt="<abc" * 300, max_tokens=2)))
    assert len(long[0]["choices"][0]["text"]) >= 1200
    first, again = (events(urls("pad"), completion(max_tokens=2)) for _ in range(2))
    assert [len(event) for event in first] == [len(event) for event in again]
    assert chunks(first)[0]["obfuscation"] != chunks(again)[0]["obfuscation"]


@pytest.mark.parametrize("length", [1, 40, 200, 511, 512, 513])
def test_padding_reaches_the_next_multiple(length: int) -> None:
    event = "data: " + json.dumps({"text": "ü" * length}, ensure_ascii=False) + "\n\n"
    padded = StreamShape(pad_bytes=64).pad(event)
    assert len(padded.encode()) % 64 == 0 and 17 <= len(padded.encode()) - len(event.encode()) < 64 + 17
    data = json.loads(padded.removeprefix("data: "))
    assert data.pop("obfuscation") is not None and data == {"text": "ü" * length}


@pytest.mark.slow
def test_cadence_sends_one_chunk_a_period(urls: Callable[[str], str]) -> None:
    for guard in ("cadence", "both"):
        began = time.monotonic()
        found = events(urls(guard), completion(max_tokens=200, **PLAIN))
        elapsed_s = time.monotonic() - began
        assert text(found) == text(events(urls("none"), completion(max_tokens=200)))
        assert 2 <= len(found) <= elapsed_s / PERIOD_S + 2  # one each, and one that says why it ended
        assert chunks(found)[-1]["choices"][0]["finish_reason"] == "length"


def test_both_together_show_neither_steps_nor_tokens(urls: Callable[[str], str]) -> None:
    body = completion(max_tokens=60, stream_options={"include_usage": True})
    for extra in ({}, PLAIN):
        assert set(map(len, events(urls("both"), body | extra))) == {PAD_BYTES}


def test_a_request_decides_on_its_own_padding(urls: Callable[[str], str]) -> None:
    padded = events(urls("none"), completion(stream_options={"include_obfuscation": True}))
    assert set(map(len, padded)) == {PAD_BYTES}
    bare = events(urls("pad"), completion(stream_options={"include_obfuscation": False}))
    assert all("obfuscation" not in chunk for chunk in chunks(bare))
    assert text(padded) == text(bare)


def test_reports_of_steps_are_refused_under_a_guard(urls: Callable[[str], str]) -> None:
    for guard in GUARDS:
        answer = httpx.post(f"{urls(guard)}/v1/completions", json=completion(speculation={"report": True}), timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "speculation.report", answer.text
        assert "server.stream_guard" in answer.json()["error"]["message"]


def test_a_paced_stream_that_is_left_frees_its_slot(urls: Callable[[str], str]) -> None:
    url = urls("both")
    body = completion(max_tokens=10_000, n=2)
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
    eventually(lambda: httpx.get(f"{url}/health", timeout=60).json()["running"] == 0)


def output(tokens: str, reason: FinishReason | None = None) -> StepOutput:
    entries = tuple(TokenLogprob(ord(token), -1.0, ()) for token in tokens)
    return StepOutput("r/0", tuple(map(ord, tokens)), tokens, reason, logprobs=entries)


def test_bursts_and_single_tokens_leave_alike() -> None:
    """Whatever comes between two ticks, one output leaves: a burst as a single token, and nothing as either."""

    async def shape_of(bursts: list[list[str]]) -> tuple[list[int], str]:
        arrivals: asyncio.Queue[StepOutput] = asyncio.Queue()

        async def source() -> Outputs:
            while True:
                item = await arrivals.get()
                yield 0, item
                if item.finish_reason is not None:
                    return

        leaving, whole = [], ""
        feed = iter(bursts)
        async for index, merged in paced(source(), 1, 0.01):
            leaving.append(index)
            whole += merged.text
            assert merged.token_ids == tuple(map(ord, merged.text)) == tuple(entry.token_id for entry in merged.logprobs or ())
            for tokens in next(feed, ()):
                reason = FinishReason.STOP if tokens.endswith(".") else None
                arrivals.put_nowait(output(tokens, reason))
            await asyncio.sleep(0)  # the reader takes what is there
        return leaving, whole

    speculated = asyncio.run(shape_of([["abcd", "ef"], [], ["ghi"], ["jk."]]))
    plain = asyncio.run(shape_of([["abc"], ["def"], ["ghi"], ["j", "k."]]))
    assert speculated == plain == ([0] * 5, "abcdefghijk.")


def test_a_failure_comes_after_what_came_before_it() -> None:
    async def source() -> Outputs:
        yield 0, output("ab")
        yield 1, output("c")
        raise ValueError("the engine failed")

    async def read() -> list[str]:
        stream = paced(source(), 2, 0.01)
        seen = [(await anext(stream))[1].text, (await anext(stream))[1].text]
        with pytest.raises(ValueError, match="the engine failed"):
            await anext(stream)
        return seen

    assert asyncio.run(read()) == ["ab", "c"]


def test_closing_a_paced_stream_closes_its_source() -> None:
    closed = []

    async def source() -> Outputs:
        try:
            for number in itertools.count():
                await asyncio.sleep(0.001)
                yield 0, output(chr(97 + number % 26))
        finally:
            closed.append(True)

    async def leave() -> None:
        stream = paced(source(), 1, 0.01)
        await anext(stream)
        await stream.aclose()
        assert closed == [True]

    asyncio.run(leave())


def test_outputs_merge_in_order() -> None:
    merged = merge_outputs([output("ab"), output(""), output("c", FinishReason.LENGTH)])
    assert (merged.text, merged.token_ids, merged.finish_reason) == ("abc", (97, 98, 99), FinishReason.LENGTH)
    assert [entry.token_id for entry in merged.logprobs or ()] == [97, 98, 99]
    assert merge_outputs([]).token_ids == () and merge_outputs([]).finish_reason is None
