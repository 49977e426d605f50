"""A real Serve application on a model whose every token is known: the service is what is tested, to the letter."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import ray
import torch
import uvicorn
from fastapi import FastAPI
from openai import OpenAI
from ray import serve
from redis import Redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from actors.replica import Description, Replica
from cache_service.keeper.admin import CacheAdmin, Problem, TenantStats
from cache_service.keeper.snapshot import decode_snapshot
from cache_service.namespace import Identity, hash_key, namespace
from cache_service.records import CacheDelta, TextBatch, encode_batch
from cache_service.store.embedded import EmbeddedRedis
from cache_service.store.redis_store import RedisStore
from cluster.admission.tenancy import Tenancy
from cluster.app import build_app
from cluster.http import errors
from cluster.http.admin.api import AdminService, add_admin_routes
from cluster.serving.generation import Job
from configs.schema import Config
from configs.slices import (
    CacheOptions,
    EngineOptions,
    ModelOptions,
    ServerOptions,
    SpeculationOptions,
    TenancyOptions,
    TenantOptions,
)
from decoding.request import Request, StepOutput, text_key

# Greedy decoding walks around the circle, one byte a token; no byte occurs twice, so that the last token alone decides the next.
CIRCLE = "<abcdefgh-é_日:🦙;ijklm>"
ENDING = "stuvw."  # leads to the end token
MAX_MODEL_LEN = 16384
MAX_RUNNING = 3
MAX_WAITING = 4

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, an end token, and one that makes the number of tokens even."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"</s>": 0, "<pad>": 1} | {character: index for index, character in enumerate(alphabet, start=2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Layers that add nothing, and a head that reads the next token off the last one: sure when greedy, likely when sampled."""
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    circle, ending = tokenizer.encode(CIRCLE), [*tokenizer.encode(ENDING), tokenizer.eos_token_id]
    successor = dict.fromkeys(range(size), circle[0])
    successor |= dict(zip(circle, [*circle[1:], circle[0]], strict=True)) | dict(itertools.pairwise(ending))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for token, following in successor.items():
            model.lm_head.weight[following, token] = 0.5
    return model


@dataclass(frozen=True)
class Server:
    """Where the application listens."""

    url: str

    def health(self) -> dict[str, object]:
        """What /health says; fails when it is not well."""
        return dict(httpx.get(f"{self.url}/health", timeout=30).raise_for_status().json())


@pytest.fixture(scope="session")
def circle_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "circle"
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def api_server(circle_model: Path) -> Iterator[Server]:
    """The application on a Ray of its own, ended with the session."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = Config(
        model=ModelOptions(path=str(circle_model), dtype="float32", threads=1),
        engine=EngineOptions(max_running=MAX_RUNNING, max_waiting=MAX_WAITING),
        speculation=SpeculationOptions(strategy="llma", max_draft_tokens=8, strategies=("prompt_lookup",)),
        server=ServerOptions(port=port, cpus_per_replica=0.5),
    )
    with pytest.MonkeyPatch.context() as environment:  # of the actors
        environment.setenv("OUTRIDER_CACHE_SECRET", secrets.token_hex(32))
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(config), name="outrider", route_prefix="/")
        yield Server(f"http://127.0.0.1:{port}")
        serve.shutdown()
    finally:
        ray.shutdown()


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The address of an application that runs in this process, on a free loopback port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def serve_api() -> Callable[[FastAPI], AbstractContextManager[str]]:
    """Serves an application without Ray, for tests that bring an engine of their own."""
    return served


class LocalEngine:
    """The ``EnginePort`` over a replica in this process."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def generate(self, job: Job) -> AsyncGenerator[StepOutput, None]:
        request = Request(
            job.request_id, job.prompt_ids, job.params, job.references,
            tenant=job.tenant, public=job.public, strategy=job.strategy, max_draft_tokens=job.max_draft_tokens,
            report=job.report,
        )  # fmt: skip
        async with contextlib.aclosing(self._replica.generate(request)) as outputs:
            async for output in outputs:
                yield output

    async def describe(self) -> list[Description]:
        return [self._replica.describe()]


@pytest.fixture(scope="session")
def circle_engine(circle_model: Path) -> Iterator[LocalEngine]:
    """An engine of the model without Ray, for an application that is served in this process."""
    speculation = SpeculationOptions(strategy="llma", max_draft_tokens=8)
    model = ModelOptions(path=str(circle_model), dtype="float32", threads=1)
    replica = Replica(model, EngineOptions(max_running=MAX_RUNNING), speculation, meter=None)
    yield LocalEngine(replica)
    replica.stop()


