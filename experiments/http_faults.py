"""The same faults with ``outrider serve``: chats streamed by OpenAI's client while its Redis dies, hangs or is full."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from cache_service.namespace import hash_key
from cluster.preflight import SECRET_VARIABLE
from cluster.prompt_file import read_prompts
from configs.schema import find_model
from experiments.fault_figures import Answer, Pass, compared
from experiments.record import ROOT
from experiments.redis_process import RedisProcess

_START_S, _STOP_S, _MENDED_S = 300.0, 60.0, 60.0
_ADMIN_KEY = "operator"


def stream_over_http(
    args: argparse.Namespace,
    ids: Sequence[str],
    faults: Mapping[str, tuple[Callable[[RedisProcess], None], Callable[[RedisProcess], None]]],
) -> dict[str, Any]:
    """All phases once: a server that decodes plainly, then one with two replicas that share a Redis.

    Args:
        args: of ``experiments.cache_faults``.
        ids: of the records of ``args.prompts`` to ask.
        faults: by name, what breaks Redis and what mends it.

    Raises:
        RuntimeError: a server does not start; the message ends with what it said last.
    """
    wanted = set(ids)
    prompts = [record.prompt for record in read_prompts(args.prompts) if record.id in wanted]
    phases = ["healthy", *(name for fault in faults for name in (fault, f"after-{fault}"))]
    passes: dict[str, Pass] = {}

    def keep(name: str, done: Pass) -> None:
        passes[name] = done
        print(f"http, {name}: {done.summary}", file=sys.stderr)

    with _served(args, ["speculation.strategy=autoregressive", "cache.enabled=false"]) as url:
        _stream(url, "none", prompts[: args.concurrency], args)
        for name in ("plain", "plain again"):
            keep(name, _stream(url, "none", prompts, args))
    with RedisProcess() as redis:
        tenants = [f'tenancy.tenants.{name}.keys=["{hash_key(name)}"]' for name in ("warm-up", *phases)]
        admin = f'tenancy.admin_keys=["{hash_key(_ADMIN_KEY)}"]'
        shared = [
            "server.replicas=2",
            "server.cpus_per_replica=0.5",
            f"redis_url={redis.url}",
            "cache.timeout_s=0.5",
            "cache.retry_s=0.5",
        ]
        with _served(args, [*shared, *tenants, admin]) as url:
            _stream(url, "warm-up", prompts[: 4 * args.concurrency], args)
            keep("healthy", _stream(url, "healthy", prompts, args))
            for fault, (breaks, mends) in faults.items():
                keep(fault, _stream(url, fault, prompts, args, lambda breaks=breaks: breaks(redis)))  # type: ignore[misc]
                mends(redis)
                _wait_until_shared(url)
                keep(f"after-{fault}", _stream(url, f"after-{fault}", prompts, args))
            kept = {entry["tenant"]: entry["texts"] for entry in _stats(url)}
    return {
        "phases": {name: compared([done], [passes["plain"]]) for name, done in passes.items()},
        "texts_kept": {phase: kept[phase] for phase in phases},
    }


def _stream(
    url: str, key: str, prompts: Sequence[str], args: argparse.Namespace, at_half: Callable[[], None] | None = None
) -> Pass:
    """Chats, ``args.concurrency`` at a time; ``at_half`` is called when half of them are done."""
    return asyncio.run(_stream_all(url, key, prompts, args, at_half))


async def _stream_all(
    url: str, key: str, prompts: Sequence[str], args: argparse.Namespace, at_half: Callable[[], None] | None
) -> Pass:
    free, done = asyncio.Semaphore(args.concurrency), 0

    async def one(client: AsyncOpenAI, prompt: str) -> Answer:
        nonlocal done
        text, tokens = "", 0
        async with free:
            began = time.perf_counter()
            stream = await client.chat.completions.create(
                model=Path(args.model).name, messages=[{"role": "user", "content": prompt}], temperature=0,
                max_tokens=args.max_tokens, stream=True, stream_options={"include_usage": True},
            )  # fmt: skip
            async for chunk in stream:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            seconds = time.perf_counter() - began
        done += 1
        if done == len(prompts) // 2 and at_half is not None:
            at_half()
        return Answer(text, tokens, 0, 0, seconds, done)

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600) as client:
        began = time.perf_counter()
        answers = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
        return Pass(tuple(answers), time.perf_counter() - began)


@contextlib.contextmanager
def _served(args: argparse.Namespace, settings: Sequence[str]) -> Iterator[str]:
    """The address of ``outrider serve``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, always = f"http://127.0.0.1:{port}", [
        f"server.port={port}", f"model.dtype={args.dtype}", f"model.threads={args.threads}", f"engine.max_running={args.concurrency}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "cluster.cli", "serve", "--model", find_model(args.model), *always, *settings]
    environment = os.environ | {"PYTHONPATH": str(ROOT), SECRET_VARIABLE: secrets.token_hex(32)}
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            _wait_until_healthy(url, process, Path(log.name))
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # the second one ends everything at once
                process.wait(_STOP_S)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while "curl " not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"outrider serve did not start: {log.read_text()[-500:]}")
        time.sleep(0.2)
    httpx.get(f"{url}/health", timeout=60.0).raise_for_status()


def _wait_until_shared(url: str) -> None:
    """Returns when the operator's routes reach Redis, and the replicas have had time to look at it themselves."""
    deadline = time.monotonic() + _MENDED_S
    while not _stats(url):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server did not find back to Redis within {_MENDED_S:.0f} s")
        time.sleep(0.1)
    time.sleep(2.0)


def _stats(url: str) -> list[dict[str, Any]]:
    """What is kept of each tenant; nothing while Redis is away."""
    answer = httpx.get(f"{url}/admin/cache/stats", headers={"Authorization": f"Bearer {_ADMIN_KEY}"}, timeout=60.0)
    return answer.json()["tenants"] if answer.status_code == 200 else []
