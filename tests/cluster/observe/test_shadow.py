"""The shadow with real engines: the baseline answers what it has room for, and clients notice nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.cache_service.namespace import hash_key
from outrider.cluster.http.api import Service
from outrider.cluster.observe import shadow as shadow_module
from outrider.cluster.observe.shadow import Shadow
from outrider.configs.slices import EngineOptions, SpeculationOptions, TenancyOptions
from outrider.decoding.request import PLAIN
from tests.cluster.circle import ENDLESS, TEXT, TOKENIZER, LocalEngine, bearer, local_engine, served
from tests.helpers.models import llama_config, save_model
from tests.helpers.waiting import eventually

ADMIN = bearer("outrider-admin")
TENANCY = TenancyOptions(anonymous="acme", admin_keys=(hash_key("outrider-admin"),))
PLAIN_ENGINE = SpeculationOptions(PLAIN, max_draft_tokens=0)
BODY = TEXT | {"max_tokens": 20}


class Compared:
    """A served API some of whose requests a baseline answers, too."""

    def __init__(self, url: str) -> None:
        self.url = url

    def complete(self, **more: Any) -> str:
        response = httpx.post(f"{self.url}/v1/completions", json=BODY | more, timeout=60).raise_for_status()
        return str(response.json()["choices"][0]["text"])

    def standing(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/admin/baseline", headers=ADMIN).raise_for_status().json())

    def settled(self, **results: int) -> dict[str, Any]:
        """The standing, once so many requests have come to these results."""
        eventually(lambda: sum(self.standing()["results"].values()) >= sum(results.values()))
        standing = self.standing()
        assert standing["results"] == {"compared": 0, "dropped": 0, "failed": 0} | results
        return standing


@pytest.fixture(scope="module")
def other(circle_model: Path) -> Iterator[LocalEngine]:
    """A baseline that says the same."""
    with local_engine(circle_model, PLAIN_ENGINE, EngineOptions(max_running=1)) as engine:
        yield engine


@pytest.fixture
def compared(circle_engine: LocalEngine, other: LocalEngine) -> Iterator[Callable[..., Compared]]:
    with contextlib.ExitStack() as stack:

        def serve(baseline: LocalEngine = other, share: float = 1.0, **options: Any) -> Compared:
            options = {"devices": (2, 1), "shares_devices": False, **options}
            shadow = Shadow(circle_engine, baseline, "tensor", share, **options) if share else None
            service = Service(circle_engine, TOKENIZER, TENANCY, open_metrics=True, shadow=shadow)
            return Compared(stack.enter_context(served(service)))

        yield serve


def test_what_both_answered_is_told_and_counted(compared: Callable[..., Compared], other: LocalEngine) -> None:
    server, before = compared(), len(other.jobs)
    assert server.standing()["sentence"] == "0 requests were answered by both: too few to compare."
    for done, more in enumerate(({}, {"temperature": 1.0, "seed": 5}, {"stop": [":"]}, {"prompt": "s"}), start=1):
        server.complete(**more)
        standing = server.settled(compared=done)
    assert standing["texts"] == {"equal": 4, "near_tie": 0, "sampled": 0, "other": 0}
    jobs = other.jobs[before:]
    assert {(job.tenant, job.strategy, job.max_draft_tokens, job.public, job.session) for job in jobs} == {
        (None, PLAIN, 0, False, None)
    }
    assert set(standing["figures"]) == {"tokens_per_s", "ttft_s", "tpot_s", "tokens_per_device_s"}  # no meter is here
    for figure in standing["figures"].values():
        assert figure["pairs"] >= 3 and figure["low"] <= figure["ratio"] <= figure["high"]
        assert figure["engine"] > 0 and figure["baseline"] > 0
    speed, slowness = standing["figures"]["tokens_per_s"], standing["figures"]["tpot_s"]
    assert slowness["engine"] == pytest.approx(1 / speed["engine"], rel=0.5)
    assert "tensor baseline" in standing["sentence"] and standing["sentence"].endswith("texts: 4 equal.")
    metrics = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = [sample for family in metrics if "baseline" in family.name for sample in family.samples]
    told = {" ".join(sorted(sample.labels.values())): sample.value for sample in samples}
    assert told["compared"] == told["equal"] == 4 and told["other"] == told["dropped"] == 0
    assert told["median tokens_per_s"] == pytest.approx(speed["ratio"]) and told["low tokens_per_s"] == pytest.approx(
        speed["low"]
    )
    assert told["baseline ttft_s"] == pytest.approx(standing["figures"]["ttft_s"]["baseline"])


def test_texts_that_part(compared: Callable[..., Compared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline has another model, which no deployment of ours would have."""
    model = save_model(tmp_path / "tiny", llama_config(vocab_size=len(TOKENIZER)))
    with local_engine(model, PLAIN_ENGINE) as engine:
        server = compared(engine)
        server.complete(max_tokens=2)
        assert server.settled(compared=1)["texts"]["other"] == 1
        server.complete(max_tokens=2, temperature=1.0, seed=1)
        assert server.settled(compared=2)["texts"]["sampled"] == 1
        monkeypatch.setattr(shadow_module, "NEAR_TIE", 100.0)  # the logits of both tokens are much nearer than that
        server.complete(max_tokens=2)
        standing = server.settled(compared=3)
        assert standing["texts"] == {"equal": 0, "near_tie": 1, "sampled": 1, "other": 1}
        assert standing["sentence"].endswith("texts: 1 near tie, 1 sampled, 1 other.")


