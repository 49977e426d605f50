"""The measurement of attacks: what a calm client notes, verdicts, forms, rows; and cases of the fuzzer with their reduction."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pypdf
import pytest

from experiments.bench.record import Kept
from experiments.bench.run import arguments
from experiments.report.tables import attacks, attacks_around
from experiments.service.attacks import rows, run
from experiments.service.attacks.calm import CalmClient
from experiments.service.attacks.catalog import all_forms, chosen
from experiments.service.attacks.shots import Reply, Target, fire, get
from experiments.service.attacks.texts import many_rules, pdf
from experiments.service.attacks.verdicts import NOTHING_MS, Goals, interval, is_fault, memory_fails, p95_ms, verdict
from experiments.service.fuzzing.case import Case, Server
from experiments.service.fuzzing.cases import make_case
from experiments.service.fuzzing.reduction import reduced
from experiments.service.fuzzing.run_cases import fault_of

SERVER = Server("circle", "key", "operator", None)


def side(p95: float, **changes: Any) -> dict[str, Any]:
    told = {"p95_ms": p95, "max_ms": 2 * p95, "ttft_p95_ms": p95, "answer_p95_ms": 30 * p95, "lost": 0, "others": 0}
    return told | {"statuses": {"200": 9}} | changes


def turn(alone: float, polite: float, attack: float, load: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    beside = side(attack, load=load or {"400": 3}, idle_after_s=0.2, **changes)
    return {
        "alone": side(alone),
        "polite": side(polite),
        "attack": beside,
        "same_processes": True,
        "form": "a: b",
        "emits": False,
    }


def failing(*turns: dict[str, Any], emits: bool = False) -> list[str]:
    return list(verdict("a: b", emits, turns, Goals())["fails"])


def test_an_attack_is_judged_by_the_median_of_its_rounds() -> None:
    assert failing(turn(10, 20, 29), turn(10, 20, 29), turn(10, 20, 200)) == []
    tokens, answers = failing(turn(15, 20, 31), turn(15, 20, 40), turn(15, 20, 20))
    assert tokens.startswith("tokens 1.55 times polite") and answers.startswith("answers 1.55 times polite")
    assert [line.split(",")[0] for line in failing(turn(10, 40, 31))] == ["tokens 3.10 times alone", "answers 3.10 times alone"]


def test_a_period_of_events_is_no_fault_of_an_attack_that_emits() -> None:
    assert failing(turn(3, 40, 41), emits=True) == [] != failing(turn(3, 40, 41))


def test_whatever_a_calm_client_lost_fails() -> None:
    assert failing(turn(10, 10, 10, lost=2)) == ["2 calm streams lost"]
    assert failing(turn(10, 10, 10, others=1)) == ["1 calm texts are other ones"]
    assert failing(turn(10, 10, 10, statuses={"200": 5, "500": 1})) == ["1 calm requests not answered with 200"]
    assert failing(turn(10, 10, 10, {"500": 1, "200+error": 2, "503": 4})) == ["3 answers to the attack are a 5xx"]
    assert failing(turn(10, 10, 10) | {"same_processes": False}) == ["a process was replaced"]
    assert not memory_fails("a", {"before_mib": 100, "after_mib": 109}, Goals())
    assert memory_fails("a", {"before_mib": 100, "after_mib": 111}, Goals())


def test_percentiles_and_intervals() -> None:
    assert p95_ms([]) == NOTHING_MS and p95_ms([0.001] * 99 + [9.0]) == 1.0
    low, high = interval([1.0, 1.1, 1.2, 1.3, 9.0])
    assert 1.0 <= low <= 1.2 <= high <= 9.0 and interval([2.0]) == (2.0, 2.0)
    assert [is_fault(label) for label in ("500", "502", "503", "504", "429", "200+error", "0")] == [
        True,
        True,
        *[False] * 3,
        True,
        False,
    ]


def test_what_was_measured_is_shown_with_the_failures_first(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "part", {"of": 1}, lambda told: (told["form"], told["round"]))
    kept.add({**turn(10, 10, 11), "form": "kind: well", "round": 0})
    kept.add({**turn(10, 10, 99), "form": "kind: ill", "round": 0})
    kept.add({"form": "kind", "kind": "kind", "round": 0, "memory": {"before_mib": 100.0, "after_mib": 120.0}})
    results = run.summary(Kept(tmp_path / "part", {"of": 1}, lambda told: (told["form"], told["round"])).found)
    assert [each["form"] for each in results["attacks"]] == ["kind: ill", "kind: well"]
    table, around = attacks(results), attacks_around(results)
    assert table.rows[0][1].startswith("tokens 9.90 times") and len(around.rows) == 1
    wrong = run.wrong(results | {"once": {"kind: ill": {"500": 1, "400": 2}}}, arguments(run.BENCH, []))
    assert len(wrong) == 6 and wrong[-1] == "kind: ill: 1 answers were 500", wrong


class _Streams(BaseHTTPRequestHandler):
    """Answers of 32 tokens; some break off, some have another text."""

    protocol_version = "HTTP/1.1"
    answers: Sequence[str] = ()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        text = server.answers.pop(0) if server.answers else "ab"
        events = [json.dumps({"choices": [{"delta": {"content": each}}]}) for each in text.rstrip("!")]
        body = "".join(f"data: {event}\n\n" for event in events) + ("" if text.endswith("!") else "data: [DONE]\n\n")
        self.send_response(200)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_calm_client_notes_other_texts_and_lost_streams() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Streams) as server:
        server.answers = ["ab", "ab", "ac", "a!", "ab"]  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = CalmClient("127.0.0.1", server.server_address[1], "circle", None)
        found = client.window(0.5)
        client.close()
        server.shutdown()
    assert (found.others, found.lost) == (1, 1) and found.statuses.keys() == {"200"}
    assert len(found.gaps_s) >= len(found.firsts_s) >= 5 and len(found.wholes_s) == len(found.firsts_s)


def test_forms_have_names_of_their_own_and_make_shots() -> None:
    forms, target = all_forms(), Target("127.0.0.1", 1, "circle", size=0.001, context=64)
    assert len({form.title for form in forms}) == len(forms) >= 60 and len({form.kind for form in forms}) >= 11
    for form in forms:
        resumes = form.kind == "streams that go on"  # asks the server for ids
        for shots in (form.polite(target), () if resumes else form.attack(target)):
            assert all(piece is not None for shot in shots for piece in shot.pieces), form.title
    assert [form.title for form in chosen(["admin port"])] == [form.title for form in forms if "admin port" in form.title]
    with pytest.raises(ValueError, match="nothing of the kind"):
        chosen(["nothing of the kind"])


def test_hostile_files_are_valid() -> None:
    read = pypdf.PdfReader(io.BytesIO(pdf(3, 5)))
    assert len(read.pages) == 3 and read.pages[0].extract_text().count("word") == 20
    nested = pypdf.PdfReader(io.BytesIO(pdf(1, 1, nested=3)))
    assert nested.pages[0].extract_text().count("word") == 4 * 2**3
    assert many_rules(2).splitlines() == ["start: (r0 | r1)", 'r0: "x0" /[a-z]{3}/', 'r1: "x1" /[a-z]{3}/']


def test_the_calm_request_keeps_half_of_its_rows() -> None:
    assert {row["form"]: row["ratio"] >= Goals().rows for row in rows.measure()} == {form.name: True for form in rows.FORMS}


def test_cases_come_again_the_same_and_of_all_kinds() -> None:
    made = [make_case(1, number, SERVER) for number in range(400)]
    assert repr(made) == repr([make_case(1, number, SERVER) for number in range(400)])
    assert len({case.kind for case in made}) >= 12
    assert all(case.shot(SERVER).pieces and case.shown() for case in made)


def test_a_failing_case_is_made_smaller() -> None:
    case = Case(
        "fields", "/v1/completions", {"a": 1, "b": ["x", {"deep": "longer than that", "other": 2}], "c": "y"}, headers={"X": "y"}
    )

    async def fails(smaller: Case) -> bool:
        return "that" in json.dumps(smaller.body)

    found = asyncio.run(reduced(case, fails))
    assert found.body == {"b": [{"deep": "that"}]} and found.headers == {}
    few = asyncio.run(reduced(case, fails, most=1))
    assert few.body == case.body and few.headers == {}
    raw = asyncio.run(reduced(Case("heads", raw=b"GET / HTTP/1.1\r\nx: y\r\n\r\n"), lambda smaller: _has(smaller, b"x:")))
    assert raw.raw == b"x:"


async def _has(case: Case, part: bytes) -> bool:
    return part in (case.raw or b"")


def test_faults_of_the_server_are_told_from_its_refusals() -> None:
    case = Case("fields", "/v1/completions", {"prompt": "a"})
    assert fault_of(case, Reply((500,))) == "500" and fault_of(case, Reply((200,), has_fault=True)) == "200+error"
    assert fault_of(case, Reply((503,))) == "503" and fault_of(case, Reply((429,))) is None
    assert fault_of(case, Reply()) == "no answer" and fault_of(dataclasses.replace(case, raw=b"x"), Reply()) is None
    late = dataclasses.replace(case, body={"timeout": 0.01})
    assert fault_of(late, Reply((200,), has_fault=True, text=b"timeout")) is None
    assert fault_of(late, Reply((500,), text=b"internal")) == "500"


def test_a_shot_hears_all_answers_of_a_connection() -> None:
    async def twice() -> tuple[Reply, Reply]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 400 Bad\r\n\r\n{"error": {"type": "server_error"}}')
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            heard = await fire(get("/"), Target("127.0.0.1", port, "circle"))
        return heard, await fire(get("/"), Target("127.0.0.1", port, "circle"))

    heard, gone = asyncio.run(twice())
    assert heard.statuses == (200, 400) and heard.label == "400+error" and heard.has_ended
    assert gone == Reply() and gone.label == "0"
