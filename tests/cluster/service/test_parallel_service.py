"""Services over several ranks: their answers are those of one process, also when a rank or the leader is killed."""

from __future__ import annotations

import concurrent.futures
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cache_service.namespace import hash_key
from outrider.decoding.request import SamplingParams
from tests.cluster.circle import Server
from tests.cluster.service.applications import OPERATOR, PROMPT, Application, kill, plain_answers, processes, serving, tiny_config
from tests.helpers.models import SENTENCES
from tests.helpers.parts import shared_buffers
from tests.helpers.waiting import eventually

TOKENS = 1000  # of an answer: seconds, so that what happens after its beginning happens in its middle
FOLLOWER, PART = "ray::RankActor", "ray::ShardActor"
NEVER_LOST = {"ready": 2, "of": 2, "refilling": 0, "losses": 0, "last_loss": None, "divergences": 0, "disagreements": 0}
RECYCLING = {"strategy": "recycling", "max_draft_tokens": 8}
without_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install -e '.[baselines]'"
)
PARTS = [pytest.param("tensor", marks=without_deepspeed), pytest.param("pipeline", marks=pytest.mark.proof)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model that all of them serve."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def group(api_server: Server, folder: Path) -> Iterator[Application]:
    """One group of two ranks that each hold the model."""
    parallelism = {"mode": "lookahead", "world_size": 2}
    config = tiny_config(folder, speculation=RECYCLING, parallelism=parallelism)
    with serving(api_server, "parallel", config, TOKENS) as made:
        yield made


def becomes_whole(group: Application) -> None:
    group.becomes(status="ok", ranks={"ready": 2, "of": 2, "refilling": 0})


def test_a_group_answers_what_one_replica_does(group: Application) -> None:
    becomes_whole(group)
    assert (len(group.engines()), len(processes(FOLLOWER))) == (1, 1)
    with group.client() as client, concurrent.futures.ThreadPoolExecutor(2) as threads:
        for answer in [threads.submit(group.ask, client) for _ in range(2)]:
            assert answer.result(180).choices[0].text == group.expected.text
    ranks = group.health()["ranks"]
    assert (ranks["losses"], ranks["divergences"], ranks["disagreements"]) == (0, 0, 0)


def test_a_follower_killed_in_the_middle_of_a_stream_is_replaced(group: Application) -> None:
    becomes_whole(group)
    before = processes(FOLLOWER)
    states = []

    def strike() -> None:
        kill(before)
        group.becomes(status="degraded")
        states.append(group.health()["ranks"])

    group.stream_with(strike)
    assert states[0]["ready"] < states[0]["of"] == 2 and states[0]["losses"] == 1 and states[0]["last_loss"]
    becomes_whole(group)
    after = processes(FOLLOWER)
    assert len(after) == 1 and after.isdisjoint(before)


@pytest.mark.proof
def test_the_leader_killed_in_the_middle_of_answers_is_replaced_with_its_group(group: Application) -> None:
    becomes_whole(group)
    leaders, followers = group.engines(), processes(FOLLOWER)
    with group.client() as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
        whole = threads.submit(group.ask, client)
        group.becomes(running=1)

        def strike() -> None:
            assert not whole.done()
            kill(leaders)

        group.stream_with(strike)
        answer = whole.result(180)
        assert answer.choices[0].text == group.expected.text and answer.usage.completion_tokens == TOKENS
    becomes_whole(group)
    for now, before in ((group.engines(), leaders), (processes(FOLLOWER), followers)):
        assert len(now) == 1 and now.isdisjoint(before)


@pytest.mark.proof
@pytest.mark.parametrize("mode", PARTS)
def test_a_killed_rank_that_held_a_part_costs_a_pause(mode: str, api_server: Server, folder: Path) -> None:
    config = tiny_config(folder, speculation=RECYCLING, parallelism={"mode": mode, "world_size": 2})
    with serving(api_server, f"parts-{mode}", config, 400) as service:
        service.becomes(ranks={"ready": 2})
        leaders, followers = service.engines(), processes(PART)
        assert len(leaders) == len(followers) == 1
        with service.client() as client:
            assert service.ask(client).choices[0].text == service.expected.text
        buffers = shared_buffers(followers)
        service.stream_with(lambda: kill(followers))
        told = 'outrider:device_failures_total{error="rank_lost"} 1.0'
        eventually(lambda: told in httpx.get(f"{service.url}/metrics", timeout=60).text)
        assert service.engines().isdisjoint(leaders) and processes(PART).isdisjoint(followers)
        assert not any(buffer.exists() for buffer in buffers | shared_buffers(processes(PART)))
    eventually(lambda: not processes(PART), 120)


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.proof), *PARTS])
def test_answers_are_compared_with_a_baseline_that_is_deployed(kind: str, api_server: Server, folder: Path) -> None:
    config = tiny_config(folder, speculation=RECYCLING, baseline={"enabled": True, "kind": kind})
    with serving(api_server, f"beside-{kind}", config, 90) as service:
        eventually(lambda: httpx.get(f"{service.url}/ready", timeout=60).status_code == 200, 120)
        assert len(processes(PART)) == (kind != "plain") and "ranks" not in service.health()
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 90, "temperature": 1.0, "seed": 77, "ignore_eos": True}
        answer = httpx.post(f"{service.url}/v1/compare", json=body, timeout=60).raise_for_status().json()
        assert (answer["against"], answer["ran"], answer["baseline"]["kind"]) == ("baseline", "in turns", kind)
        assert answer["identical"] and answer["baseline"]["text"] == answer["accelerated"]["text"] == service.expected.text
        assert answer["baseline"]["tokens_per_step"] == 1.0