class LocalCacheAdmin:
    """The ``CacheAdminPort`` over a ``CacheAdmin`` in this process."""

    def __init__(self, admin: CacheAdmin) -> None:
        self._admin = admin

    async def stats(self, tenant: str | None = None, vouched: bool = False) -> list[TenantStats]:
        return await asyncio.to_thread(self._admin.stats, tenant, vouched)

    async def export(self, tenant: str) -> bytes:
        return await asyncio.to_thread(self._admin.export, tenant)

    async def import_(self, tenant: str, data: bytes) -> int:
        return await asyncio.to_thread(self._admin.import_, tenant, data)

    async def preload(self, documents: Sequence[Sequence[int]]) -> int:
        return await asyncio.to_thread(self._admin.preload, documents)

    async def delete_tenant(self, tenant: str, vouched: bool = False) -> int:
        return await asyncio.to_thread(self._admin.delete_tenant, tenant, vouched)

    async def delete_request(self, tenant: str, request_id: str) -> None:
        await asyncio.to_thread(self._admin.delete_request, tenant, request_id)

    async def verify(self) -> list[Problem]:
        return await asyncio.to_thread(self._admin.verify)


@dataclass(frozen=True)
class MemoryServer:
    """Admin routes over a Redis of their own; what a mirror would write there is written by ``add``."""

    url: str
    redis: EmbeddedRedis
    store: RedisStore
    admin: CacheAdmin
    tokenizer: PreTrainedTokenizerFast
    admin_key: str = "outrider-admin"
    tenant_key: str = "outrider-acme"

    def add(self, tenant: str, answer_id: str, tokens: list[int], choice: int = 0) -> None:
        """A whole text of a request."""
        delta = CacheDelta(text_key(f"{answer_id}/{choice}"), 0, np.asarray(tokens, np.int32), True)
        self.append_raw(tenant, encode_batch(TextBatch(secrets.randbits(64), 0, 0, (delta,)), MEMORY_IDENTITY.vocab_size))

    def append_raw(self, tenant: str, data: bytes) -> None:
        """An entry of the tenant's stream, sound or not."""
        identity = MEMORY_IDENTITY
        self.store.append([(namespace(MEMORY_SECRET, tenant, identity.model_revision, identity.tokenizer_revision), data)])

    def texts(self, tenant: str) -> set[tuple[int, ...]]:
        """The tokens of all texts of a tenant."""
        return {tuple(text.tokens.tolist()) for text in decode_snapshot(self.admin.export(tenant)).texts}


MEMORY_SECRET = b"of the tests"
MEMORY_IDENTITY = Identity("aa", "bb", vocab_size=258)


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the model: one token a byte."""
    return build_tokenizer()


def cache_admin(redis_url: str) -> CacheAdmin:
    """The verbs for the tenants acme and umbrella."""
    return CacheAdmin(CacheOptions(timeout_s=5.0), redis_url, MEMORY_SECRET, MEMORY_IDENTITY, ["acme", "umbrella"])


@pytest.fixture(scope="session")
def local_cache_admin() -> Callable[[str], LocalCacheAdmin]:
    """A port over the Redis at an address."""
    return lambda redis_url: LocalCacheAdmin(cache_admin(redis_url))


@pytest.fixture(scope="session")
def empty_memory_server(byte_tokenizer: PreTrainedTokenizerFast) -> Iterator[MemoryServer]:
    """The admin routes for the tenants acme and umbrella."""
    with EmbeddedRedis.start() as redis, contextlib.ExitStack() as stack:
        admin, store = cache_admin(redis.url), RedisStore(redis.url, CacheOptions().prefix, 5.0)
        stack.callback(admin.close)
        stack.callback(store.close)
        tenants = {"acme": TenantOptions(keys=(hash_key(MemoryServer.tenant_key),)), "umbrella": TenantOptions()}
        tenancy = Tenancy(TenancyOptions(tenants=tenants, admin_keys=(hash_key(MemoryServer.admin_key),)))
        app = FastAPI()
        errors.install(app)
        add_admin_routes(app, AdminService(tenancy, byte_tokenizer, LocalCacheAdmin(admin), no_replicas))
        url = stack.enter_context(served(app))
        yield MemoryServer(url, redis, store, admin, byte_tokenizer)


async def no_replicas() -> list[Description]:
    """A server without engines."""
    return []


@pytest.fixture
def memory_server(empty_memory_server: MemoryServer) -> MemoryServer:
    """The served memory, which remembers nothing yet."""
    with Redis.from_url(empty_memory_server.redis.url) as client:
        client.flushall()
    return empty_memory_server


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
def byte_ids() -> Callable[[str], list[int]]:
    """The token ids of a text."""
    return build_tokenizer().encode
