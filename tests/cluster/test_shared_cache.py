"""The service with two replicas that share a real Redis, as its clients and its operator see it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import Result
from openai import AsyncOpenAI, OpenAI
from ray import serve
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from cache_service.keeper.snapshot import decode_snapshot
from cache_service.namespace import hash_key
from cluster.app import application
from cluster.cli.cache import ADMIN_KEY
from cluster.cli.main import app
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
from experiments.redis_process import RedisProcess
from tests import waiting
from tests.models import SENTENCES, llama_config, save_model

eventually = functools.partial(waiting.eventually, timeout_s=60.0)
# Tests share none of them.
TENANTS = ("modes", "seen", "unseen", "removed", "gone", "quiet", "plain", "source", "target", "streams")
OPERATOR = "key of the operator"
TOKENS = 40  # of an answer
PROMPTS = [sentence[at:] for sentence in SENTENCES for at in range(0, 20, 2)]


@dataclass(frozen=True)
class Shared:
    """The service, with its Redis and its tokenizer."""

    url: str
    redis: RedisProcess
    tokenizer: PreTrainedTokenizerFast

    def client(self, tenant: str) -> OpenAI:
        """OpenAI's client with the key of a tenant."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=f"key of {tenant}", max_retries=0, timeout=120)

    def ask(self, tenant: str | None, prompt: str, cache: str | None = None) -> Any:
        """A greedy completion of ``TOKENS`` tokens, for a tenant or without a key."""
        headers = {"Authorization": openai.Omit()} if tenant is None else {}
        with self.client(tenant or "") as client:
            return client.completions.create(
                model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body=body(cache), extra_headers=headers
            )

    def admin(self, path: str, key: str = OPERATOR) -> httpx.Response:
        """What an admin route answers."""
        return httpx.get(f"{self.url}/admin/cache/{path}", headers={"Authorization": f"Bearer {key}"}, timeout=60)

    def mirrors(self) -> list[dict[str, Any]]:
        """How each replica gets on with Redis."""
        found: list[dict[str, Any]] = self.admin("stats").raise_for_status().json()["replicas"]
        return found

    def health(self) -> tuple[int, str]:
        """Replicas that answer, and the state of the shared memory."""
        found = httpx.get(f"{self.url}/health", timeout=60).raise_for_status().json()
        return found["replicas"], found["shared_cache"]

    def stats(self) -> dict[str, dict[str, Any]]:
        """What is kept, by tenant."""
        return {entry["tenant"]: entry for entry in self.admin("stats").raise_for_status().json()["tenants"]}

    def texts(self, tenant: str) -> list[str]:
        """What is kept of a tenant, to be read."""
        snapshot = decode_snapshot(self.admin(f"export?tenant={tenant}").raise_for_status().content)
        return sorted(self.tokenizer.decode(text.tokens.tolist()) for text in snapshot.texts)


def body(cache: str | None) -> dict[str, Any]:
    """What OpenAI's client has no argument for."""
    return {"ignore_eos": True} | ({} if cache is None else {"cache": cache})


