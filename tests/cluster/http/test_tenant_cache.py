"""/v1/cache over a real Redis: each tenant sees and deletes its own texts, and nobody else's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from outrider.cache_service.namespace import hash_key
from outrider.cluster.admission.tenancy import Tenancy
from outrider.cluster.http.error_handlers import install
from outrider.cluster.http.tenant_cache import TenantCacheService, add_tenant_cache_routes
from outrider.cluster.serving import shared_answer
from outrider.configs.slices import CacheOptions, TenancyOptions, TenantOptions
from tests.cluster.circle import bearer, check_error, client_of
from tests.cluster.memory import LocalCacheAdmin, MemoryServer

ACME, UMBRELLA = bearer("outrider-acme"), bearer("outrider-umbrella")
TENANTS = {name: TenantOptions(keys=(hash_key(f"outrider-{name}"),)) for name in ("acme", "umbrella")}
TENANTS["umbrella"] = dataclasses.replace(TENANTS["umbrella"], cache_mib=0.5)
NOTHING = dict.fromkeys(("tenant", "texts", "tokens", "bytes", "quota_bytes", "ttl_s"))


def application(port: Any, keys_file: Path | None = None) -> FastAPI:
    """The routes for two tenants, one of which has a quota of its own."""
    app = FastAPI()
    install(app)

    async def model() -> Any:
        return SimpleNamespace(vocab_size=258)  # all that is asked of it

    tenancy = Tenancy(TenancyOptions(tenants=TENANTS, keys_file=None if keys_file is None else str(keys_file)))
    service = TenantCacheService(tenancy, port, model, CacheOptions(tenant_mib=2.0, ttl_s=60.0))
    add_tenant_cache_routes(app, service)
    return app


@pytest.fixture
def caller(memory_server: MemoryServer) -> Iterator[httpx.Client]:
    """A client of the routes over the memory."""
    with client_of(application(LocalCacheAdmin(memory_server.redis.url))) as client:
        yield client


def test_nobody_is_told_where_redis_is(caplog: pytest.LogCaptureFixture) -> None:
    with client_of(application(LocalCacheAdmin("redis://:secret@127.0.0.1:1/0"))) as client:
        for method in ("GET", "DELETE"):
            answer = client.request(method, "/v1/cache", headers=ACME)
            check_error(answer, 503, "Redis", "try again", code="cache_unavailable")
            assert "127.0.0.1" not in answer.text and "secret" not in answer.text
    told = [record for record in caplog.records if "the shared cache did not answer" in record.message]
    assert len(told) == 2 and not any(record.exc_info for record in told)


def test_each_tenant_is_told_of_its_own_texts(memory_server: MemoryServer, caller: httpx.Client) -> None:
    memory_server.add("acme", "chatcmpl-1", [5, 6, 7])
    memory_server.add("acme", "chatcmpl-2", [8, 9])
    told = {"tenant": "acme", "texts": 2, "tokens": 5, "bytes": 10, "quota_bytes": 2 << 20, "ttl_s": 60.0}
    assert caller.get("/v1/cache", headers=ACME).json() == told
    own = {"tenant": "umbrella", "texts": 0, "tokens": 0, "bytes": 0, "quota_bytes": 1 << 19}
    assert caller.get("/v1/cache", headers=UMBRELLA).json() == told | own
    assert caller.get("/v1/cache").json() == NOTHING


def test_redis_is_asked_once_in_a_while_for_a_tenant(memory_server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_answer, "FRESH_S", 1e9)
    port, asked = LocalCacheAdmin(memory_server.redis.url), list[str | None]()

    async def stats(tenant: str | None = None, vouched: bool = False) -> Any:
        asked.append(tenant)
        return await LocalCacheAdmin.stats(port, tenant, vouched)

    monkeypatch.setattr(port, "stats", stats)
    memory_server.add("acme", "chatcmpl-1", [5, 6, 7])
    with client_of(application(port)) as caller:
        for headers in (ACME, ACME, UMBRELLA, UMBRELLA):
            caller.get("/v1/cache", headers=headers).raise_for_status()
        assert asked == ["acme", "umbrella"]
        caller.delete("/v1/cache", headers=ACME).raise_for_status()
        assert caller.get("/v1/cache", headers=ACME).json()["texts"] == 0


def test_a_tenant_deletes_its_own_texts_alone(memory_server: MemoryServer, caller: httpx.Client) -> None:
    memory_server.add("acme", "chatcmpl-1", [5, 6, 7])
    memory_server.add("umbrella", "chatcmpl-2", [8, 9])
    assert caller.delete("/v1/cache", headers=ACME).json() == {"tenant": "acme", "deleted": True}
    assert memory_server.texts("acme") == set() and memory_server.texts("umbrella") == {(8, 9)}
    refused = caller.delete("/v1/cache")
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "no_tenant"


def test_a_wrong_key_is_refused(caller: httpx.Client) -> None:
    wrong = bearer("outrider-nobody")
    for method in ("GET", "DELETE"):
        assert caller.request(method, "/v1/cache", headers=wrong).json()["error"]["code"] == "invalid_api_key"


def test_where_nothing_is_shared_there_is_nothing_to_tell() -> None:
    with client_of(application(None), ACME) as client:
        assert client.get("/v1/cache").json() == NOTHING | {"tenant": "acme"}
        refused = client.delete("/v1/cache")
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "cache_disabled"


def test_a_tenant_that_came_with_the_file_of_keys_sees_and_deletes_its_own(memory_server: MemoryServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants: {}\n")
    new = bearer("outrider-new")
    with client_of(application(LocalCacheAdmin(memory_server.redis.url), keys)) as client:
        assert client.get("/v1/cache", headers=new).status_code == 401
        keys.write_text(f"tenants:\n  new: {{keys: ['{hash_key('outrider-new')}'], cache_mib: 1}}\n")
        told = {"tenant": "new", "texts": 0, "tokens": 0, "bytes": 0, "quota_bytes": 1 << 20, "ttl_s": 60.0}
        assert client.get("/v1/cache", headers=new).json() == told
        memory_server.add("acme", "chatcmpl-1", [5, 6, 7])
        memory_server.add("new", "chatcmpl-2", [8, 9])  # as a replica did that knew it
        assert client.get("/v1/cache", headers=new).json() == told | {"texts": 1, "tokens": 2, "bytes": 4}
        assert client.delete("/v1/cache", headers=new).json() == {"tenant": "new", "deleted": True}
        assert client.get("/v1/cache", headers=new).json() == told
        assert client.get("/v1/cache", headers=ACME).json()["texts"] == 1
