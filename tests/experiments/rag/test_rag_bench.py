"""A day of requests as clients play it, its statistics, and the bench over stub servers and one real one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.cache_service.namespace import hash_key
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import PLAIN, Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.text.chat import render_chat
from outrider.experiments.bench.record import ROOT
from outrider.experiments.bench.run import arguments, run
from outrider.experiments.rag import bench, users
from outrider.experiments.rag.bench import BENCH, Setting, results_of, wrong
from outrider.experiments.rag.traffic import PAIRED, TENANTS, make_day, make_pairs, read_items
from outrider.experiments.rag.users import Told, pair_tenants
from outrider.experiments.report.speeds import rag, rag_pairs
from outrider.experiments.report.tables import headlines

DAY = ["--requests", "8", "--seconds", "0", "--rounds", "1", "--pairs", "1", "--replicas", "1", "--max-tokens", "12"]


def events(text: str, cached: int) -> str:
    """Return a stream of two pieces of text and the usage."""
    usage = {"prompt_tokens": 900, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": cached}}
    parts = [{"role": "assistant", "content": ""}, {"content": text[:3]}, {"content": text[3:]}]
    sent = [{"choices": [{"index": 0, "delta": part}]} for part in parts] + [{"choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in sent) + "data: [DONE]\n\n"


def told(kind: str, text: str, seconds: float) -> dict[str, Any]:
    return asdict(Told(kind, text, seconds, seconds / 4, 10, 100, 50, None))


def results() -> dict[str, Any]:
    """Return results of three settings over two rounds, two of them with another answer once, and of a pair of each kind."""
    found = [Setting("plain"), Setting("2", 2), Setting("vLLM", vllm="")]
    turns = [
        {"setting": setting.name, "round": number, "seconds": 2.0}
        | {"told": {"1": told("new", "a", 1.0), "2": told("identical", answers[number], 0.5 / (1 + number))}}
        for setting, answers in zip(found, ("bb", "bc", "bc"), strict=True)
        for number in range(2)
    ]
    both = {f"{way}-{at}": told(kind, "b", s) for at, kind in enumerate(PAIRED) for way, s in (("cold", 1.0), ("warm", 0.5))}
    turns += [{"setting": "pairs", "round": 0, "seconds": 0.0, "told": both}, turns[0] | {"round": 2}]
    return results_of(turns, found, len(PAIRED), 2)


def test_statistics_by_kind_and_their_tables() -> None:
    found = results()
    row = found["settings"]["plain"]
    assert row["kinds"]["identical"]["tokens_per_s"] == [20.0, 40.0] and row["all"]["requests"] == 4
    assert row["throughput"] == [10.0, 10.0] and row["kinds"]["new"]["ttft_ms"] == {"p50": 250.0, "p95": 250.0}
    assert (row["differing"], found["settings"]["2"]["differing"], "differing" in found["settings"]["vLLM"]) == (0, 1, False)
    assert found["pairs"]["identical"]["ratio"] == [2.0, 2.0, 2.0]
    assert wrong(found, arguments(BENCH, ["--workloads", "w"])) == ["2: 1 differing"]
    assert rag(found).rows[1] == ("2", "10", "10", "30 (20-40)", "188 (250)", "50%", "3 of 4")
    assert rag_pairs(found).rows[0] == ("identical", "10", "20", "2.00", "250, 125")
    assert len(headlines({"name": "bench-rag", "results": found})) == 2
    assert len(headlines({"name": "bench-rag", "results": found | {"pairs": {}}})) == 1


def shared(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class StubServers:
    """Replacement of ``served``: HTTP servers in threads whose answers are a function of the chat.

    They accept the keys of their settings alone, and count as cached what a chat shares with earlier ones of its tenant.
    """

    def __init__(self) -> None:
        self.started: list[list[str]] = []  # settings of each server
        self.most = 100  # servers that start
        self.other = "-"  # servers with this setting give other answers

    @contextmanager
    def served(self, model: str, options: Sequence[str]) -> Iterator[SimpleNamespace]:
        if len(self.started) == self.most:
            raise RuntimeError("outrider serve did not start")
        self.started.append([*options])
        suffix = "!" if self.other in options else ""
        remembers = "engine.prefix_caching=false" not in options
        earlier: dict[str, list[str]] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                key = self.headers["authorization"].removeprefix("Bearer ")
                assert any(hash_key(key) in option for option in options), key
                chat = json.dumps(body["messages"])
                known = earlier.setdefault(key, [])
                cached = max((shared(chat, old) for old in known), default=0)
                known.append(chat)
                sent = events(f"of {sum(map(ord, chat))}{suffix}", cached if remembers else 0).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Print nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.fixture
def harbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a workload file; servers are not waited for until they are idle, which only times need."""
    monkeypatch.setattr(users, "_SETTLES_S", 0.0)
    records = [
        {"id": f"w/{n}", "ref_kind": "doc", "output": "o", "references": [f"The harbour of town {n} opens at {n}."]}
        | {"prompt": f"docs: ...\nquery: when does the harbour of town {n} open\nanswer:"}
        for n in range(20)
    ]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_bench_gives_each_setting_the_day_and_continues_an_interrupted_run(
    harbours: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = StubServers()
    monkeypatch.setattr(bench, "served", servers.served)
    out = harbours / "out"
    command = ["--model", "demo_model", "--workloads", str(harbours), "--out", str(out), *DAY, "--kept"]
    servers.most = 2
    assert run(BENCH, [*command, str(harbours / "kept")]) == 2 and not out.exists()
    servers.most = 100
    assert run(BENCH, [*command, str(harbours / "kept")]) == 0
    pairs, plain, forgets, auto = servers.started  # each of them once
    assert f"speculation.strategy={PLAIN}" in plain and {"cache.enabled=false", "engine.prefix_caching=false"} <= set(forgets)
    keys = len(TENANTS) + 1
    assert plain == [*auto[:-keys], f"speculation.strategy={PLAIN}", *auto[-keys:]]
    assert any(option.startswith("tenancy.tenants.warm-4.") for option in pairs)
    assert run(BENCH, [*command, str(harbours / "kept")]) == 0 and len(servers.started) == 4
    found, again = (json.loads(path.read_text())["results"] for path in sorted(out.glob("*.json")))
    assert found == again and len(list(out.glob("*.svg"))) == 2
    assert list(found["settings"]) == ["plain", "remembers nothing", "1 replica"]
    assert all((row["differing"], row["failed"], row["all"]["requests"]) == (0, 0, 8) for row in found["settings"].values())
    cached = {name: row["all"]["cached_tokens"] for name, row in found["settings"].items()}
    assert cached["plain"] == cached["1 replica"] > 0 == cached["remembers nothing"]
    warm = {kind: row["warm"]["cached_tokens"] for kind, row in found["pairs"].items()}
    assert warm["identical"] > 0 == warm["other_tenant"] and list(warm) == list(PAIRED)
    capsys.readouterr()
    servers.other = "cache.enabled=false"
    assert run(BENCH, [*command, str(harbours / "kept again")]) == 1
    assert "wrong: remembers nothing: 8 differing" in capsys.readouterr().err


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_day_on_a_server_equals_plain_decoding_in_this_process(harbours: Path) -> None:
    args = arguments(BENCH, ["--workloads", str(harbours), "--model", "demo_model", "--dtype", "float32", *DAY])
    items = read_items(harbours)
    day, pairs = make_day(items, 8, 0), make_pairs(items, 1, 0)

    async def play() -> tuple[dict[str, Told], dict[str, Told]]:
        async with bench.started(Setting("1 replica"), [*TENANTS, *pair_tenants(len(pairs))], args, lambda line: None) as clients:
            answers, _ = await clients.play(day, 4, 0.0, lambda note: None)
            return answers, await clients.play_pairs(pairs, lambda note: None)

    answers, paired = asyncio.run(play())
    engine = Engine.load(
        ModelOptions(str(ROOT / "demo_model"), dtype="float32", threads=1), EngineOptions(), SpeculationOptions(PLAIN)
    )
    assert engine.tokenizer is not None
    for asked in day:
        answer = answers[asked.key]
        ids = render_chat(engine.tokenizer, asked.messages({key: one.text for key, one in answers.items()}))
        request = Request(asked.key, np.array(ids, np.int32), SamplingParams(16 if asked.kind in ("report", "edit") else 12))
        engine.add(request)
        while engine.has_work:
            engine.step()
        expected = engine.tokenizer.decode(request.output_ids, skip_special_tokens=True)
        assert (answer.error, answer.text, answer.tokens) == (None, expected, request.num_output)
    both = [(paired[f"cold-{number}"], paired[f"warm-{number}"]) for number in range(len(pairs))]
    by_kind = {warm.kind: (cold, warm) for cold, warm in both}
    assert list(by_kind) == list(PAIRED) and all(cold.text == warm.text for cold, warm in by_kind.values())
    assert by_kind["identical"][1].cached_tokens > 0 == by_kind["other_tenant"][1].cached_tokens
    assert all(cold.cached_tokens == 0 for cold, _ in by_kind.values())
