"""The admin routes over a real Redis: what they do, whom they serve, and what they refuse."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from outrider.cache_service.namespace import hash_key
from outrider.cluster.admission.tenancy import Tenancy
from outrider.cluster.http.admin import api as admin_api
from outrider.cluster.http.admin.api import AdminService, add_admin_routes
from outrider.cluster.http.error_handlers import install
from outrider.configs.slices import TenancyOptions
from tests.cluster.circle import TOKENIZER, LocalEngine, bearer, check_error, client_of
from tests.cluster.memory import LocalCacheAdmin

ROUTES = [
    ("GET", "/stats"),
    ("GET", "/export?tenant=acme"),
    ("POST", "/import?tenant=acme"),
    ("POST", "/preload"),
    ("DELETE", "/tenants/acme"),
    ("DELETE", "/tenants/acme/requests/chatcmpl-1"),
    ("POST", "/tenants/acme/documents/delete"),
    ("GET", "/verify"),
]


@pytest.fixture
def admin(memory_server: Any) -> Iterator[httpx.Client]:
    """A client with the operator's key."""
    base, key = f"{memory_server.url}/admin/cache", bearer(memory_server.admin_key)
    with httpx.Client(base_url=base, headers=key, timeout=30) as client:
        yield client


def tokens(admin: httpx.Client) -> dict[str, int]:
    return {entry["tenant"]: entry["tokens"] for entry in admin.get("/stats").json()["tenants"]}


def test_only_the_operator_is_served(admin: httpx.Client, memory_server: Any) -> None:
    memory_server.add("acme", "chatcmpl-1", [5, 6, 7])
    for method, path in ROUTES:
        for wrong in (memory_server.tenant_key, hash_key(memory_server.admin_key), "nobody"):
            response = admin.request(method, path, headers=bearer(wrong))
            check_error(response, 401, "not an admin key", code="invalid_api_key")
        malformed = admin.request(method, path, headers={"Authorization": memory_server.admin_key})
        check_error(malformed, 401, "Bearer KEY", code="invalid_api_key")
        assert malformed.headers["www-authenticate"] == "Bearer"
        del admin.headers["Authorization"]
        check_error(admin.request(method, path), 401, "admin key", code="invalid_api_key")
        admin.headers.update(bearer(memory_server.admin_key))
    assert memory_server.texts("acme") == {(5, 6, 7)}


@pytest.mark.parametrize(
    ("admin_keys", "status", "code", "word"),
    [((), 403, "admin_disabled", "tenancy.admin_keys"), ((hash_key("outrider-a"),), 404, "cache_disabled", "cache.enabled")],
)
def test_closed_and_disabled(admin_keys: tuple[str, ...], status: int, code: str, word: str) -> None:
    with asking(admin_keys, None) as client:
        for method, path in ROUTES:
            check_error(client.request(method, f"/admin/cache{path}"), status, word, code=code)


@contextlib.contextmanager
def asking(admin_keys: tuple[str, ...], cache: Any) -> Iterator[httpx.Client]:
    """A client of the admin routes alone, with the key ``outrider-a``."""
    app = FastAPI()
    install(app)
    add_admin_routes(app, AdminService(Tenancy(TenancyOptions(admin_keys=admin_keys)), TOKENIZER, cache, LocalEngine().describe))
    with client_of(app, bearer("outrider-a")) as client:
        yield client


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
    special = TOKENIZER.eos_token
    answer = admin.post("/preload", json={"documents": ["ab", "é"]})
    assert answer.json() == {"documents": 2, "tokens": 4, "texts": 2}
    encode = TOKENIZER.encode
    assert memory_server.texts("*") == {tuple(encode("ab", add_special_tokens=False)), tuple(encode("é"))}
    assert memory_server.texts("acme") == set()
    admin.post("/preload", json={"documents": [f"ab{special}"]})
    assert (*encode("ab"), TOKENIZER.eos_token_id) in memory_server.texts("*")


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


def test_what_is_no_snapshot_is_not_imported(admin: httpx.Client, memory_server: Any) -> None:
    memory_server.add("acme", "chatcmpl-1", [5, 6, 7])
    data = admin.get("/export?tenant=acme").content
    for broken in (b"", data[:20], data[:-1], data[1:]):
        check_error(admin.post("/import?tenant=umbrella", content=broken), 400, code="invalid_snapshot")
        assert memory_server.texts("umbrella") == set()


def test_tenants_and_routes_that_are_not_there(admin: httpx.Client) -> None:
    for method, path in (
        ("GET", "/export?tenant=nobody"), ("POST", "/import?tenant=nobody"), ("DELETE", "/tenants/nobody"),
        ("DELETE", "/tenants/nobody/requests/chatcmpl-1"), ("DELETE", "/tenants/%2A%0A"),
    ):  # fmt: skip
        check_error(admin.request(method, path), 404, param="tenant", code="tenant_not_found")
    for method, path in (("GET", "/export"), ("POST", "/import"), ("GET", "/export?tenant=")):
        check_error(admin.request(method, path), 400, param="tenant", code="missing_required_parameter")
    check_error(admin.post("/stats"), 405, code="method_not_allowed")
    check_error(admin.get("/nothing"), 404, code="unknown_url")


def test_bodies_that_hold_no_documents(admin: httpx.Client, memory_server: Any) -> None:
    bodies: list[tuple[bytes, str | None]] = [
        (b"", None), (b"{", None), (b"[]", None), (b"{}", "documents"), (b'{"documents": []}', "documents"),
        (b'{"documents": "text"}', "documents"), (b'{"documents": ["text", 3]}', "documents[1]"),
        (b'{"documents": ["text", ""]}', "documents[1]"), (b'{"documents": ["\\ud800"]}', None),
        (b'{"documents": ["\xff"]}', None),
        (b'{"documents": ["x"], "tenant": "acme"}', "tenant"),
    ]  # fmt: skip
    for body, param in bodies:
        check_error(admin.post("/preload", content=body), 400, param=param, code="invalid_value")
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
    check_error(admin.post(path, content=content), 413, "1000 bytes", code="body_too_long")


def test_redis_away() -> None:
    with asking((hash_key("outrider-a"),), LocalCacheAdmin("redis://:secret@127.0.0.1:1/0")) as client:
        found = client.get("/admin/cache/stats").json()  # what the replicas count is told all the same
        assert found["tenants"] == found["replicas"] == [] and "Redis" in found["error"] and "secret" not in found["error"]
        for method, path in ROUTES[1:]:
            content = b'{"documents": ["text"]}' if path == "/preload" or "documents" in path else b""
            response = client.request(method, f"/admin/cache{path}", content=content)
            check_error(response, 503, "Redis", "try again", code="cache_unavailable")
            assert "secret" not in response.text and "127.0.0.1" not in response.text
