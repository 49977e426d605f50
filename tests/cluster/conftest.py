"""What the tests share: a service on the circle model in this process, and the memory of a real Redis."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import OpenAI
from redis import Redis

from outrider.cache_service.namespace import hash_key
from outrider.cache_service.store.embedded import EmbeddedRedis
from outrider.cache_service.store.redis_store import RedisStore
from outrider.cluster.admission.tenancy import Tenancy
from outrider.cluster.http import error_handlers
from outrider.cluster.http.admin.api import AdminService, add_admin_routes
from outrider.cluster.http.api import Service
from outrider.cluster.serving import shared_answer
from outrider.configs.slices import CacheOptions, EngineOptions, SpeculationOptions, TenancyOptions, TenantOptions
from tests.cluster.circle import MAX_RUNNING, MAX_WAITING, TOKENIZER, LocalEngine, Server, local_engine, served
from tests.cluster.memory import LocalCacheAdmin, MemoryServer
from tests.helpers.models import llama_config, save_model

RECORDS: list[dict[str, Any]] = [
    {"id": "first", "prompt": "The quick brown fox jumps over", "references": ["the lazy dog", ""]},
    {"id": 2, "prompt": "line\u2028separator and\nnewline"},
    {"prompt": "no id here"},
    {"id": "long", "prompt": "word " * 400},
    {"id": "last", "prompt": "A request travels"},
]


@pytest.fixture(autouse=True)
def _states_of_this_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests look at states right after what changes them: in this process no answer is given again."""
    monkeypatch.setattr(shared_answer, "FRESH_S", 0.0)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random tiny model, for commands that generate."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny", llama_config(tie_word_embeddings=True))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of prompts, one of which is too long for the model."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS) + "\n\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def circle_engine(circle_model: Path) -> Iterator[LocalEngine]:
    """An engine of the model without Ray, for applications that are served in this process."""
    speculation = SpeculationOptions("llma", max_draft_tokens=8, strategies=("prompt_lookup",))
    with local_engine(circle_model, speculation, EngineOptions(max_running=MAX_RUNNING, max_waiting=MAX_WAITING)) as engine:
        yield engine


@pytest.fixture(scope="session")
def api_server(circle_engine: LocalEngine) -> Iterator[Server]:
    """The service."""
    with served(Service(circle_engine, TOKENIZER, open_metrics=True)) as url:
        yield Server(url)


@pytest.fixture
def client(api_server: Server) -> Iterator[OpenAI]:
    """OpenAI's client, which gives up at the first error."""
    with OpenAI(base_url=f"{api_server.url}/v1", api_key="none", max_retries=0, timeout=60) as openai:
        yield openai


@pytest.fixture
def http(api_server: Server) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=api_server.url, timeout=60) as plain:
        yield plain


@pytest.fixture(scope="session")
def empty_memory_server() -> Iterator[MemoryServer]:
    """The admin routes for the tenants acme and umbrella."""
    with EmbeddedRedis.start() as redis, contextlib.ExitStack() as stack:
        port, store = LocalCacheAdmin(redis.url), RedisStore(redis.url, CacheOptions().prefix, 5.0)
        stack.callback(port.admin.close)
        stack.callback(store.close)
        tenants = {"acme": TenantOptions(keys=(hash_key(MemoryServer.tenant_key),)), "umbrella": TenantOptions()}
        tenancy = Tenancy(TenancyOptions(tenants=tenants, admin_keys=(hash_key(MemoryServer.admin_key),)))
        app = FastAPI()
        error_handlers.install(app)
        add_admin_routes(app, AdminService(tenancy, TOKENIZER, port, LocalEngine().describe))
        yield MemoryServer(stack.enter_context(served(app)), redis, store, port.admin)


@pytest.fixture
def memory_server(empty_memory_server: MemoryServer) -> MemoryServer:
    """The served memory, which remembers nothing yet."""
    with Redis.from_url(empty_memory_server.redis.url) as client:
        client.flushall()
    return empty_memory_server
