"""The admin routes over a real Redis: what they do, whom they serve, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from actors.replica import Description
from cache_service.namespace import hash_key
from cluster.admission.tenancy import Tenancy
from cluster.http.admin import api as admin_api
from cluster.http.admin.api import AdminService, add_admin_routes
from cluster.http.errors import install
from configs.slices import TenancyOptions

ServeApi = Callable[[FastAPI], AbstractContextManager[str]]
BEARER = {"Authorization": "Bearer outrider-a"}
ROUTES = [
    ("GET", "/stats"),
    ("GET", "/export?tenant=acme"),
    ("POST", "/import?tenant=acme"),
    ("POST", "/preload"),
    ("DELETE", "/tenants/acme"),
    ("DELETE", "/tenants/acme/requests/chatcmpl-1"),
    ("GET", "/verify"),
]


@pytest.fixture
def admin(memory_server: Any) -> Iterator[httpx.Client]:
    """A client with the operator's key."""
    headers = {"Authorization": f"Bearer {memory_server.admin_key}"}
    with httpx.Client(base_url=f"{memory_server.url}/admin/cache", headers=headers, timeout=30) as client:
        yield client


async def no_replicas() -> list[Description]:
    """A server without engines."""
    return []


def check(response: httpx.Response, status: int, code: str, *words: str, param: str | None = None) -> None:
    """The error has OpenAI's shape, and says these words."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["code"], error["param"]) == (code, param)
    for word in words:
        assert word in error["message"]


def tokens(admin: httpx.Client) -> dict[str, int]:
    return {entry["tenant"]: entry["tokens"] for entry in admin.get("/stats").json()["tenants"]}


def test_only_the_operator_is_served(admin: httpx.Client, memory_server: Any) -> None:
    memory_server.add("acme", "chatcmpl-1", [5, 6, 7])
    for method, path in ROUTES:
        for wrong in (memory_server.tenant_key, hash_key(memory_server.admin_key), "nobody"):
            response = admin.request(method, path, headers={"Authorization": f"Bearer {wrong}"})
            check(response, 401, "invalid_api_key", "not an admin key")
        malformed = admin.request(method, path, headers={"Authorization": memory_server.admin_key})
        check(malformed, 401, "invalid_api_key", "Bearer KEY")
        assert malformed.headers["www-authenticate"] == "Bearer"
        del admin.headers["Authorization"]
        check(admin.request(method, path), 401, "invalid_api_key", "admin key")
        admin.headers["Authorization"] = f"Bearer {memory_server.admin_key}"
    assert memory_server.texts("acme") == {(5, 6, 7)}


@pytest.mark.parametrize(
    ("admin_keys", "status", "code"), [((), 403, "admin_disabled"), ((hash_key("outrider-a"),), 404, "cache_disabled")]
)
def test_closed_and_disabled(
    serve_api: ServeApi, byte_tokenizer: Any, admin_keys: tuple[str, ...], status: int, code: str
) -> None:
    service = AdminService(Tenancy(TenancyOptions(admin_keys=admin_keys)), byte_tokenizer, None, no_replicas)
    with serve_api(application(service)) as url, httpx.Client(base_url=url, headers=BEARER) as client:
        for method, path in ROUTES:
            check(client.request(method, f"/admin/cache{path}"), status, code)


def application(service: AdminService) -> FastAPI:
    """The admin routes alone."""
    app = FastAPI()
    install(app)
    add_admin_routes(app, service)
    return app


def test_a_life(admin: httpx.Client, memory_server: Any) -> None:
    assert tokens(admin) == {"acme": 0, "umbrella": 0, "*": 0}
    memory_server.add("acme", "chatcmpl-1", [5, 6, 7], choice=0)
    memory_server.add("acme", "chatcmpl-1", [5, 6, 8], choice=1)
    memory_server.add("acme", "chatcmpl-2", [9])
    memory_server.add("umbrella", "chatcmpl-1", [11, 12])
    assert tokens(admin) == {"acme": 7, "umbrella": 2, "*": 0}

    answer = admin.delete("/tenants/acme/requests/chatcmpl-1").json()
    assert answer == {"tenant": "acme", "request": "chatcmpl-1", "deleted": True}
    assert memory_server.texts("acme") == {(9,)}
    assert memory_server.texts("umbrella") == {(11, 12)}  # its request of the same name is another

    assert admin.delete("/tenants/umbrella").json() == {"tenant": "umbrella", "deleted": True}
    assert tokens(admin) == {"acme": 1, "umbrella": 0, "*": 0}
    assert admin.get("/verify").json() == {"problems": []}


def test_preload_takes_texts_and_stores_tokens(admin: httpx.Client, memory_server: Any) -> None:
    special = memory_server.tokenizer.eos_token
    answer = admin.post("/preload", json={"documents": ["ab", "é"]})
    assert answer.json() == {"documents": 2, "tokens": 4, "texts": 2}
    encode = memory_server.tokenizer.encode
    assert memory_server.texts("*") == {tuple(encode("ab", add_special_tokens=False)), tuple(encode("é"))}
    assert memory_server.texts("acme") == set()
    admin.post("/preload", json={"documents": [f"ab{special}"]})
    assert (*encode("ab"), memory_server.tokenizer.eos_token_id) in memory_server.texts("*")


def test_export_is_a_file(admin: httpx.Client, memory_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_api, "_PIECE_BYTES", 7)  # so that a few tokens are many pieces
    memory_server.add("acme", "chatcmpl-1", list(range(2, 200)))
    exported = admin.get("/export", params={"tenant": "acme"})
    assert exported.headers["content-disposition"] == 'attachment; filename="acme.snapshot"'
    assert exported.headers["content-type"] == "application/octet-stream"
    assert int(exported.headers["content-length"]) == len(exported.content) > 198
    assert 'filename="public.snapshot"' in admin.get("/export", params={"tenant": "*"}).headers["content-disposition"]

    imported = admin.post("/import", params={"tenant": "umbrella"}, content=exported.content)
    assert imported.json() == {"tenant": "umbrella", "texts": 1}
    assert memory_server.texts("umbrella") == {tuple(range(2, 200))}


@pytest.mark.parametrize("cut", [slice(0, 0), slice(0, 20), slice(None, -1), slice(1, None)])
def test_what_is_no_snapshot_is_not_imported(admin: httpx.Client, memory_server: Any, cut: slice) -> None:
    memory_server.add("acme", "chatcmpl-1", [5, 6, 7])
    data = admin.get("/export?tenant=acme").content
    check(admin.post("/import?tenant=umbrella", content=data[cut]), 400, "invalid_snapshot", "cannot be imported: ")
    assert memory_server.texts("umbrella") == set()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/export?tenant=nobody"),
        ("POST", "/import?tenant=nobody"),
        ("DELETE", "/tenants/nobody"),
        ("DELETE", "/tenants/nobody/requests/chatcmpl-1"),
        ("DELETE", "/tenants/%2A%0A"),
    ],
)
def test_unknown_tenants(admin: httpx.Client, method: str, path: str) -> None:
    check(admin.request(method, path), 404, "tenant_not_found", param="tenant")


def test_a_tenant_must_be_named(admin: httpx.Client) -> None:
    for method, path in (("GET", "/export"), ("POST", "/import"), ("GET", "/export?tenant=")):
        check(admin.request(method, path), 400, "missing_required_parameter", "?tenant=NAME", param="tenant")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"{}", "documents"),
        (b'{"documents": []}', "documents"),
        (b'{"documents": "text"}', "documents"),
        (b'{"documents": ["text", 3]}', "documents[1]"),
        (b'{"documents": ["text", ""]}', "documents[1]"),
        (b'{"documents": ["\\ud800"]}', None),
        (b'{"documents": ["\xff"]}', None),
        (b'{"documents": ["x"], "tenant": "acme"}', "tenant"),
    ],
)
def test_bodies_that_hold_no_documents(admin: httpx.Client, memory_server: Any, body: bytes, param: str | None) -> None:
    response = admin.post("/preload", content=body)
    check(response, 400, "invalid_value", '{"documents": ["a text", ...]}', param=param)
    assert memory_server.texts("*") == set()


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("path", ["/preload", "/import?tenant=acme"])
def test_bodies_that_are_too_long(
    admin: httpx.Client, memory_server: Any, monkeypatch: pytest.MonkeyPatch, path: str, announced: bool
) -> None:
    monkeypatch.setattr(admin_api, "MAX_PRELOAD_BYTES", 1000)
    monkeypatch.setattr(admin_api, "MAX_IMPORT_BYTES", 1000)
    fits = json.dumps({"documents": ["x" * 981]}).encode()
    assert len(fits) == 1000
    assert admin.post("/preload", content=fits).status_code == 200
    long = fits.replace(b"xx", b"xxx", 1)
    content = long if announced else iter([long[:500], long[500:]])
    check(admin.post(path, content=content), 413, "body_too_long", "1000 bytes")


def test_redis_away(serve_api: ServeApi, local_cache_admin: Any, byte_tokenizer: Any) -> None:
    tenancy = Tenancy(TenancyOptions(admin_keys=(hash_key("outrider-a"),)))
    service = AdminService(tenancy, byte_tokenizer, local_cache_admin("redis://:secret@127.0.0.1:1/0"), no_replicas)
    with serve_api(application(service)) as url, httpx.Client(base_url=url, headers=BEARER, timeout=30) as client:
        found = client.get("/admin/cache/stats").json()  # what the replicas count is told all the same
        assert found["tenants"] == found["replicas"] == [] and "Redis" in found["error"] and "secret" not in found["error"]
        for method, path in ROUTES[1:]:
            content = b'{"documents": ["text"]}' if path == "/preload" else b""
            response = client.request(method, f"/admin/cache{path}", content=content)
            check(response, 503, "cache_unavailable", "Redis", "try again")
            assert response.json()["error"]["type"] == "server_error"
            assert "secret" not in response.text


def test_routes(admin: httpx.Client) -> None:
    check(admin.post("/stats"), 405, "method_not_allowed")
    check(admin.get("/nothing"), 404, "unknown_url")