@pytest.mark.proof
@pytest.mark.parametrize("kind", PARTS)
def test_a_baseline_answers_what_is_served_as_well(kind: str, api_server: Server, folder: Path) -> None:
    """As ``k8s/overlays/cpu-compare``, with all requests instead of a twentieth."""
    parallelism = {"mode": "lookahead", "world_size": 2}
    baseline = {"enabled": True, "kind": kind, "shadow": 1.0}
    tenancy = {"admin_keys": [hash_key(OPERATOR)], "anonymous": "local"}
    config = tiny_config(folder, speculation=RECYCLING, parallelism=parallelism, baseline=baseline, tenancy=tenancy)
    with serving(api_server, f"shadow-{kind}", config, 90) as service, service.client() as client:
        eventually(lambda: httpx.get(f"{service.url}/ready", timeout=60).status_code == 200, 120)

        def standing() -> dict[str, Any]:
            headers = {"Authorization": f"Bearer {OPERATOR}"}
            return dict(httpx.get(f"{service.url}/admin/baseline", headers=headers, timeout=60).raise_for_status().json())

        for done in (1, 2, 3):
            assert service.ask(client).choices[0].text == service.expected.text
            eventually(lambda done=done: sum(standing()["results"].values()) == done, 120)  # type: ignore[misc]
        told = standing()
        assert told["results"] == {"compared": 3, "dropped": 0, "failed": 0} and told["texts"]["equal"] == 3
        assert told["figures"]["tokens_per_s"]["pairs"] == 3 and f"{kind} baseline" in told["sentence"]
        compared = 'outrider:baseline_texts_total{texts="equal"} 3.0'
        eventually(lambda: compared in httpx.get(f"{service.url}/metrics", timeout=60).text)


def test_two_replicas_serve_one_request_together(api_server: Server, folder: Path) -> None:
    prompts, tokens = SENTENCES[:2], 600
    parallelism = {"mode": "lookahead", "world_size": "auto", "rank_timeout_s": 30.0}
    config = tiny_config(folder, speculation=RECYCLING, parallelism=parallelism, server={"replicas": 2})
    greedy = SamplingParams(tokens, ignore_eos=True)
    texts = [answer.text for answer in plain_answers(config.model, *((prompt, greedy) for prompt in prompts))]
    with serving(api_server, "elastic", config, 10) as service, service.client() as client:

        def ask(prompt: str) -> str:
            extra: dict[str, Any] = {"ignore_eos": True}
            answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, extra_body=extra)
            return str(answer.choices[0].text)

        service.becomes(status="ok", ranks=NEVER_LOST)
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            widths = set[int]()
            for _ in range(20):
                alone = threads.submit(ask, prompts[0])
                while not alone.done():
                    widths.add(service.health()["ranks"]["width"])
                assert alone.result() == texts[0]
                if 2 in widths:
                    break
            assert 2 in widths
            assert list(threads.map(ask, prompts * 2)) == texts * 2
        service.becomes(status="ok", ranks=NEVER_LOST | {"width": 1})
