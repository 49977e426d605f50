"""A real application with an operator's port: redeployed under streams, and drained."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ray import serve
from transformers import LlamaForCausalLM

from outrider.cluster.app import application
from outrider.cluster.cli.launch.preflight import check_port
from outrider.configs.schema import Config
from outrider.configs.slices import EngineOptions, ModelOptions, ServerOptions, SpeculationOptions
from tests.cluster.circle import TEXT, Server
from tests.helpers.network import free_port

NAME = "redeployed"
STOP_S = 90.0
TOKENS = 2000


@dataclass
class Deployed:
    """The application on the Serve of the other tests."""

    url: str
    model: Path
    admin_port: int

    def deploy(self, max_waiting: int, model: Path | None = None) -> None:
        config = Config(
            model=ModelOptions(path=str(model or self.model), served_name="circle", dtype="float32", threads=1),
            engine=EngineOptions(max_running=3, max_waiting=max_waiting),
            speculation=SpeculationOptions(strategy="llma", max_draft_tokens=8),
            server=ServerOptions(cpus_per_replica=0.25, admin_port=self.admin_port, stop_timeout_s=STOP_S),
        )
        serve.run(application(config), name=NAME, route_prefix=f"/{NAME}")

    def ask(self, **changes: Any) -> Any:
        body = TEXT | {"prompt": "<abc", "max_tokens": 8, "ignore_eos": True} | changes
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=180)

    def stream(self, tokens: int) -> str:
        """The whole text of a stream of plain decoding, with its end."""
        answer = self.ask(max_tokens=tokens, stream=True, speculation={"strategy": "autoregressive"})
        assert answer.status_code == 200, answer.text
        return str(answer.text)

    def running(self) -> int:
        return int(httpx.get(f"{self.url}/health", timeout=60).json()["running"])

    def metrics(self) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=60)


@pytest.fixture(scope="module")
def deployed(api_server: Server, circle_model: Path) -> Iterator[Deployed]:
    made = Deployed(f"{api_server.url}/{NAME}", circle_model, free_port())
    made.deploy(max_waiting=4)
    try:
        yield made
    finally:
        with contextlib.suppress(RuntimeError):  # a test has deleted it
            serve.delete(NAME)


def pieces(text: str) -> str:
    """The text of a stream without its creation times."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(event)["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] == "length" and text.rstrip().endswith("data: [DONE]")
    return "".join(choice["text"] for choice in choices)


def test_redeploy_breaks_no_stream_and_refuses_no_request(deployed: Deployed) -> None:
    expected = pieces(deployed.stream(TOKENS))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        streams = [threads.submit(deployed.stream, TOKENS) for _ in range(2)]
        while deployed.running() < 2:
            assert not any(stream.done() for stream in streams)
        redeploy = threads.submit(deployed.deploy, 5)
        answers, scrapes = [], []
        while not redeploy.done():
            answers.append(deployed.ask().status_code)
            scrapes.append(deployed.metrics().status_code)
        redeploy.result()
        assert set(answers) == {200} and set(scrapes) == {200}
        assert [pieces(stream.result()) for stream in streams] == [expected] * 2
    assert deployed.ask().status_code == 200


def two_at_a_time(circle_model: Path, path: Path) -> Path:
    """A model with the same tokenizer that leaves out every other token of the circle."""
    shutil.copytree(circle_model, path)
    model = LlamaForCausalLM.from_pretrained(circle_model)
    with torch.no_grad():
        model.lm_head.weight.copy_(2 * model.lm_head.weight @ model.lm_head.weight)
    model.save_pretrained(path)
    return path


@pytest.mark.proof
def test_redeploy_with_another_model_mixes_no_tokens(deployed: Deployed, tmp_path: Path) -> None:
    expected, old = pieces(deployed.stream(TOKENS)), deployed.ask().json()["choices"][0]["text"]
    other = two_at_a_time(deployed.model, tmp_path / "other")
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        streams = [threads.submit(deployed.stream, TOKENS) for _ in range(2)]
        while deployed.running() < 2:
            assert not any(stream.done() for stream in streams)
        redeploy = threads.submit(deployed.deploy, 4, other)
        answers = []
        while not redeploy.done():
            answers.append(deployed.ask())
        redeploy.result()
        new = deployed.ask().json()["choices"][0]["text"]
        assert new[: len(old) // 2] == old[1::2][: len(old) // 2] and new != old
        assert [pieces(stream.result()) for stream in streams] == [expected] * 2  # by the model that began them
    told = [answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200]
    assert told[0] == old and set(told) <= {old, new} and told == sorted(told, key=[old, new].index)
    refused = [answer for answer in answers if answer.status_code != 200]
    assert all(answer.json()["error"]["code"] == "model_replaced" and answer.headers["retry-after"] for answer in refused)


def test_draining_refuses_what_is_new_and_ends_what_runs(deployed: Deployed) -> None:
    expected = pieces(deployed.stream(TOKENS))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        stream = threads.submit(deployed.stream, TOKENS)
        while deployed.running() < 1:
            assert not stream.done()
        drained = serve.get_app_handle(NAME).drain.remote(STOP_S)
        while (answer := deployed.ask()).status_code == 200:
            assert not stream.done()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
        assert int(answer.headers["retry-after"]) > 0
        assert pieces(stream.result()) == expected
        assert drained.result(timeout_s=STOP_S) == 0
    serve.delete(NAME)
    check_port("127.0.0.1", deployed.admin_port)
