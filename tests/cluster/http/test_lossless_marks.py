"""Who reads an answer can tell whether it has the model's own law, and what energy it took: over HTTP, with a real engine."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from outrider.cache_service.namespace import hash_key
from outrider.cache_service.store.embedded import EmbeddedRedis
from outrider.cluster.http.api import Service
from outrider.configs.slices import SpeculationOptions, TenancyOptions
from outrider.engine.measures.energy import open_meter
from tests.cluster.circle import CHATS, COMPLETIONS, MESSAGES, TOKENIZER, bearer, local_engine, read_stream, served
from tests.cluster.memory import LocalCacheAdmin

ADMIN = bearer("outrider-admin")
PATHS: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": ["<", "a"]}, CHATS: {"messages": MESSAGES}}
BODY = {"model": "circle", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
CHOICES = [  # of a request, and whether it is lossless
    (None, True),
    ({"strategy": "llma"}, True),
    ({"strategy": "speculative"}, True),
    ({"strategy": "bild"}, False),
    ({"strategy": "bild", "max_draft_tokens": 3}, False),
    ({"strategy": "bild", "max_draft_tokens": 0}, True),
    ({"strategy": "autoregressive"}, True),
]


@dataclass(frozen=True)
class Metered:
    """A server on a replica whose processor's counter moves."""

    url: str
    joules: Callable[[], float]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A powercap folder with a package that uses 100 W."""
    folder = tmp_path_factory.mktemp("powercap")
    zone = folder / "intel-rapl:0"
    zone.mkdir()
    for name, text in (("name", "package-0"), ("energy_uj", "0"), ("max_energy_range_uj", "262143328850")):
        (zone / name).write_text(text)
    over, began = threading.Event(), time.monotonic()

    def tick() -> None:
        while not over.wait(0.001):
            (zone / "new").write_text(str(round((time.monotonic() - began) * 100e6)))
            (zone / "new").replace(zone / "energy_uj")  # nobody reads half a number

    thread = threading.Thread(target=tick)
    thread.start()
    yield folder
    over.set()
    thread.join()


@pytest.fixture(scope="module")
def metered(circle_model: Path, package: Path) -> Iterator[Metered]:
    """A server that offers a lossy strategy besides its own, with the model as its own draft model."""
    speculation = SpeculationOptions(
        "llma", strategies=("bild", "speculative"), draft_model=str(circle_model), exact=False, max_draft_tokens=8
    )
    meter = functools.partial(open_meter, powercap=package)
    tenancy = TenancyOptions(admin_keys=(hash_key("outrider-admin"),))
    with (
        EmbeddedRedis.start() as redis,
        local_engine(circle_model, speculation, meter=meter, max_model_len=512) as engine,
        served(Service(engine, TOKENIZER, tenancy, LocalCacheAdmin(redis.url))) as url,
    ):
        yield Metered(url, lambda: int((package / "intel-rapl:0" / "energy_uj").read_text()) / 1e6)


def chunks(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.Client(base_url=url, timeout=60) as http:
        return read_stream(http, path, body | {"stream_options": {"include_usage": True}})


def test_models_say_whether_all_that_they_offer_is_lossless(metered: Metered) -> None:
    (model,) = httpx.get(f"{metered.url}/v1/models", timeout=60).json()["data"]
    assert model["lossless"] is False
    assert model["strategies"] == ["llma", "bild", "speculative", "autoregressive"]
    assert model["lossless_strategies"] == ["llma", "speculative", "autoregressive"]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_each_answer_and_each_chunk_says_whether_it_is_lossless(metered: Metered, path: str) -> None:
    for speculation, lossless in CHOICES:
        body = BODY | PATHS[path] | {"speculation": speculation}
        answer = httpx.post(metered.url + path, json=body, timeout=60).raise_for_status().json()
        assert answer["lossless"] is lossless, speculation
        streamed = chunks(metered.url, path, body)
        assert {chunk["lossless"] for chunk in streamed} == {lossless} and len(streamed) > 2, speculation


def test_openai_s_client_reads_the_marks(metered: Metered) -> None:
    extra = {"speculation": {"strategy": "bild"}, "ignore_eos": True}
    with OpenAI(base_url=f"{metered.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(model="circle", messages=[{"role": "user", "content": "hi"}], extra_body=extra)
        assert answer.model_extra == {"lossless": False} and answer.usage is not None
        assert answer.usage.model_extra is not None and answer.usage.model_extra["energy_joules"] > 0
        stream = client.completions.create(model="circle", prompt="<", stream=True, temperature=0, extra_body=extra)
        assert [chunk.model_extra for chunk in stream][-1] == {"lossless": False}
        assert client.models.retrieve("circle").model_extra is not None


def test_both_sides_of_a_comparison_have_their_energy(metered: Metered) -> None:
    began_j, body = metered.joules(), BODY | {"prompt": "<", "max_tokens": 100}
    answer = httpx.post(f"{metered.url}/v1/compare", json=body, timeout=60).raise_for_status().json()
    used = [answer[side]["usage"]["energy_joules"] for side in ("accelerated", "baseline")]
    assert min(used) > 0 and sum(used) <= metered.joules() - began_j


def test_energy_is_in_the_usage_and_adds_up(metered: Metered) -> None:
    def stats() -> dict[str, Any]:
        return dict(httpx.get(f"{metered.url}/admin/cache/stats", headers=ADMIN, timeout=60).raise_for_status().json())

    def lossy(found: dict[str, Any]) -> dict[str, Any]:
        (row,) = [row for row in found["strategies"] if row["strategy"] == "bild"]
        return dict(row)

    before, began_j = stats(), metered.joules()
    body = BODY | PATHS["/v1/completions"] | {"max_tokens": 100, "speculation": {"strategy": "bild"}}
    whole = httpx.post(f"{metered.url}/v1/completions", json=body, timeout=60).raise_for_status().json()["usage"]
    usage = [chunk["usage"] for chunk in chunks(metered.url, "/v1/completions", body)]
    passed = metered.joules() - began_j
    assert usage[:-1] == [None] * (len(usage) - 1)
    assert whole["completion_tokens"] == usage[-1]["completion_tokens"] == 200
    told = whole["energy_joules"] + usage[-1]["energy_joules"]
    assert 0 < told <= passed
    after = stats()
    (energy,) = after["energy"]
    assert energy["source"] == "rapl" and 20 < energy["idle_w"] < 500
    assert told - 0.01 <= energy["steps_j"] - before["energy"][0]["steps_j"] <= passed + 5
    row, earlier = lossy(after), lossy(before)
    assert row["lossless"] is False and [one["lossless"] for one in after["strategies"]] == [True, False, True, True]
    counted = {name: row[name] - earlier[name] for name in ("requests", "tokens")}
    assert counted == {"requests": 4, "tokens": 400} and row["steps"] > earlier["steps"] and row["drafted"] > earlier["drafted"]
    assert row["energy_j"] - (earlier["energy_j"] or 0.0) == pytest.approx(told, abs=0.01)
