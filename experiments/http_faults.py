"""The same faults with ``outrider serve``: chats streamed by OpenAI's client while its Redis dies, hangs or is full."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI

from cache_service.namespace import hash_key
from configs.slices import ModelOptions
from experiments.fault_figures import Answer, Pass, compared
from experiments.redis_process import RedisProcess
from experiments.served import served

_MENDED_S = 60.0
_SETTLE_S = 2.0  # after the last token was sent, until the keeper has read it; after a repair, until the replicas have looked
_REPLICAS = ("server.replicas=2", "server.cpus_per_replica=0.5")
_IMPATIENT = ("cache.timeout_s=0.5", "cache.retry_s=0.5")
_ADMIN_KEY = "operator"


@dataclass(frozen=True, slots=True)
class Chats:
    """What is asked, and how."""

    prompts: Sequence[str]
    model: str  # its name in the API
    max_tokens: int
    concurrency: int

    def stream(self, url: str, key: str, at_half: Callable[[], None] | None = None) -> Pass:
        """All chats, so many at a time.

        Args:
            url: of the server.
            key: of the tenant whose the chats are.
            at_half: called when half of them have been answered, while others stream.
        """
        return asyncio.run(self._stream(url, key, at_half))

    async def _stream(self, url: str, key: str, at_half: Callable[[], None] | None) -> Pass:
        free, done = asyncio.Semaphore(self.concurrency), 0

        async def one(client: AsyncOpenAI, prompt: str) -> Answer:
            nonlocal done
            text, tokens = "", 0
            async with free:
                began = first = time.perf_counter()
                stream = await client.chat.completions.create(
                    model=self.model, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=self.max_tokens,
                    stream=True, stream_options={"include_usage": True},
                )  # fmt: skip
                async for chunk in stream:
                    first = first if text else time.perf_counter()
                    text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                    tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                ended = time.perf_counter()
            done += 1
            if done == len(self.prompts) // 2 and at_half is not None:
                at_half()
            return Answer(text, tokens, 0, 0, ended - began, ended - first, done)

        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600) as client:
            began = time.perf_counter()
            answers = await asyncio.gather(*(one(client, prompt) for prompt in self.prompts))
            return Pass(tuple(answers), time.perf_counter() - began)


def stream_over_http(
    model: ModelOptions,
    chats: Chats,
    faults: Mapping[str, tuple[Callable[[RedisProcess], None], Callable[[RedisProcess], None]]],
) -> dict[str, Any]:
    """All phases once: two replicas that decode plainly, then two that share a Redis.

    Args:
        model: to serve.
        chats: to stream in each phase.
        faults: by name, what breaks Redis and what mends it.

    Raises:
        RuntimeError: a server does not start; the message ends with what it said last.
        TimeoutError: a server does not find back to Redis.
    """
    phases = ["healthy", *(name for fault in faults for name in (fault, f"after-{fault}"))]
    passes: dict[str, Pass] = {}

    def keep(name: str, done: Pass) -> None:
        passes[name] = done
        print(f"http, {name}: {done.summary}", file=sys.stderr)

    common = [
        *_REPLICAS,
        f"model.dtype={model.dtype}",
        f"model.threads={model.threads}",
        f"engine.max_running={chats.concurrency}",
    ]
    with served(model.path, [*common, "speculation.strategy=autoregressive", "cache.enabled=false"]) as server:
        url = server.url
        chats.stream(url, "warm-up")
        keep("plain", chats.stream(url, "none"))
        keep("plain again", chats.stream(url, "none"))
    with RedisProcess() as redis:
        tenants = [f'tenancy.tenants.{name}.keys=["{hash_key(name)}"]' for name in ("warm-up", *phases)]
        own = [f'tenancy.admin_keys=["{hash_key(_ADMIN_KEY)}"]', f"redis_url={redis.url}", *_IMPATIENT]
        with served(model.path, [*common, *tenants, *own]) as server:
            url = server.url
            chats.stream(url, "warm-up")
            keep("healthy", chats.stream(url, "healthy"))
            for fault, (breaks, mends) in faults.items():
                keep(fault, chats.stream(url, fault, lambda breaks=breaks: breaks(redis)))  # type: ignore[misc]
                mends(redis)
                _wait_until_shared(url)
                keep(f"after-{fault}", chats.stream(url, f"after-{fault}"))
            time.sleep(_SETTLE_S)
            kept = {entry["tenant"]: entry["texts"] for entry in _stats(url)}
    return {
        "phases": {name: compared([done], [passes["plain"]]) for name, done in passes.items()},
        "texts_kept": {phase: kept[phase] for phase in phases},
    }


def _wait_until_shared(url: str) -> None:
    """Returns when the operator's routes reach Redis, and the replicas have had time to look at it themselves."""
    deadline = time.monotonic() + _MENDED_S
    while not _stats(url):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server did not find back to Redis within {_MENDED_S:.0f} s")
        time.sleep(0.1)
    time.sleep(_SETTLE_S)


def _stats(url: str) -> list[dict[str, Any]]:
    """What is kept of each tenant; nothing while Redis is away."""
    answer = httpx.get(f"{url}/admin/cache/stats", headers={"Authorization": f"Bearer {_ADMIN_KEY}"}, timeout=60.0)
    return answer.json()["tenants"] if answer.status_code == 200 else []
