"""Attacks and the fuzzer: verdicts, the calm client, forms, rows, cases and their reduction."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from outrider.experiments.bench.run import arguments
from outrider.experiments.service.attacks import rows, run
from outrider.experiments.service.attacks.calm import CalmClient
from outrider.experiments.service.attacks.forms import all_forms, chosen
from outrider.experiments.service.attacks.shots import Reply, Target, fire, get, is_fault
from outrider.experiments.service.attacks.turns import NOTHING_MS, Goals, interval, memory_fails, p95_ms, verdict
from outrider.experiments.service.fuzz import fault_of, run_cases
from outrider.experiments.service.fuzzing.requests import Case, Server, make_case, reduced

SERVER = Server("circle", "key", "operator", None)


def turn(alone: float, polite: float, attack: float, load: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    def side(p95: float) -> dict[str, Any]:
        times = {"p95_ms": p95, "max_ms": 2 * p95, "ttft_p95_ms": p95, "answer_p95_ms": 30 * p95}
        return times | {"lost": 0, "others": 0, "statuses": {"200": 9}}

    beside = side(attack) | {"load": load or {"400": 3}, "idle_after_s": 0.2} | changes
    sides = {"alone": side(alone), "polite": side(polite), "attack": beside}
    return sides | {"same_processes": True, "form": "a: b", "emits": False, "round": 0}


def failing(*turns: dict[str, Any], emits: bool = False) -> list[str]:
    return list(verdict("a: b", emits, turns, Goals())["fails"])


def test_an_attack_is_judged_by_the_median_of_its_rounds() -> None:
    assert failing(turn(10, 20, 29), turn(10, 20, 29), turn(10, 20, 200)) == []
    tokens, answers = failing(turn(15, 20, 31), turn(15, 20, 40), turn(15, 20, 20))
    assert tokens.startswith("tokens 1.55 times polite") and answers.startswith("answers 1.55 times polite")
    assert [line.split(",")[0] for line in failing(turn(10, 40, 31))] == ["tokens 3.10 times alone", "answers 3.10 times alone"]
    assert failing(turn(3, 40, 41), emits=True) == [] != failing(turn(3, 40, 41))  # a period of events is no fault


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({"lost": 2}, "2 calm streams lost"),
        ({"others": 1}, "1 calm texts are other ones"),
        ({"statuses": {"200": 5, "500": 1}}, "1 calm requests not answered with 200"),
        ({"load": {"500": 1, "200+error": 2, "503": 4}}, "3 answers to the attack are a 5xx"),
    ],
)
def test_every_loss_of_the_calm_client_fails(changes: dict[str, Any], fails: str) -> None:
    assert failing(turn(10, 10, 10, **changes)) == [fails]


def test_replaced_processes_and_lost_memory_fail() -> None:
    assert failing(turn(10, 10, 10) | {"same_processes": False}) == ["a process was replaced"]
    assert not memory_fails("a", {"before_mib": 100, "after_mib": 109}, Goals())
    assert memory_fails("a", {"before_mib": 100, "after_mib": 111}, Goals())


def test_percentiles_intervals_and_labels() -> None:
    assert p95_ms([]) == NOTHING_MS and p95_ms([0.001] * 99 + [9.0]) == 1.0
    low, high = interval([1.0, 1.1, 1.2, 1.3, 9.0])
    assert 1.0 <= low <= 1.2 <= high <= 9.0 and interval([2.0]) == (2.0, 2.0)
    assert [label for label in ("500", "502", "503", "504", "429", "200+error", "0") if is_fault(label)] == [
        "500",
        "502",
        "200+error",
    ]


def test_failures_come_first_in_the_results() -> None:
    memory = {"form": "kind", "kind": "kind", "round": 0, "memory": {"before_mib": 100.0, "after_mib": 120.0}}
    results = run.summary([turn(10, 10, 11) | {"form": "kind: well"}, turn(10, 10, 99) | {"form": "kind: ill"}, memory])
    assert [each["form"] for each in results["attacks"]] == ["kind: ill", "kind: well"]
    assert results["attacks"][0]["fails"][0].startswith("tokens 9.90 times") and list(results["memory"]) == ["kind"]
    wrong = run.wrong(results | {"once": {"kind: ill": {"500": 1, "400": 2}}}, arguments(run.BENCH, []))
    assert len(wrong) == 6 and wrong[-1] == "kind: ill: 1 answers were 500", wrong


class _Streams(BaseHTTPRequestHandler):
    """Streams of the given texts; one that ends with ``!`` breaks off."""

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


def test_a_calm_client_counts_other_texts_and_lost_streams() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Streams) as server:
        server.answers = ["ab", "ab", "ac", "a!", "ab"]  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = CalmClient("127.0.0.1", server.server_address[1], "circle", None)
        found = client.window(0.5)
        client.close()
        server.shutdown()
    assert (found.others, found.lost, found.failed) == (1, 1, 2) and found.statuses.keys() == {"200"}
    assert len(found.gaps_s) >= len(found.firsts_s) >= 5 and len(found.wholes_s) == len(found.firsts_s)


def test_forms_have_their_own_titles_and_make_shots() -> None:
    forms, target = all_forms(), Target("127.0.0.1", 1, "circle", size=0.001, context=64)
    assert len({form.title for form in forms}) == len(forms) == 82
    for form in forms:
        resumes = form.kind == "streams that go on"  # needs a server for its ids
        for shots in (form.polite(target), *(() if resumes else (form.attack(target),))):
            sent = b"".join(piece[:400] for shot in shots for piece in shot.pieces)
            assert shots and not re.search(rb"\$(?!ref|defs|\")[a-z]", sent), form.title  # a generator that is not replaced
    assert [form.title for form in chosen(["admin port"])] == [form.title for form in forms if "admin port" in form.title]
    with pytest.raises(ValueError, match="nothing of the kind"):
        chosen(["nothing of the kind"])


def test_the_calm_request_keeps_half_of_its_rows() -> None:
    assert {row["form"]: row["ratio"] >= Goals().rows for row in rows.measure()} == {form.name: True for form in rows.FORMS}


def test_cases_are_reproducible_and_of_all_kinds() -> None:
    made = [make_case(1, number, SERVER) for number in range(800)]
    assert repr(made) == repr([make_case(1, number, SERVER) for number in range(800)])
    assert len({case.kind for case in made}) >= 30
    assert all(case.shot(SERVER).pieces and case.shown() for case in made)


def test_a_failing_case_is_reduced() -> None:
    case = Case(
        "fields", "/v1/completions", {"a": 1, "b": ["x", {"deep": "longer than that", "other": 2}], "c": "y"}, headers={"X": "y"}
    )

    async def fails(smaller: Case) -> bool:
        return "that" in json.dumps(smaller.body) or b"x:" in (smaller.raw or b"")

    found = asyncio.run(reduced(case, fails))
    assert found.body == {"b": [{"deep": "that"}]} and found.headers == {}
    few = asyncio.run(reduced(case, fails, most=1))
    assert few.body == case.body and few.headers == {}
    assert asyncio.run(reduced(Case("heads", raw=b"GET / HTTP/1.1\r\nx: y\r\n\r\n"), fails)).raw == b"x:"


def test_faults_of_the_server_are_no_refusals() -> None:
    case = Case("fields", "/v1/completions", {"prompt": "a"})
    assert fault_of(case, Reply((500,))) == "500" and fault_of(case, Reply((200,), has_fault=True)) == "200+error"
    assert fault_of(case, Reply((503,))) == "503" and fault_of(case, Reply((429,))) is None
    assert fault_of(case, Reply()) == "no answer" and fault_of(dataclasses.replace(case, raw=b"x"), Reply()) is None
    late = dataclasses.replace(case, body={"timeout": 0.01})
    assert fault_of(late, Reply((200,), has_fault=True, text=b"timeout")) is None
    assert fault_of(late, Reply((500,), text=b"internal")) == "500"


def test_a_shot_hears_all_answers_of_a_connection_and_failures_are_collected() -> None:
    answers = [b'HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 400 Bad\r\n\r\n{"error": {"type": "server_error"}}']
    broken = b'HTTP/1.1 500 Bad\r\n\r\n{"message": "number 7"}'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answers.pop() if answers else broken)
        writer.close()

    async def heard() -> tuple[Reply, dict[str, Any], Reply]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        target = Target("127.0.0.1", server.sockets[0].getsockname()[1], "circle")
        async with server:
            first = await fire(get("/"), target)
            found = await run_cases(target, SERVER, 0, 3, 4)
        return first, found, await fire(get("/"), target)

    both, found, gone = asyncio.run(heard())
    assert both.statuses == (200, 400) and both.label == "400+error" and both.has_ended
    assert gone == Reply() and gone.label == "0"
    numbers = sorted(number for each in found["failures"] for number in each["numbers"])
    assert numbers == [3, 4, 5, 6] and {each["fault"] for each in found["failures"]} == {"500"}
