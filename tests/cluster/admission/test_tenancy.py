"""API keys to tenants, and what of it reaches the engine: a real engine behind real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from outrider.cache_service.namespace import hash_key
from outrider.cluster.admission.tenancy import Sharing, Tenancy
from outrider.cluster.http.api import Service
from outrider.cluster.http.errors import ApiError
from outrider.configs.slices import EngineOptions, TenancyOptions, TenantOptions
from tests.cluster.circle import TOKENIZER, LocalEngine, bearer, check_error, local_engine, served

ACME, ACME_NEW, UMBRELLA, ADMIN = "outrider-acme", "outrider-acme-2", "outrider-ümbrella", "outrider-admin"
TENANTS = {
    "acme": TenantOptions(keys=(hash_key(ACME), hash_key(ACME_NEW)), min_priority=-5),
    "umbrella": TenantOptions(keys=(hash_key(UMBRELLA),), min_priority=2),
    "dormant": TenantOptions(),
}
KEYED = TenancyOptions(tenants=TENANTS, admin_keys=(hash_key(ADMIN),))
MIXED = TenancyOptions(tenants=TENANTS, anonymous="local")
LOCAL = TenancyOptions(anonymous="local")
NOBODY = TenancyOptions()


@pytest.mark.parametrize(
    ("options", "authorization", "tenant"),
    [
        (KEYED, f"Bearer {ACME}", "acme"),
        (KEYED, f"Bearer {ACME_NEW}", "acme"),
        (KEYED, f"bearer   {ACME} ", "acme"),
        (KEYED, f"Bearer {UMBRELLA}", "umbrella"),
        (KEYED, None, None),
        (MIXED, None, "local"),
        (MIXED, f"Bearer {ACME}", "acme"),
        (LOCAL, None, "local"),
        (LOCAL, "Bearer none", "local"),
        (LOCAL, "nonsense", "local"),
        (NOBODY, "Bearer none", None),
        (NOBODY, None, None),
        (TenancyOptions(tenants={"dormant": TenantOptions()}), "Bearer none", None),
    ],
)
def test_tenant_of(options: TenancyOptions, authorization: str | None, tenant: str | None) -> None:
    assert Tenancy(options).tenant_of(authorization) == tenant


@pytest.mark.parametrize("options", [KEYED, MIXED])
def test_keys_that_nobody_has(options: TenancyOptions) -> None:
    bearers = ("nobody", ADMIN, hash_key(ACME), f"{ACME} x", "")
    for authorization in (*(f"Bearer {key}" for key in bearers), ACME, f"Basic {ACME}", "Bearer", ""):
        with pytest.raises(ApiError) as caught:
            Tenancy(options).tenant_of(authorization)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key"), authorization
        assert caught.value.headers == {"WWW-Authenticate": "Bearer"}
        assert ACME not in caught.value.message


@pytest.mark.parametrize(
    ("authorization", "cache", "sharing"),
    [
        (f"Bearer {ACME}", None, Sharing("acme", True)),
        (f"Bearer {ACME}", "tenant", Sharing("acme", True)),
        (f"Bearer {ACME}", "private", Sharing(None, True)),
        (f"Bearer {ACME}", "off", Sharing(None, False)),
        (None, None, Sharing(None, True)),
        (None, "private", Sharing(None, True)),
        (None, "off", Sharing(None, False)),
    ],
)
def test_sharing(authorization: str | None, cache: str | None, sharing: Sharing) -> None:
    assert Tenancy(KEYED).sharing(authorization, cache) == sharing


@pytest.mark.parametrize(("options", "advice"), [(KEYED, "send an API key"), (NOBODY, "no API key is configured")])
def test_a_tenant_is_needed_to_share_its_texts(options: TenancyOptions, advice: str) -> None:
    with pytest.raises(ApiError, match=advice) as caught:
        Tenancy(options).sharing(None, "tenant")
    assert (caught.value.status, caught.value.param) == (400, "cache")


def test_admins() -> None:
    tenancy = Tenancy(KEYED)
    assert tenancy.is_admin(f"Bearer {ADMIN}")
    assert not tenancy.is_admin(f"Bearer {ACME}")
    tenancy.check_admin(f"Bearer {ADMIN}")
    for wrong in (None, f"Bearer {ACME}", ADMIN, "Bearer "):
        with pytest.raises(ApiError) as caught:
            tenancy.check_admin(wrong)
        assert caught.value.status == 401
    with pytest.raises(ApiError, match=r"tenancy\.admin_keys") as closed:
        Tenancy(LOCAL).check_admin(f"Bearer {ADMIN}")
    assert closed.value.status == 403


@pytest.fixture(scope="module")
def engine(circle_model: Path) -> Iterator[LocalEngine]:
    with local_engine(circle_model, None, EngineOptions(max_running=2, scheduling_policy="priority")) as made:
        yield made


@pytest.fixture(scope="module")
def url(engine: LocalEngine) -> Iterator[str]:
    with served(Service(engine, TOKENIZER, KEYED)) as address:
        yield address


COMPLETION = {"model": "circle", "prompt": ["<", "<a"], "max_tokens": 2, "temperature": 0}
CHAT = {"model": "circle", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}


@pytest.mark.parametrize(
    ("header", "field", "session"),
    [(None, None, None), ("", "", None), ("h", None, "h"), (None, "f", "f"), ("h", "f", "f"), ("h" * 512, "", "h" * 512)],
)
def test_a_session_is_that_of_the_body_or_of_the_header(
    engine: LocalEngine, url: str, header: str | None, field: str | None, session: str | None
) -> None:
    headers = bearer(ACME) | ({} if header is None else {"x-session-id": header})
    for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        engine.jobs.clear()
        httpx.post(f"{url}/v1/{path}", json=body | {"prompt_cache_key": field}, headers=headers).raise_for_status()
        assert {(job.tenant, job.session) for job in engine.jobs} == {("acme", session)}


def test_what_the_engine_is_told(engine: LocalEngine, url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key=ACME, max_retries=0, timeout=60) as client:
        engine.jobs.clear()
        completion = client.completions.create(**COMPLETION)
        assert [choice.text for choice in completion.choices] == ["ab", "bc"]
        assert [job.request_id for job in engine.jobs] == [f"{completion.id}/0", f"{completion.id}/1"]
        assert {(job.tenant, job.public) for job in engine.jobs} == {("acme", True)}

        engine.jobs.clear()
        chunks = list(client.chat.completions.create(**CHAT, stream=True, extra_body={"cache": "private"}))
        assert {chunk.id for chunk in chunks} == {engine.jobs[0].request_id.removesuffix("/0")}
        assert (engine.jobs[0].tenant, engine.jobs[0].public) == (None, True)

        engine.jobs.clear()
        client.chat.completions.create(**CHAT, extra_body={"cache": "off"})
        assert (engine.jobs[0].tenant, engine.jobs[0].public) == (None, False)


def prefix_hits(engine: LocalEngine) -> int:
    return engine.replicas[0].describe().counts.prefix_hits


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_that_a_tenant_has_sent_before_is_reused_for_no_other(engine: LocalEngine, url: str, streamed: bool) -> None:
    prompt = f"{streamed}{'>-' * 30}"

    def cached(key: str | None, cache: str | None = None, path: str = "completions") -> int:
        body = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
        body |= {"model": "circle", "max_tokens": 2, "temperature": 0} | ({} if cache is None else {"cache": cache})
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {} if key is None else {"Authorization": f"Bearer {key}".encode("latin-1")}
        text = httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=60).raise_for_status().text
        answer = text.removesuffix("data: [DONE]\n\n").strip().rpartition("data: ")[2] if streamed else text
        usage = json.loads(answer)["usage"]
        assert usage["prompt_tokens"] >= len(prompt)
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    hits = prefix_hits(engine)
    assert [cached(ACME), cached(ACME_NEW), cached(UMBRELLA), cached(UMBRELLA)] == [0, len(prompt) - 1, 0, len(prompt) - 1]
    assert [cached(None), cached(ACME, "private"), cached(ACME, "off")] == [0, 0, 0]
    chat = cached(ACME, path="chat/completions"), cached(ACME, path="chat/completions")
    assert chat[0] == 0 and chat[1] == len(f"[user]{prompt}>") - 1
    assert prefix_hits(engine) == hits + 2 * (len(prompt) - 1) + chat[1]


def test_a_priority_within_the_tenants_range_reaches_the_engine(engine: LocalEngine, url: str) -> None:
    """Whatever a key asked for, it had: any could have all others preempted."""
    for key, asked, had in (
        (None, None, 0), (None, 3, 3), (None, -1, None), (ACME, None, 0), (ACME, -5, -5), (ACME, -6, None), (UMBRELLA, None, 2),
        (UMBRELLA, 1, None), (UMBRELLA, 7, 7),
    ):  # fmt: skip
        engine.jobs.clear()
        headers = {} if key is None else {"Authorization": f"Bearer {key}".encode("latin-1")}
        answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"priority": asked}, headers=headers, timeout=60)
        assert answer.status_code == (400 if had is None else 200)
        assert [job.priority for job in engine.jobs] == ([] if had is None else [had])
        if had is None:
            assert answer.json()["error"]["param"] == "priority" and "min_priority" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_without_a_key_a_request_is_private(engine: LocalEngine, url: str, path: str, body: dict[str, object]) -> None:
    engine.jobs.clear()
    assert httpx.post(url + path, json=body, timeout=60).status_code == 200
    assert {(job.tenant, job.public) for job in engine.jobs} == {(None, True)}

    engine.jobs.clear()
    check_error(httpx.post(url + path, json=body | {"cache": "tenant"}, timeout=60), 400, "send an API key", param="cache")
    assert engine.jobs == []


def test_a_wrong_key_is_refused_everywhere(engine: LocalEngine, url: str) -> None:
    engine.jobs.clear()
    with OpenAI(base_url=f"{url}/v1", api_key="outrider-wrong", max_retries=0, timeout=60) as client:
        for call in (
            lambda: client.completions.create(**COMPLETION),
            lambda: client.chat.completions.create(**CHAT, extra_body={"cache": "off"}),
            lambda: client.models.list(),
            lambda: client.models.retrieve("circle"),
        ):
            with pytest.raises(openai.AuthenticationError) as caught:
                call()
            assert caught.value.code == "invalid_api_key"
    assert engine.jobs == []
    assert httpx.get(f"{url}/v1/models", headers=bearer(ACME)).json()["data"][0]["id"] == "circle"
    assert httpx.get(f"{url}/health", headers=bearer("wrong")).status_code == 200


def test_a_key_with_other_characters(url: str) -> None:
    # As bytes: a client library may refuse to send such a header; the server decodes headers as Latin-1.
    response = httpx.get(f"{url}/v1/models", headers={b"Authorization": f"Bearer {UMBRELLA}".encode("latin-1")})
    assert response.status_code == 200