def test_the_baseline_is_never_asked_for_more_than_it_has_room_for(
    compared: Callable[..., Compared], other: LocalEngine, circle_engine: LocalEngine
) -> None:
    text = compared(share=0.0).complete()
    server, together = compared(), compared(shares_devices=True)
    endless = ENDLESS | {"stream": True}
    with served(Service(other, TOKENIZER)) as url, httpx.stream("POST", f"{url}/v1/completions", json=endless) as busy:
        lines = busy.iter_lines()
        next(lines)
        assert server.complete() == text
        server.settled(dropped=1)
    eventually(lambda: not other.replicas[0].describe().counts.running)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS | {"stream": True}) as busy:
        lines = busy.iter_lines()
        next(lines)
        assert together.complete() == text
        together.settled(dropped=1)  # a client's request computes on the same devices
    eventually(lambda: not circle_engine.replicas[0].describe().counts.running)
    assert together.complete() == text
    assert together.settled(dropped=1, compared=1)["texts"]["equal"] == 1


def test_what_the_baseline_cannot_answer_harms_nobody(compared: Callable[..., Compared], circle_model: Path) -> None:
    with local_engine(circle_model, PLAIN_ENGINE, max_model_len=64) as short:
        server = compared(short)
        assert len(server.complete(max_tokens=100)) > 64
        server.settled(failed=1)
        server.complete()
        server.settled(failed=1, compared=1)


def test_what_is_computed_once(compared: Callable[..., Compared], other: LocalEngine) -> None:
    before = len(other.jobs)
    server = compared()
    for more in ({"speculation": {"max_draft_tokens": 0}}, {"cache": "private"}):
        server.complete(**more)
    drawn = iter((0.5, 0.49, 0.9))
    half = compared(share=0.5, draw=lambda: next(drawn))
    for _ in range(3):
        half.complete()
    half.settled(compared=1)
    assert len(other.jobs) == before + 1 and not any(server.standing()["results"].values())


def test_who_may_ask(compared: Callable[..., Compared]) -> None:
    for share, status in ((1.0, 401), (0.0, 401)):
        assert httpx.get(f"{compared(share=share).url}/admin/baseline").status_code == status
    refused = httpx.get(f"{compared(share=0.0).url}/admin/baseline", headers=ADMIN)
    assert refused.status_code == 404 and "baseline.shadow" in refused.json()["error"]["message"]
