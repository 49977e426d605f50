"""The parity comparison: its cases against a real replica, and its record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.http.api import Service
from outrider.cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from outrider.cluster.http.types.responses import ResponsesRequest
from outrider.cluster.serving import shared_answer
from outrider.configs.slices import EngineOptions, SpeculationOptions
from outrider.experiments.bench.run import run
from outrider.experiments.service import parity
from outrider.experiments.service.parity import Said, cases
from tests.cluster.circle import TOKENIZER, local_engine, served

NOT_COMPARED = {"model", "messages", "stream", "stream_options", "previous_response_id"}  # in all cases, or in all streamed ones


@pytest.fixture(scope="module")
def url(circle_model: Path) -> Iterator[str]:
    """The address of a server with a replica in this process."""
    speculation = SpeculationOptions("llma", max_draft_tokens=8, strategies=("prompt_lookup", "jacobi"))
    options = EngineOptions(max_running=6)
    with (
        local_engine(circle_model, speculation, options, max_model_len=2048) as engine,
        served(Service(engine, TOKENIZER, open_metrics=True)) as address,
    ):
        yield address


def test_no_parameter_changes_an_answer(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shared_answer, parity):  # the server is in this process: no waiting for new counters
        monkeypatch.setattr(module, "FRESH_S", 0.0)
    options = ["--strategy", "llma", "--prompt", "abcdefgh-abcdefgh<", "--max-tokens", "13", "--answers", "streamed"]
    assert run(parity.BENCH, ["--url", f"{url}/v1", *options, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-parity.json")
    record = json.loads(path.read_text())
    rows: dict[str, Any] = record["results"]["parameters"]
    assert not record["results"]["mismatches"] and "none" not in json.dumps(record["config"].get("key", ""))
    # The template has no tools, documents or reasoning, and there is no tenant to share texts.
    refused = {"tools", "tool_choice", "parallel_tool_calls", "cache", "reasoning_effort", "chat_template_kwargs", "reasoning"}
    refused |= {"documents", "thinking_token_budget"}
    assert {name for name, row in rows.items() if row["refused"]} == refused
    assert sum(row["accepted"] for row in rows.values()) > 500, "little was drafted: nothing was shown"
    assert all(row["gap"] < 1e-3 for row in rows.values())
    assert all(row["mismatches"] == 0 for row in rows.values())


def test_a_server_that_refuses_or_does_not_answer(url: str, tmp_path: Path) -> None:
    # An unknown strategy is refused, and plain decoding is not.
    assert run(parity.BENCH, ["--url", url, "--strategy", "unknown", "--field", "n", "--out", str(tmp_path)]) == 1
    assert run(parity.BENCH, ["--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 2


def test_every_parameter_has_cases_and_stops_occur_in_the_answer() -> None:
    said = Said("p", "one two three", [5, 6, 7], [1, 2])
    made = list(cases(said))
    for body in (ChatCompletionRequest, CompletionRequest, ResponsesRequest):
        assert not body.model_fields.keys() - {case.field for case in made} - NOT_COMPARED
    stops = [case.body["stop"] for case in made if case.field == "stop"]
    assert stops[0] in said.text and all(text in said.text for text in stops[1])
