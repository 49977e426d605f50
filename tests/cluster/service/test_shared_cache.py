"""The service with two replicas that share a real Redis, as its clients and its operator see it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from outrider.cluster.cli.client import ADMIN_KEY
from tests.cluster import commands
from tests.cluster.circle import bearer
from tests.cluster.service.applications import NO_KEY, OPERATOR, Twins
from tests.helpers import waiting
from tests.helpers.models import SENTENCES

eventually = functools.partial(waiting.eventually, timeout_s=60.0)
TOKENS = 40  # of an answer
PROMPTS = [sentence[at:] for sentence in SENTENCES for at in range(0, 20, 2)]


def ask(twins: Twins, tenant: str | None, prompt: str, cache: str | None = None, **speculation: Any) -> Any:
    """A greedy completion of ``TOKENS`` tokens, for a tenant or without a key."""
    with twins.client(tenant or "nobody") as client:
        return client.completions.create(
            model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0, extra_headers={} if tenant else NO_KEY,
            extra_body=body(cache) | {"speculation": speculation},
        )  # fmt: skip


def body(cache: str | None) -> dict[str, Any]:
    """What OpenAI's client has no argument for."""
    return {"ignore_eos": True} | ({} if cache is None else {"cache": cache})


def grown(twins: Twins, before: dict[str, dict[str, Any]]) -> set[str]:
    """The tenants of whom other many tokens are kept now."""
    return {name for name, now in twins.stats().items() if now["tokens"] != before[name]["tokens"]}


