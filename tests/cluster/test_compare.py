"""``POST /v1/compare``: both answers, what differs, and what becomes of a comparison of which one side fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from ray import serve

from actors.replica import Replica
from cluster.app import application
from cluster.cli.launch.preflight import LaunchError, check_reservation
from cluster.http.api import Service, create_api
from cluster.serving.compare import Baseline
from configs.schema import Config
from configs.slices import BaselineOptions, EngineOptions, ModelOptions, ServerOptions, SpeculationOptions, TenancyOptions
from engine.loading.model import load_tokenizer
from tests.models import llama_config, save_model

ServeApi = Callable[[FastAPI], AbstractContextManager[str]]
PATH = "/v1/compare"
TEXT: dict[str, Any] = {"model": "circle", "prompt": "hgf<", "max_tokens": 30, "temperature": 0}
CHAT: dict[str, Any] = {"model": "circle", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "temperature": 0}
DOCUMENT = "<abcdefgh-é_日:🦙;ijklm>"


def compared(http: httpx.Client, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = http.post(PATH, json=body | {"reference_documents": [DOCUMENT]} | more).raise_for_status().json()
    assert answer["object"] == "comparison" and answer["id"].startswith("cmp-")
    return dict(answer)


@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_both_answers_with_their_times(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = compared(http, body)
    accelerated, baseline = answer["accelerated"], answer["baseline"]
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    choice = http.post(route, json=body).json()["choices"][0]
    expected = choice["text"] if "text" in choice else choice["message"]["content"]
    assert accelerated["text"] == baseline["text"] == expected
    assert (answer["identical"], answer["first_difference"], answer["lossless"]) == (True, None, True)
    assert (answer["against"], answer["ran"], answer["model"]) == ("plain", "in turns", "circle")
    assert (accelerated["strategy"], baseline["strategy"], baseline["kind"]) == ("llma", "autoregressive", "plain")
    assert baseline["tokens_per_step"] == 1.0 < accelerated["tokens_per_step"]
    for side in (accelerated, baseline):
        assert (side["finish_reason"], side["error"]) == ("length", None)
        assert side["usage"]["completion_tokens"] == 30
        assert 0 < side["ttft_s"] < side["latency_s"]
        assert side["tokens_per_s"] == pytest.approx(29 / (side["latency_s"] - side["ttft_s"]), rel=0.01)
    assert answer["speedup"] == pytest.approx(accelerated["tokens_per_s"] / baseline["tokens_per_s"], rel=0.01)


def test_both_sides_draw_alike_whether_a_seed_is_given_or_not(http: httpx.Client) -> None:
    for more in ({"temperature": 1.0}, {"temperature": 1.0, "seed": 3}, {"stop": ["k"]}, {"max_tokens": 1}):
        answer = compared(http, TEXT | more)
        assert answer["identical"] and answer["accelerated"]["text"] == answer["baseline"]["text"], more
    assert answer["speedup"] is None  # of one token


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"n": 2}, "n", "n must be 1"),
        ({"stream": True}, "stream", "not supported in a comparison"),
        ({"logprobs": 1}, "logprobs", "leave it out"),
        ({"echo": True}, "echo", "leave it out"),
        ({"speculation": {"report": True}}, "speculation.report", "leave it out"),
        ({"prompt": ["a", "b"]}, "prompt", "one prompt"),
        ({"against": "baseline"}, "against", "baseline.enabled"),
        ({"against": "generate"}, "against", "'baseline' or 'plain'"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"speculation": {"strategy": "trie"}}, "speculation.strategy", "allowed: llma"),
        ({"messagez": []}, "messagez", "unknown parameter"),
        ({"messages": [{"role": "user"}], "prompt": None}, "messages[0].content", "required"),
        ({"model": "other"}, "model", "does not exist"),
        ({"priority": 1}, "priority", "scheduling_policy"),  # by the engine, of both sides
    ],
)
def test_what_is_refused(http: httpx.Client, more: dict[str, Any], param: str, words: str) -> None:
    body = TEXT | more
    response = http.post(PATH, json={name: value for name, value in body.items() if value is not None})
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400) and error["param"] == param, error
    assert words in error["message"], error


def test_what_is_no_comparison_at_all(http: httpx.Client) -> None:
    for body in ([], "a", {}, {"model": "circle"}):
        error = http.post(PATH, json=body).json()["error"]
        assert error["type"] == "invalid_request_error", (body, error)
    paths = http.get("/openapi.json").json()["paths"]
    assert set(paths[PATH]["post"]["responses"]) == {"200", "4XX", "5XX"}


@contextlib.contextmanager
def replica_of(path: Path, **model: Any) -> Iterator[Replica]:
    made = Replica(
        ModelOptions(str(path), dtype="float32", threads=1, **model), EngineOptions(max_running=2),
        SpeculationOptions("autoregressive", max_draft_tokens=0), meter=None,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.stop()


def test_a_baseline_that_says_something_else_or_nothing(
    circle_engine: Any, circle_model: Path, serve_api: ServeApi, tmp_path: Path
) -> None:
    """The baseline has another model, which no deployment of ours would have, and a shorter context."""
    other = save_model(tmp_path / "tiny", llama_config(vocab_size=len(load_tokenizer(str(circle_model)))))
    with replica_of(other, max_model_len=64) as replica:
        baseline = Baseline(type(circle_engine)(replica), "plain", shares_devices=False)
        service = Service(circle_engine, load_tokenizer(str(circle_model)), TenancyOptions(), baseline=baseline)
        with serve_api(create_api(service)) as url, httpx.Client(base_url=url, timeout=60) as http:
            answer = compared(http, TEXT)
            assert (answer["against"], answer["ran"], answer["identical"]) == ("baseline", "at once", False)
            difference = answer["first_difference"]
            assert difference["index"] == 0 and difference["accelerated"] == "a" != difference["baseline"]
            assert compared(http, TEXT, against="plain")["identical"]
            failed = compared(http, TEXT, max_tokens=100)
            assert failed["accelerated"]["usage"]["completion_tokens"] == 100
            error = failed["baseline"]["error"]
            assert (error["code"], failed["baseline"]["text"]) == ("context_length_exceeded", None)
            assert failed["identical"] is failed["first_difference"] is failed["speedup"] is None


@pytest.mark.slow
def test_a_baseline_that_is_deployed(api_server: Any, circle_model: Path) -> None:
    config = Config(
        model=ModelOptions(str(circle_model), dtype="float32", threads=1),
        speculation=SpeculationOptions("prompt_lookup", max_draft_tokens=8),
        server=ServerOptions(cpus_per_replica=0.25),
        baseline=BaselineOptions(enabled=True),
    )
    serve.run(application(config), name="compare", route_prefix="/compare")
    try:
        with httpx.Client(base_url=f"{api_server.url}/compare", timeout=60) as http:
            assert http.get("/ready").status_code == 200
            answers = [compared(http, CHAT | {"max_tokens": 90}) for _ in range(2)]
    finally:
        serve.delete("compare")
    for answer in answers:
        assert (answer["against"], answer["ran"], answer["identical"]) == ("baseline", "in turns", True)
        assert answer["accelerated"]["tokens_per_step"] > answer["baseline"]["tokens_per_step"] == 1.0


def test_the_reservation_counts_the_baseline() -> None:
    config = Config(server=ServerOptions(replicas=2), baseline=BaselineOptions(enabled=True))
    check_reservation(config, "CPU", 1.0, 3.0)
    with pytest.raises(LaunchError, match=r"2 x 1 ranks and 1 of the baseline need 3 CPUs.*baseline\.replicas"):
        check_reservation(config, "CPU", 1.0, 2.0)
    check_reservation(Config(server=ServerOptions(replicas=2)), "CPU", 1.0, 1.0)  # Serve waits for more, as before
