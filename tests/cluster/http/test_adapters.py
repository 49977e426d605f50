"""A request names an adapter as its model, and is answered by it alone: over the stock client, by an engine in this process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import NotFoundError, OpenAI
from transformers import AutoModelForCausalLM

from outrider.cache_service.namespace import hash_key
from outrider.cluster.http.api import Service
from outrider.cluster.observe.audit import Auditor, Result
from outrider.configs.slices import AuditOptions, EngineOptions, SpeculationOptions, TenancyOptions, TenantOptions
from outrider.engine.text.tokenizer import load_tokenizer
from tests.cluster.circle import LocalEngine, check_error, local_engine, served
from tests.helpers.models import llama_config, save_adapter, save_model

KEY = "outrider-acme"
PROMPT = "The quick brown fox jumps over the lazy dog. The quick"
NAMES = ("tiny", "sql", "poems")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    model = save_model(folder / "tiny", llama_config(), seed=4)
    stock = AutoModelForCausalLM.from_pretrained(model)
    adapters = {name: save_adapter(folder / name, stock, seed=number) for number, name in enumerate(NAMES[1:])}
    return {"tiny": model, **adapters}


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[LocalEngine]:
    adapters = {name: str(folders[name]) for name in NAMES[1:]}
    with local_engine(folders["tiny"], SpeculationOptions("auto"), adapters=adapters) as engine:
        yield engine


@pytest.fixture(scope="module")
def auditor(engine: LocalEngine) -> Auditor:
    return Auditor(engine, AuditOptions(), SpeculationOptions("auto"), EngineOptions())


@pytest.fixture(scope="module")
def url(folders: dict[str, Path], engine: LocalEngine, auditor: Auditor) -> Iterator[str]:
    tenancy = TenancyOptions(tenants={"acme": TenantOptions(keys=(hash_key(KEY),))})
    with served(Service(engine, load_tokenizer(str(folders["tiny"])), tenancy, auditor=auditor, open_metrics=True)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def say(client: OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def test_each_name_is_answered_by_its_own(client: OpenAI, engine: LocalEngine) -> None:
    texts = [say(client, name) for name in NAMES]
    assert len(set(texts)) == 3 and [say(client, name) for name in NAMES] == texts
    assert [(job.adapter, job.tenant, job.cache_namespace) for job in engine.jobs[-3:]] == [
        (None, "acme", "acme"), ("sql", "acme", "acme:sql"), ("poems", "acme", "acme:poems"),
    ]  # fmt: skip
    for name, text in zip(NAMES, texts, strict=True):
        stream = client.completions.create(model=name, prompt=PROMPT, max_tokens=24, temperature=0, stream=True)
        chunks = list(stream)
        assert {chunk.model for chunk in chunks} == {name} and "".join(chunk.choices[0].text for chunk in chunks) == text


def test_the_list_has_them_with_their_model(client: OpenAI, url: str, folders: dict[str, Path]) -> None:
    cards = [model.model_dump() for model in client.models.list().data]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("tiny", "tiny", None), ("sql", folders["sql"].name, "tiny"), ("poems", folders["poems"].name, "tiny"),
    ]  # fmt: skip
    assert client.models.retrieve("sql").model_dump() == cards[1]
    schema = httpx.get(f"{url}/openapi.json").json()["components"]["schemas"]["Model"]["properties"]
    assert {"root", "parent"} <= schema.keys()


def test_one_that_is_the_model_has_its_folder_and_its_base(folders: dict[str, Path], tmp_path: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folders["tiny"])
    adapter = save_adapter(tmp_path / "rules", stock, base_model_name_or_path=str(folders["tiny"]))
    tokenizer = load_tokenizer(str(adapter))
    with local_engine(adapter, SpeculationOptions("llma")) as engine, served(Service(engine, tokenizer)) as url:
        (card,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert (card["id"], card["root"], card["parent"]) == ("rules", "rules", folders["tiny"].name)


def test_a_name_that_is_not_there_is_a_404(client: OpenAI, url: str) -> None:
    with pytest.raises(NotFoundError, match="this server has 'tiny', 'sql', 'poems'"):
        say(client, "other")
    answer = httpx.post(f"{url}/v1/completions", json={"model": "other", "prompt": "a"})
    check_error(answer, 404, "other", param="model", code="model_not_found")


def test_audits_and_comparisons_are_with_the_adapter(client: OpenAI, url: str, auditor: Auditor) -> None:
    said = say(client, "sql")
    (kept,) = auditor.last(1)
    assert kept.job.adapter == "sql" and asyncio.run(auditor.audit(kept)).result is Result.IDENTICAL
    body = {"model": "sql", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    compared = httpx.post(f"{url}/v1/compare", json=body, timeout=60).raise_for_status().json()
    assert (compared["model"], compared["identical"], compared["accelerated"]["text"]) == ("sql", True, said)


def test_the_metrics_are_of_the_model(client: OpenAI, url: str) -> None:
    say(client, "poems")
    assert 'model_name="tiny"' in (text := httpx.get(f"{url}/metrics").text) and 'model_name="poems"' not in text


def test_another_replica_goes_on_with_the_adapter(client: OpenAI, engine: LocalEngine) -> None:
    async def tokens(emitted: tuple[int, ...]) -> list[int]:
        found = list(emitted)
        async for output in engine.generate(dataclasses.replace(job, emitted=emitted, request_id=f"again/{len(emitted)}"))[0]:
            found += output.token_ids
        return found

    say(client, "sql")
    job = engine.jobs[-1]
    whole = asyncio.run(tokens(()))
    assert asyncio.run(tokens(tuple(whole[:5]))) == whole