@pytest.fixture(scope="module")
def shared(api_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A second application beside that of the other tests."""
    folder = save_model(tmp_path_factory.mktemp("models") / "tiny", llama_config())
    with RedisProcess() as redis:
        config = Config(
            model=ModelOptions(path=str(folder), dtype="float32", threads=1),
            engine=EngineOptions(max_running=4),
            speculation=SpeculationOptions(strategy="auto", max_draft_tokens=16, options={"all_rows": True}),
            server=ServerOptions(replicas=2, cpus_per_replica=0.25, stop_timeout_s=1.0),
            cache=CacheOptions(timeout_s=1.0, retry_s=0.2, snapshot_s=0.2),
            tenancy=TenancyOptions(
                tenants={name: TenantOptions(keys=(hash_key(f"key of {name}"),)) for name in TENANTS},
                admin_keys=(hash_key(OPERATOR),),
            ),
            redis_url=redis.url,
        )
        serve.run(application(config), name="shared", route_prefix="/shared")
        made = Shared(f"{api_server.url}/shared", redis, AutoTokenizer.from_pretrained(folder))
        eventually(lambda: made.admin("stats").json()["error"] is None)
        yield made
        serve.delete("shared")


@pytest.fixture
def outrider(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``outrider cache VERB ...`` as the operator; it has to succeed."""
    monkeypatch.setenv(ADMIN_KEY, OPERATOR)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Result:
        done = CliRunner().invoke(app, ["cache", *arguments, "--url", shared.url])
        assert done.exit_code == 0, done.output
        return done

    return run


def test_outputs_are_the_same_whatever_is_shared(shared: Shared) -> None:
    eventually(lambda: shared.health() == (2, "connected"))
    for prompt in PROMPTS[::8]:
        plain = shared.ask(None, prompt, "off").choices[0].text
        for _ in range(2):  # the second time there is something to draft from
            for tenant, cache in (
                ("modes", None),
                ("modes", "tenant"),
                ("modes", "private"),
                ("modes", "off"),
                (None, "private"),
            ):
                assert shared.ask(tenant, prompt, cache).choices[0].text == plain, (tenant, cache)


def test_an_answer_is_kept_for_its_tenant_and_for_no_other(shared: Shared) -> None:
    before = shared.stats()
    answers = [shared.ask("seen", prompt) for prompt in PROMPTS[:4]]
    eventually(lambda: shared.stats()["seen"]["tokens"] == 4 * TOKENS)
    after = shared.stats()
    assert after["seen"]["texts"] == 4
    assert {name for name in after if after[name]["tokens"] != before[name]["tokens"]} == {"seen"}
    assert shared.texts("seen") == sorted(answer.choices[0].text for answer in answers)
    assert shared.texts("unseen") == []


def test_a_request_is_deleted_by_the_id_of_its_answer(shared: Shared, outrider: Callable[..., Result]) -> None:
    goes, stays = (shared.ask("removed", prompt) for prompt in PROMPTS[:2])
    with shared.client("removed") as client:
        both = client.completions.create(model="tiny", prompt=PROMPTS[2:4], max_tokens=TOKENS, extra_body=body(None))
    eventually(lambda: shared.stats()["removed"]["tokens"] == 4 * TOKENS)
    for answer in (goes, both):  # the latter with both of its choices
        outrider("delete", "--tenant", "removed", "--request", answer.id, "--yes")
    assert shared.texts("removed") == [stays.choices[0].text]
    assert shared.ask("removed", PROMPTS[0]).choices[0].text == goes.choices[0].text
    eventually(lambda: shared.stats()["removed"]["texts"] == 2)


def test_a_tenant_is_deleted(shared: Shared, outrider: Callable[..., Result]) -> None:
    first = shared.ask("gone", PROMPTS[0])
    eventually(lambda: shared.stats()["gone"]["tokens"] == TOKENS)
    outrider("delete", "--tenant", "gone", "--yes")
    stats = shared.stats()["gone"]
    assert (stats["texts"], stats["tokens"], stats["epoch"]) == (0, 0, 1)
    time.sleep(2)  # the promise; what is written after it counts again
    assert shared.ask("gone", PROMPTS[0]).choices[0].text == first.choices[0].text
    eventually(lambda: shared.texts("gone") == [first.choices[0].text])
    eventually(lambda: shared.stats()["gone"]["tokens"] == TOKENS)


def test_private_requests_leave_nothing(shared: Shared) -> None:
    before = shared.stats()
    for tenant, cache in (("quiet", "private"), ("quiet", "off"), (None, None), (None, "private"), (None, "off")):
        shared.ask(tenant, PROMPTS[0], cache)
    last = shared.ask("quiet", PROMPTS[1])
    eventually(lambda: shared.stats()["quiet"]["tokens"] >= TOKENS)
    time.sleep(0.5)  # for what must not come
    after = shared.stats()
    assert shared.texts("quiet") == [last.choices[0].text]
    assert {name for name in after if after[name]["tokens"] != before[name]["tokens"]} == {"quiet"}


def test_plain_requests_leave_nothing(shared: Shared) -> None:
    before = shared.stats()
    with shared.client("plain") as client:
        for speculation in ({"strategy": "autoregressive"}, {"max_draft_tokens": 0}):
            client.completions.create(
                model="tiny", prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0,
                extra_body={"ignore_eos": True, "speculation": speculation},
            )  # fmt: skip
    last = shared.ask("plain", PROMPTS[1])
    eventually(lambda: shared.stats()["plain"]["tokens"] >= TOKENS)
    time.sleep(0.5)  # for what must not come
    assert shared.texts("plain") == [last.choices[0].text]
    after = shared.stats()
    assert {name for name in after if after[name]["tokens"] != before[name]["tokens"]} == {"plain"}


def test_export_import_preload_verify(shared: Shared, outrider: Callable[..., Result], tmp_path: Path) -> None:
    answers = sorted(shared.ask("source", prompt).choices[0].text for prompt in PROMPTS[:3])
    eventually(lambda: shared.stats()["source"]["tokens"] == 3 * TOKENS)
    file = str(tmp_path / "source.snapshot")
    outrider("export", "source", file)
    assert "3 texts added to target" in outrider("import", "target", file).stdout
    assert shared.texts("target") == answers
    document = tmp_path / "document.txt"
    document.write_text(SENTENCES[0] * 10, encoding="utf-8")
    assert "1 new texts" in outrider("preload", str(document)).stdout
    assert shared.texts("*") == [SENTENCES[0] * 10]
    assert "sound" in outrider("verify").stdout
    assert "target" in outrider("stats").stdout


def test_wrong_keys(shared: Shared) -> None:
    for tenant in ("nobody", "*"):
        with pytest.raises(openai.AuthenticationError) as refusal:
            shared.ask(tenant, PROMPTS[0])
        assert refusal.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError, match="cache") as refused:
        shared.ask(None, PROMPTS[0], "tenant")
    assert refused.value.param == "cache"
    assert shared.admin("stats", "key of seen").status_code == 401
    assert shared.admin("stats", "wrong").status_code == 401
    operator = {"Authorization": f"Bearer {OPERATOR}"}  # is no tenant
    assert httpx.get(f"{shared.url}/v1/models", headers=operator, timeout=60).status_code == 401


