"""Replicas of a node that find each other by the membership actor, and serve one request together."""

from __future__ import annotations

import concurrent.futures
import functools
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from ray import serve

from cluster.app import application
from cluster.serving.membership import FORGET_S, NodeMembership, NodePlace
from configs.schema import Config
from configs.slices import EngineOptions, ModelOptions, ParallelismOptions, ServerOptions, SpeculationOptions
from decoding.request import SamplingParams
from tests import waiting
from tests.models import SENTENCES, llama_config, save_model
from tests.services import plain_answer

eventually = functools.partial(waiting.eventually, timeout_s=90.0)

A, B, C = (("127.0.0.1", port) for port in (1001, 1002, 1003))


def test_numbers_are_the_lowest_free_ones_and_stay() -> None:
    membership = NodeMembership()
    assert membership.join("n1", A, None, 0.0) == NodePlace(0, {})
    assert membership.join("n1", B, None, 0.0) == NodePlace(1, {0: A})
    assert membership.join("n1", C, None, 0.0) == NodePlace(2, {0: A, 1: B})
    assert membership.join("n1", A, 0, 1.0) == NodePlace(0, {1: B, 2: C})
    assert membership.join("n2", A, None, 1.0) == NodePlace(0, {}), "another node"


def test_the_silent_are_forgotten_and_their_number_is_free() -> None:
    membership = NodeMembership()
    for address in (A, B):
        membership.join("n1", address, None, 0.0)
    assert membership.join("n1", B, 1, FORGET_S) == NodePlace(1, {0: A})
    assert membership.join("n1", B, 1, FORGET_S + 0.1) == NodePlace(1, {})
    assert membership.join("n1", C, None, FORGET_S + 0.2) == NodePlace(0, {1: B})
    assert membership.join("n1", A, 0, FORGET_S + 0.3) == NodePlace(2, {0: C, 1: B}), "its number has another owner"


def test_a_lobby_started_anew_leaves_the_numbers_as_they_were() -> None:
    membership = NodeMembership()
    assert membership.join("n1", C, 2, 0.0) == NodePlace(2, {})
    assert membership.join("n1", B, None, 0.0) == NodePlace(0, {2: C})
    assert membership.join("n1", A, 0, 0.0) == NodePlace(1, {0: B, 2: C})


@given(st.lists(st.tuples(st.integers(0, 6), st.one_of(st.none(), st.integers(0, 8)), st.floats(0, 4)), max_size=40))
def test_no_number_has_two_owners(joins: list[tuple[int, int | None, float]]) -> None:
    membership, now_s = NodeMembership(), 0.0
    for port, rank, wait_s in joins:
        now_s += wait_s
        place = membership.join("n1", ("127.0.0.1", port), rank, now_s)
        assert place.rank not in place.peers and ("127.0.0.1", port) not in place.peers.values()
        assert len(set(place.peers.values())) == len(place.peers)


@pytest.mark.slow
def test_two_replicas_serve_one_request_together(api_server: Any, tmp_path_factory: Any) -> None:
    """A second application beside that of the other tests."""
    folder: Path = save_model(tmp_path_factory.mktemp("models") / "tiny", llama_config(max_position_embeddings=1024))
    model = ModelOptions(path=str(folder), dtype="float32", threads=1)
    prompts, tokens = SENTENCES[:2], 600
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    texts = [plain_answer(model, prompt, params).text for prompt in prompts]
    config = Config(
        model=model,
        engine=EngineOptions(max_running=4),
        speculation=SpeculationOptions("recycling", max_draft_tokens=8),
        parallelism=ParallelismOptions(mode="lookahead", world_size="auto", rank_timeout_s=30.0),
        server=ServerOptions(replicas=2, cpus_per_replica=0.25, stop_timeout_s=1.0),
    )
    url = f"{api_server.url}/elastic"
    serve.run(application(config), name="elastic", route_prefix="/elastic")
    try:
        health = lambda: dict(httpx.get(f"{url}/health", timeout=60).json())  # noqa: E731
        eventually(lambda: health().get("status") == "ok" and health()["ranks"] | {"width": 1} == whole(1))
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=180) as client:

            def ask(prompt: str) -> str:
                extra = {"ignore_eos": True}
                answer = client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, extra_body=extra
                )
                return str(answer.choices[0].text)

            with concurrent.futures.ThreadPoolExecutor(4) as threads:
                for _ in range(20):
                    alone = threads.submit(ask, prompts[0])
                    widths = set()
                    while not alone.done():
                        widths.add(health()["ranks"]["width"])
                    assert alone.result() == texts[0]
                    if 2 in widths:
                        break
                assert 2 in widths
                answers = list(threads.map(ask, prompts * 2))
                assert answers == texts * 2
        eventually(lambda: health()["ranks"] == whole(1))
        assert health()["status"] == "ok"
    finally:
        serve.delete("elastic")


def whole(width: int) -> dict[str, Any]:
    """What /health says of two replicas that know each other and never lost one another."""
    return {
        "ready": 2, "of": 2, "width": width, "refilling": 0, "losses": 0, "last_loss": None, "divergences": 0, "disagreements": 0,
    }  # fmt: skip