@pytest.fixture
def outrider(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What ``outrider cache VERB ...`` tells the operator; it has to succeed."""
    monkeypatch.setenv(ADMIN_KEY, OPERATOR)

    def run(*arguments: object) -> str:
        done = commands.outrider("cache", *arguments, "--url", twins.admin_url)
        assert done.returncode == 0, done
        return done.stdout

    return run


def test_outputs_are_the_same_whatever_is_shared(twins: Twins) -> None:
    for prompt in PROMPTS[::8]:
        plain = ask(twins, None, prompt, "off").choices[0].text
        for _ in range(2):  # the second time there is something to draft from
            for cache in (None, "tenant", "private", "off"):
                assert ask(twins, "modes", prompt, cache).choices[0].text == plain, cache
            assert ask(twins, None, prompt, "private").choices[0].text == plain
    kept = 4 * len(PROMPTS[::8])  # without the private ones; counts of texts come a moment later
    eventually(lambda: twins.stats()["modes"]["texts"] == kept)


def test_an_answer_is_kept_for_its_tenant_and_for_no_other(twins: Twins) -> None:
    before = twins.stats()
    answers = [ask(twins, "seen", prompt) for prompt in PROMPTS[:4]]
    eventually(lambda: twins.stats()["seen"]["tokens"] == 4 * TOKENS)
    assert twins.stats()["seen"]["texts"] == 4 and grown(twins, before) == {"seen"}
    assert twins.texts("seen") == sorted(answer.choices[0].text for answer in answers)
    assert twins.texts("unseen") == []


def test_a_request_is_deleted_by_the_id_of_its_answer(twins: Twins, outrider: Callable[..., str]) -> None:
    goes, stays = (ask(twins, "removed", prompt) for prompt in PROMPTS[:2])
    with twins.client("removed") as client:
        both = client.completions.create(model="tiny", prompt=PROMPTS[2:4], max_tokens=TOKENS, extra_body=body(None))
    eventually(lambda: twins.stats()["removed"]["tokens"] == 4 * TOKENS)
    for answer in (goes, both):  # the latter with both of its choices
        outrider("delete", "--tenant", "removed", "--request", answer.id, "--yes")
    assert twins.texts("removed") == [stays.choices[0].text]
    assert ask(twins, "removed", PROMPTS[0]).choices[0].text == goes.choices[0].text
    eventually(lambda: twins.stats()["removed"]["texts"] == 2)


def test_a_tenant_is_deleted(twins: Twins, outrider: Callable[..., str]) -> None:
    first = ask(twins, "gone", PROMPTS[0])
    eventually(lambda: twins.stats()["gone"]["tokens"] == TOKENS)
    outrider("delete", "--tenant", "gone", "--yes")
    stats = twins.stats()["gone"]
    assert (stats["texts"], stats["tokens"], stats["epoch"]) == (0, 0, 1)
    time.sleep(2)  # the promise; what is written after it counts again
    assert ask(twins, "gone", PROMPTS[0]).choices[0].text == first.choices[0].text
    eventually(lambda: twins.texts("gone") == [first.choices[0].text])
    eventually(lambda: twins.stats()["gone"]["tokens"] == TOKENS)


def test_private_requests_leave_nothing(twins: Twins) -> None:
    before = twins.stats()
    for tenant, cache in (("quiet", "private"), ("quiet", "off"), (None, None), (None, "private"), (None, "off")):
        ask(twins, tenant, PROMPTS[0], cache)
    last = ask(twins, "quiet", PROMPTS[1])
    eventually(lambda: twins.stats()["quiet"]["tokens"] >= TOKENS)
    time.sleep(0.5)  # for what must not come
    assert twins.texts("quiet") == [last.choices[0].text] and grown(twins, before) == {"quiet"}


def test_plain_requests_leave_nothing(twins: Twins) -> None:
    before = twins.stats()
    ask(twins, "plain", PROMPTS[0], strategy="autoregressive")
    ask(twins, "plain", PROMPTS[0], max_draft_tokens=0)
    last = ask(twins, "plain", PROMPTS[1])
    eventually(lambda: twins.stats()["plain"]["tokens"] >= TOKENS)
    time.sleep(0.5)  # for what must not come
    assert twins.texts("plain") == [last.choices[0].text] and grown(twins, before) == {"plain"}


def test_export_import_preload_verify(twins: Twins, outrider: Callable[..., str], tmp_path: Path) -> None:
    answers = sorted(ask(twins, "source", prompt).choices[0].text for prompt in PROMPTS[:3])
    eventually(lambda: twins.stats()["source"]["tokens"] == 3 * TOKENS)
    file = str(tmp_path / "source.snapshot")
    outrider("export", "source", file)
    assert "3 texts added to target" in outrider("import", "target", file)
    assert twins.texts("target") == answers
    document = tmp_path / "document.txt"
    document.write_text(SENTENCES[0] * 10, encoding="utf-8")
    assert "1 new texts" in outrider("preload", str(document))
    assert twins.texts("*") == [SENTENCES[0] * 10]
    assert "all records and snapshots are valid" in outrider("verify")
    assert "target" in outrider("stats")


def test_wrong_keys(twins: Twins) -> None:
    for tenant in ("nobody", "*"):
        with pytest.raises(openai.AuthenticationError) as refusal:
            ask(twins, tenant, PROMPTS[0])
        assert refusal.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError, match="cache") as refused:
        ask(twins, None, PROMPTS[0], "tenant")
    assert refused.value.param == "cache"
    assert twins.admin("stats", "key of seen").status_code == 401
    assert twins.admin("stats", "wrong").status_code == 401
    as_tenant = httpx.get(f"{twins.url}/v1/models", headers=bearer(OPERATOR), timeout=60)
    assert as_tenant.status_code == 401


def test_operator_routes_have_a_port_of_their_own(twins: Twins) -> None:
    metrics = httpx.get(f"{twins.admin_url}/metrics", timeout=60)
    assert metrics.status_code == 200 and "outrider:replicas 2.0" in metrics.text
    for path in ("/metrics", "/admin/cache/stats"):
        assert httpx.get(f"{twins.url}{path}", headers=bearer(OPERATOR), timeout=60).status_code == 404


def test_redis_is_killed_in_the_middle_of_fifty_streams(twins: Twins) -> None:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(50)]
    plain = {prompt: ask(twins, None, prompt, "off").choices[0].text for prompt in PROMPTS}
    answers = asyncio.run(streamed(twins, prompts))
    assert answers == [plain[prompt] for prompt in prompts]
    assert "Redis" in twins.admin("stats").json()["error"]
    eventually(lambda: all(each["failures"] and not each["connected"] for each in twins.admin("stats").json()["replicas"]))
    twins.becomes(replicas=2, shared_cache="degraded")
    assert ask(twins, "streams", PROMPTS[0]).choices[0].text == plain[PROMPTS[0]]

    twins.redis.start()
    eventually(lambda: twins.admin("stats").json()["error"] is None)
    last = ask(twins, "streams", PROMPTS[1])
    eventually(lambda: last.choices[0].text in twins.texts("streams"))  # also what waited meanwhile has come
    eventually(lambda: plain[PROMPTS[0]] in twins.texts("streams"))
    twins.becomes_whole()


async def streamed(twins: Twins, prompts: list[str]) -> list[str]:
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
                twins.redis.kill()
        return text

    async with AsyncOpenAI(base_url=f"{twins.url}/v1", api_key="key of streams", max_retries=0, timeout=120) as client:
        answers = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
    assert chunks > 3 * len(prompts)
    return list(answers)