def test_redis_is_killed_in_the_middle_of_fifty_streams(shared: Shared) -> None:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(50)]
    plain = {prompt: shared.ask(None, prompt, "off").choices[0].text for prompt in PROMPTS}
    answers = asyncio.run(streamed(shared, prompts))
    assert answers == [plain[prompt] for prompt in prompts]
    assert "Redis" in shared.admin("stats").json()["error"]
    eventually(lambda: all(replica["failures"] and not replica["connected"] for replica in shared.mirrors()))
    assert shared.health() == (2, "degraded")
    assert shared.ask("streams", PROMPTS[0]).choices[0].text == plain[PROMPTS[0]]

    shared.redis.start()
    eventually(lambda: shared.admin("stats").json()["error"] is None)
    last = shared.ask("streams", PROMPTS[1])
    eventually(lambda: last.choices[0].text in shared.texts("streams"))  # also what waited meanwhile has come
    eventually(lambda: plain[PROMPTS[0]] in shared.texts("streams"))
    eventually(lambda: shared.health() == (2, "connected"))


async def streamed(shared: Shared, prompts: list[str]) -> list[str]:
    """Answers to all prompts at once. Redis is killed when half of the text is there."""
    chunks = 0

    async def one(client: AsyncOpenAI, prompt: str) -> str:
        nonlocal chunks
        text = ""
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True, extra_body=body(None)
        )
        async for chunk in stream:
            text += chunk.choices[0].text
            chunks += 1
            if chunks == 3 * len(prompts):
                shared.redis.kill()
        return text

    async with AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="key of streams", max_retries=0, timeout=120) as client:
        answers = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
    assert chunks > 3 * len(prompts)
    return list(answers)
