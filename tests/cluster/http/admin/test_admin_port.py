"""The operator's port: where it is, who may use it, and that the public's port is without its routes."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import httpx
import pytest

from outrider.cache_service.namespace import hash_key
from outrider.cluster.cli.launch.preflight import LaunchError, check_port
from outrider.cluster.http.admin.port import AdminPort
from outrider.cluster.http.api import Service, create_api
from outrider.cluster.serving.generation import EnginePort
from outrider.configs.schema import ConfigError, load_config
from outrider.configs.server_checks import admin_address
from outrider.configs.slices import ServerOptions, TenancyOptions
from tests.cluster.circle import TOKENIZER, bearer, served
from tests.helpers.network import free_port

ADMIN = "outrider-admin"
KEY = bearer(ADMIN)


@pytest.mark.parametrize(
    ("server", "address"),
    [
        (ServerOptions(), None),
        (ServerOptions(host="::1"), None),
        (ServerOptions(host="0.0.0.0"), ("127.0.0.1", 8001)),
        (ServerOptions(host="10.0.0.7", port=80, admin_host="10.0.0.7"), ("10.0.0.7", 81)),
        (ServerOptions(admin_port=9000), ("127.0.0.1", 9000)),
        (ServerOptions(host="0.0.0.0", admin_host="0.0.0.0", admin_port=9000), ("0.0.0.0", 9000)),
    ],
)
def test_it_is_where_only_the_operator_gets(server: ServerOptions, address: tuple[str, int] | None) -> None:
    assert admin_address(server) == address


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["server.admin_port=8000"], r"server\.admin_port is 8000, like server\.port"),
        (
            ["server.host=0.0.0.0", "server.require_key=false", "server.port=65535"],
            r"server\.port is 65535, .* set server\.admin_port",
        ),
        (["server.admin_port=0"], r"server\.admin_port is 0; allowed: 1 to 65535"),
    ],
)
def test_ports_that_cannot_be_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=overrides)


def test_a_port_that_others_hold_is_an_error_and_one_of_its_own_is_shared() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server\.admin_port: cannot listen on 127\.0\.0\.1:{port} \(Address already"):
            AdminPort("127.0.0.1", port)
        with pytest.raises(LaunchError, match=r"choose another with server\.admin_port="):
            check_port("127.0.0.1", port, "admin_")
    with pytest.raises(LaunchError, match=r"server\.admin_host '192\.0\.2\.1' is not an address of this machine"):
        check_port("192.0.2.1", port, "admin_")


def test_metrics_need_no_key_there_and_admin_routes_do(circle_engine: EnginePort) -> None:
    tenancy = TenancyOptions(admin_keys=(hash_key(ADMIN),))
    service = Service(circle_engine, TOKENIZER, tenancy, open_metrics=True)
    port = free_port()

    async def ask() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(AdminPort("127.0.0.1", port).serving(service))
            next_one = AdminPort("127.0.0.1", port)  # of the ingress that a redeploy starts: it does not take requests yet
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60))
            metrics = await client.get("/metrics")
            assert metrics.status_code == 200 and "vllm:num_requests_running" in metrics.text
            bare = await client.get("/admin/audit")
            assert bare.status_code == 401 and bare.json()["error"]["code"] == "invalid_api_key"
            assert (await client.get("/admin/audit", headers=KEY)).status_code != 401
            for path in ("/v1/models", "/health", "/openapi.json"):
                assert (await client.get(path)).status_code == 404
            large = await client.get("/metrics", headers={f"x{number}": "1" for number in range(300)})
            assert large.status_code == 431, "as on the public's port"
            await stack.enter_async_context(next_one.serving(service))
        check_port("127.0.0.1", port)  # released

    asyncio.run(ask())
    with served(create_api(service, has_operator_routes=False)) as url:
        for path in ("/metrics", "/admin/audit", "/admin/cache/stats"):
            answer = httpx.get(f"{url}{path}", headers=KEY, timeout=60)
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200


def test_who_has_just_connected_is_answered_though_it_closes(circle_engine: EnginePort) -> None:
    service, port = Service(circle_engine, TOKENIZER, open_metrics=True), free_port()

    async def ask() -> bytes:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(AdminPort("127.0.0.1", port).serving(service))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.05)  # until it is accepted
            closing = asyncio.create_task(stack.pop_all().aclose())
            await asyncio.sleep(0.05)
            assert not closing.done()
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            await closing
            return answer

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 200")
