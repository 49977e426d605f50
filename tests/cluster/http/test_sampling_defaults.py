"""Sampling parameters that a request leaves out: the server's, else those of ``generation_config.json``, else OpenAI's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.http.api import Service
from outrider.configs.slices import SpeculationOptions
from tests.cluster.circle import CHAT, CHATS, CIRCLE, COMPLETIONS, TEXT, TOKENIZER, LocalEngine, client_of, local_engine

FILE = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.5, "min_p": 7}  # min_p is out of bounds
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
OWN = {name: value for name, value in FILE.items() if name != "min_p"}
PENALTIES = {"presence_penalty": 0.5, "repetition_penalty": 1.0}
RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {key: value for key, value in CHAT.items() if key != "temperature"},
    COMPLETIONS: {key: value for key, value in TEXT.items() if key != "temperature"},
    RESPONSES: {"model": "circle", "input": "hi", "max_output_tokens": 4},
}


def engine_of(folder: Path, circle_model: Path, **written: Any) -> Any:
    """An engine of the circle's model with these fields in its ``generation_config.json``, under the name ``circle``."""
    made = shutil.copytree(circle_model, folder / "circle")
    path = made / "generation_config.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(kept | written))
    return local_engine(made, SpeculationOptions("llma", max_draft_tokens=8))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, circle_model: Path) -> Iterator[LocalEngine]:
    with engine_of(tmp_path_factory.mktemp("defaults"), circle_model, **FILE, do_sample=True) as engine:
        yield engine


def asked(engine: LocalEngine, server: dict[str, float], path: str, **more: Any) -> dict[str, Any]:
    """The sampling parameters of the job that a request makes."""
    with client_of(Service(engine, TOKENIZER, sampling_defaults=server)) as http:
        http.post(path, json=BODIES[path] | more).raise_for_status()
    return {name: getattr(engine.jobs[-1].params, name) for name in OPENAI}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("server", "request_", "expected"),
    [
        ({}, {}, OPENAI | OWN),
        ({"temperature": 0.3, "top_k": -1}, {}, OPENAI | OWN | {"temperature": 0.3, "top_k": 0}),
        ({"temperature": 0.3}, {"temperature": 0.0, "top_p": 1.0}, OPENAI | OWN | {"temperature": 0.0, "top_p": 1.0}),
        ({"presence_penalty": 0.5}, {"repetition_penalty": 1.0}, OPENAI | OWN | PENALTIES),
        ({}, {"temperature": None}, OPENAI | OWN),
    ],
)
def test_the_order_is_request_server_file(
    engine: LocalEngine, path: str, server: dict[str, float], request_: dict[str, Any], expected: dict[str, float]
) -> None:
    if path == RESPONSES:  # it has no such field
        request_ = {name: value for name, value in request_.items() if value is not None}
    assert asked(engine, server, path, **request_) == expected


def test_models_lists_them(engine: LocalEngine) -> None:
    with client_of(Service(engine, TOKENIZER, sampling_defaults={"top_p": 0.5})) as own:
        (model,) = own.get("/v1/models").json()["data"]
    assert model["sampling_defaults"] == OWN | {"top_p": 0.5}


def test_do_sample_false_is_greedy(tmp_path: Path, circle_model: Path) -> None:
    with engine_of(tmp_path, circle_model, do_sample=False, temperature=0.9) as engine:
        assert asked(engine, {}, COMPLETIONS)["temperature"] == 0.0


def test_the_report_counts_drafts_that_a_penalty_refused(engine: LocalEngine) -> None:
    def reported(**more: Any) -> dict[str, Any]:
        # The document is the text that the model repeats without penalties.
        body = {"model": "circle", "prompt": CIRCLE * 2, "max_tokens": 60, "temperature": 0, "reference_documents": [CIRCLE * 3]}
        body |= {"speculation": {"report": True}, "ignore_eos": True}
        with client_of(Service(engine, TOKENIZER)) as http:
            (choice,) = http.post(COMPLETIONS, json=body | more).raise_for_status().json()["choices"]
        found: dict[str, Any] = choice["speculation"]
        return found

    free = reported(repetition_penalty=1.0)
    assert "refused_by_penalty" not in free
    strict = reported(repetition_penalty=100.0, presence_penalty=2.0)
    refused = [step for step in strict["steps"] if step["accepted"] < step["drafted"]]
    assert 0 < strict["refused_by_penalty"] <= len(refused)
    mild = reported(repetition_penalty=1.0001)
    assert mild["refused_by_penalty"] == 0


def test_all_served_names_answer(circle_model: Path) -> None:
    with local_engine(circle_model, served_name=("circle", "gpt-4o")) as engine, client_of(Service(engine, TOKENIZER)) as http:
        cards = http.get("/v1/models").json()["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
            ("circle", "circle", None), ("gpt-4o", "circle", None),
        ]  # fmt: skip
        answers = [http.post(COMPLETIONS, json=TEXT | {"model": name}) for name in ("circle", "gpt-4o", "other")]
        assert [answer.status_code for answer in answers] == [200, 200, 404]
        assert answers[1].json()["model"] == "gpt-4o"
        assert answers[0].json()["choices"][0]["text"] == answers[1].json()["choices"][0]["text"]
