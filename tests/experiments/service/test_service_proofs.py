"""The proofs of the service: what a client makes of answers, figures of loads, and what records keep of other people's tools."""

from __future__ import annotations

import asyncio
import json
import socket
from importlib import import_module
from typing import Any

import httpx
import pytest

from experiments.bench.run import arguments, run_named
from experiments.faults import replicas
from experiments.service import clients, disconnects, fairness, fuzz, overhead, overload
from experiments.service.asks import KINDS, Answer, Ask, Choice, ask, make_asks
from experiments.service.overhead import Timed, medians, summary
from experiments.service.overload import Outcome, Phase

ENTRY = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}


def told(*events: dict[str, Any]) -> Answer:
    """What a client makes of some events."""
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


def test_every_part_of_an_answer_that_is_another_one_is_named() -> None:
    right = told(chunk(0, "ab", "stop", {"content": [ENTRY]}))
    assert told(chunk(0, "ac", "stop", {"content": [ENTRY]})).differs(right) == ["choices[0].text"]
    assert told(chunk(0, "ab", "length", {"content": [ENTRY]})).differs(right) == ["choices[0].finish_reason"]
    assert told(chunk(0, "ab", "stop", {"content": [ENTRY, ENTRY]})).differs(right) == ["choices[0].tokens"]
    assert told(chunk(0, "ab", "stop", {"content": [ENTRY | {"logprob": -0.6}]})).differs(right) == ["logprobs"]
    assert told(chunk(0, "ab", "stop", {"content": [ENTRY | {"logprob": -0.5001}]})).differs(right) == []
    broken = told(chunk(0, "ab", "stop", {"content": [ENTRY]}))
    broken.error = "gone"
    assert broken.differs(right) == ["error"]
    assert Answer(400, "no").differs(right) == ["status", "error", "choices"]


def test_what_is_near_and_what_is_counted() -> None:
    def answer(**changes: Any) -> Answer:
        choice = Choice(**({"text": "ab", "finish_reason": "stop", "tokens": ["a", "b"], "logprobs": [-0.1, -0.2]} | changes))
        return Answer(200, choices={0: choice}, usage={"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}})

    near = answer(logprobs=[-0.1, -0.21])
    assert near.differs(answer(), 0.02) == [] and near.gap(answer()) == pytest.approx(0.01)
    assert answer(logprobs=[-0.1, -0.3]).differs(answer(), 0.02) == ["logprobs"]
    other = answer()
    other.usage = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
    assert other.differs(answer()) == ["usage.completion_tokens"]


def test_a_stream_that_is_cut_off_is_told() -> None:
    events = "".join(f"data: {json.dumps(chunk(0, text))}\n\n" for text in ("a", "b"))

    async def heard(body: str) -> Answer:
        answers = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
        async with httpx.AsyncClient(transport=answers, base_url="http://there") as client:
            return await ask(client, "tiny", Ask("", "chat/completions", {"stream": True}))

    whole, cut = asyncio.run(heard(events + "data: [DONE]\n\n")), asyncio.run(heard(events))
    assert (whole.texts, whole.error) == ({0: "ab"}, None)
    assert (cut.texts, cut.error) == ({0: "ab"}, "the stream ended without its last event")


def test_requests_come_in_all_kinds_with_seeds_of_their_own_and_again_the_same() -> None:
    asks = make_asks(2 * len(KINDS), 30, seed=5)
    assert [request.kind for request in asks] == [kind[0] for kind in KINDS] * 2
    assert len({request.body["seed"] for request in asks}) == len(asks)
    assert asks == make_asks(2 * len(KINDS), 30, seed=5) != make_asks(2 * len(KINDS), 30, seed=6)
    assert {request.kind for request in make_asks(4, 30, 0, ["json", "whole"])} == {"json", "whole"}


def test_no_answer_is_an_error_of_the_request() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def run() -> Answer:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            return await ask(client, "tiny", make_asks(1, 8, 0)[0])

    heard = asyncio.run(run())
    assert heard.texts == {} and heard.error is not None and heard.error.startswith("ConnectError")


def test_a_load_is_summed_up_by_what_became_of_requests() -> None:
    phase = Phase("overload", seconds=2.0)
    phase.outcomes = [
        Outcome(200, 1.0, 0.25, None),
        Outcome(200, 3.0, None, None),
        Outcome(200, 0.5, 0.1, None, whole=False, note="cut"),
        Outcome(429, 0.01, None, "2"),
        Outcome(429, 0.03, None, None),
        Outcome(0, 5.0, None, None, whole=False, note="ReadError"),
    ]
    made = phase.summary()
    assert made["statuses"] == {"200": 3, "429": 2, "0": 1}
    assert (made["accepted_per_s"], made["latency_s"]["p50"], made["ttft_s"]["max"]) == (1.0, 2.0, 0.25)
    assert (made["refused_after_s"]["p50"], made["without_retry_after"], made["retry_after"]) == (0.02, 1, {"2": 1})
    assert (made["failed"], dict(made["failures"])) == (2, {"cut": 1, "ReadError": 1})


def test_what_lies_between_the_engine_and_a_client() -> None:
    timed = Timed(
        101,
        first_s=0.030,
        whole_s=0.530,
        engine_first_s=0.025,
        engine_whole_s=0.500,
        engine_decode_s=0.475,
        events=50,
        received=9999,
    )
    assert timed.added_first_ms == pytest.approx(5.0)
    assert timed.rate == pytest.approx(0.5 / 0.53) and timed.decode_rate == pytest.approx(0.95)
    first, second = summary([timed]), summary([timed])
    second["added_ttft_ms"] = dict.fromkeys(first["added_ttft_ms"], 7.0)
    assert first["engine_tokens_per_s_p50"] == 202.0 and first["tokens_per_event"] == 2.02
    assert medians([first, second, second])["added_ttft_ms"]["p50"] == 7.0


def test_what_a_tool_printed_is_kept_without_folders_and_colours() -> None:
    printed = "\x1b[32mfine\x1b[0m\n\nwrote /home/someone/there/results.json\nasked http://127.0.0.1:8000/v1/models\nold\rnew\n"
    assert clients.tail(printed) == ["fine", "wrote /results.json", "asked http://127.0.0.1:8000/v1/models", "old", "new"]
    assert (
        clients.shown(["locust", "-f", "/home/someone/there/file.py", "--host", "http://h:1"])
        == "locust -f /file.py --host http://h:1"
    )


def test_options_that_cannot_be_are_refused() -> None:
    for bench, options in (
        (replicas.BENCH, ["--requests", "0"]),
        (disconnects.BENCH, ["--waves", "0"]),
        (overload.BENCH, ["--factor", "0"]),
        (overhead.BENCH, ["--max-tokens", "1"]),
        (clients.BENCH, ["--users", "0"]),
        (fairness.BENCH, ["--tenants", "1"]),
        (fuzz.BENCH, ["--seconds", "0"]),
    ):
        with pytest.raises(SystemExit) as ended:
            arguments(bench, options)
        assert ended.value.code == 2


@pytest.mark.parametrize("room", ["service", "faults", "bench.memory"])
def test_every_bench_of_a_room_explains_itself(room: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = import_module(f"experiments.{room}.__main__")
    (benches,) = (value for name, value in vars(main).items() if name.isupper())
    for name in benches:
        with pytest.raises(SystemExit, match="0"):
            run_named(benches, room, [name, "--help"])
        assert f"usage: {room} {name} " in capsys.readouterr().out
    assert run_named(benches, room, ["nothing"]) == 2 and "usage: " in capsys.readouterr().err
