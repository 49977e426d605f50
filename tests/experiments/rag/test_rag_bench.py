"""The day as clients play it, what is made of what they were told, and the bench on a server with the demo model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from decoding.request import PLAIN
from experiments.bench.run import arguments, run
from experiments.rag.bench import BENCH, Setting, results_of, settings, wrong
from experiments.rag.traffic import PAIRED, Asked
from experiments.rag.users import WARM_UP, Told, Users, api_key, pair_tenants
from experiments.report.speeds import rag, rag_pairs
from experiments.report.tables import headlines

FIRST = Asked("1", 0.0, "new", "bank", 0, ("It is open.",), ("Is it open?",))
NEXT = Asked("2", 0.1, "conversation", "bank", 0, ("It is open.",), ("Is it open?", "Really?"), ("1",))
OTHER = Asked("3", 0.2, "other_tenant", "school", 0, ("It is open.",), ("Is it open?",))


class Server:
    """Answers each request with its number, and keeps what was asked."""

    def __init__(self, status: int = 200) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._status = status

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.headers["authorization"].removeprefix("Bearer "), json.loads(request.content)))
        if self._status != 200:
            return httpx.Response(self._status, json={"error": {"code": "no", "message": "not today"}})
        usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
        parts = [{"role": "assistant", "content": ""}, {"content": "answer "}, {"content": str(len(self.asked))}]
        events = [{"choices": [{"index": 0, "delta": part}]} for part in parts] + [{"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return httpx.Response(200, text=text + "data: [DONE]\n\n")

    def users(self, client: httpx.AsyncClient, references: bool = True) -> Users:
        return Users(client, "tiny", 12, references)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self), base_url="http://there")


def test_a_day_is_played_with_the_servers_own_answers_and_each_tenants_key() -> None:
    server, notes = Server(), list[str]()

    async def play() -> tuple[dict[str, Told], float]:
        async with server.client() as client:
            return await server.users(client).play([FIRST, NEXT, OTHER], 3, 0.2, notes.append)

    told, seconds = asyncio.run(play())
    assert all(told[key].text.startswith("answer ") for key in "123") and notes[-1] == "3 of 3 requests"
    assert seconds >= 0.04 and (told["1"].tokens, told["1"].prompt_tokens, told["1"].cached_tokens) == (4, 9, 5)
    assert told["1"].error is None and 0 < told["1"].first_s <= told["1"].seconds
    bodies = {len(body["messages"]): body for key, body in server.asked if key == api_key("bank")}
    assert bodies[4]["messages"][2] == {"role": "assistant", "content": told["1"].text}
    assert bodies[2]["reference_documents"] == ["It is open."] and bodies[2]["temperature"] == 0 and bodies[2]["max_tokens"] == 12
    assert Counter(key for key, _ in server.asked) == {api_key("bank"): 2, api_key("school"): 1}


def test_pairs_are_asked_by_tenants_that_had_the_first_and_ones_that_had_nothing() -> None:
    server = Server()

    async def play() -> dict[str, Told]:
        async with server.client() as client:
            return await server.users(client, references=False).play_pairs([(FIRST, NEXT), (FIRST, OTHER)], lambda note: None)

    told = asyncio.run(play())
    assert [key.removeprefix(api_key("")) for key, _ in server.asked] == [
        "warm-0", "cold-0", "warm-0", "stranger", "cold-1", "warm-1"
    ]  # fmt: skip
    assert {tenant: one.text[-1] for tenant, one in told.items()} == {"cold-0": "2", "warm-0": "3", "cold-1": "5", "warm-1": "6"}
    assert {key.removeprefix(api_key("")) for key, _ in server.asked} <= set(pair_tenants(2))
    assert server.asked[1][1]["messages"][2]["content"] == "answer 1" and "reference_documents" not in server.asked[1][1]


def test_a_request_that_fails_is_told() -> None:
    server = Server(503)

    async def play(pairs: bool) -> tuple[dict[str, Told], float]:
        async with server.client() as client:
            if pairs:
                await server.users(client).play_pairs([(FIRST, NEXT)], lambda note: None)
            return await server.users(client).play([FIRST, NEXT], 1, 0, lambda note: None)

    told, _ = asyncio.run(play(False))
    assert told["1"].error is not None and "not today" in told["1"].error and told["2"].tokens == 0
    with pytest.raises(RuntimeError, match=r"pair 1 failed: .*not today"):
        asyncio.run(play(True))


def told(kind: str, text: str, seconds: float) -> dict[str, Any]:
    return asdict(Told(kind, text, seconds, seconds / 4, 10, 100, 50, None))


def results() -> dict[str, Any]:
    """Of three settings over two rounds, in which two have another answer once, and of a pair of each kind."""
    settings = [Setting("plain"), Setting("2", 2), Setting("vLLM", vllm="")]
    turns = [
        {"setting": setting.name, "round": number, "seconds": 2.0}
        | {"told": {"1": told("new", "a", 1.0), "2": told("identical", answers[number], 0.5 / (1 + number))}}
        for setting, answers in zip(settings, ("bb", "bc", "bc"), strict=True)
        for number in range(2)
    ]
    both = {f"{way}-{at}": told(kind, "b", s) for at, kind in enumerate(PAIRED) for way, s in (("cold", 1.0), ("warm", 0.5))}
    turns += [{"setting": "pairs", "round": 0, "seconds": 0.0, "told": both}, turns[0] | {"round": 2}]
    return results_of(turns, settings, len(PAIRED), arguments(BENCH, ["--workloads", "w"]))


def test_figures_are_told_by_kind() -> None:
    found = results()
    row = found["settings"]["plain"]
    assert row["kinds"]["identical"]["tokens_per_s"] == [20.0, 40.0] and row["all"]["requests"] == 4
    assert row["throughput"] == [10.0, 10.0] and row["kinds"]["new"]["ttft_ms"] == {"p50": 250.0, "p95": 250.0}
    assert (row["differing"], found["settings"]["2"]["differing"], "differing" in found["settings"]["vLLM"]) == (0, 1, False)
    assert found["pairs"]["identical"]["ratio"] == [2.0, 2.0, 2.0]
    assert wrong(found, arguments(BENCH, ["--workloads", "w"])) == ["2: 1 differing"]


def test_tables_of_a_record() -> None:
    found = results()
    table, pairs = rag(found), rag_pairs(found)
    assert table.rows[1] == ("2", "10", "10", "30 (20-40)", "188 (250)", "50%", "3 of 4")
    assert pairs.rows[0] == ("identical", "10", "20", "2.00", "250, 125")
    assert len(headlines({"name": "bench-rag", "results": found})) == 2
    assert len(headlines({"name": "bench-rag", "results": found | {"pairs": {}}})) == 1


def test_settings_turn_one_thing_on_at_a_time() -> None:
    found = {setting.name: setting for setting in settings([1, 2])}
    assert list(found)[:3] == ["plain", "remembers nothing", "1 replica"]
    assert found["plain"].options == (f"speculation.strategy={PLAIN}",)
    shared, apart = found["2 replicas, shared, by load"], found["2 replicas, apart, by load"]
    assert shared.replicas == 2 and shared.options[0] == "cache.enabled=true" and apart.options[0] == "cache.enabled=false"
    nothing = ["--pairs", "0", "--rounds", "0"]
    for options in (["--replicas", "0"], ["--requests", "0"], ["--seconds", "-1"], nothing, ["--peers", "other"]):
        with pytest.raises(SystemExit, match="2"):
            arguments(BENCH, ["--workloads", "w", *options])
    assert WARM_UP not in pair_tenants(3)


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_a_day_on_servers_that_draft_and_one_that_does_not(tmp_path: Path) -> None:
    records = [
        {"id": f"w/{n}", "ref_kind": "doc", "output": "o", "references": [f"The harbour of town {n} opens at {n}."]}
        | {"prompt": f"docs: ...\nquery: when does the harbour of town {n} open\nanswer:"}
        for n in range(20)
    ]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sizes = ["--requests", "8", "--seconds", "0", "--rounds", "1", "--pairs", "1", "--replicas", "1", "--max-tokens", "12"]
    out = tmp_path / "out"
    files = ["--workloads", str(tmp_path), "--out", str(out), "--kept", str(tmp_path / "kept")]
    for _ in range(2):  # the second one finds all that it asks
        assert run(BENCH, ["--model", "demo_model", *files, *sizes]) == 0
    found, again = (json.loads(path.read_text())["results"] for path in sorted(out.glob("*.json")))
    assert found == again and len(list(out.glob("*.svg"))) == 2
    assert list(found["settings"]) == ["plain", "remembers nothing", "1 replica"]
    assert all(row["differing"] == row["failed"] == 0 for row in found["settings"].values())
    assert found["pairs"]["identical"]["warm"]["cached_tokens"] > 0 == found["pairs"]["other_tenant"]["warm"]["cached_tokens"]
