"""One tenant that floods the server: the other tenants' time to the first token, relative to that without the flood.

outrider bench service fairness [--model smollm2-135m-instruct] [--tenants 2 8 32] [--seconds 20]

Each tenant has a key. All but the first send short questions with pauses, so that together they use a part of the server. The
first floods it in each of these ways: very many requests, long prompts, many choices (``n``), long ``reference_documents``. Its
hundred clients ask again as soon as they have an answer, or 50 ms after a refusal, from a low-priority process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections import Counter
from typing import Any

import httpx

from cache_service.namespace import hash_key
from experiments.bench.options import add_model
from experiments.bench.progress import Progress
from experiments.bench.run import Bench, Results
from experiments.service.asks import Answer, Ask, ask
from experiments.service.served import Served, apart, conducted, spread, until_whole

_QUESTION = "Name the rivers that meet in city number {number}, and say which of them is the longest."
_SENTENCE = "In the year {number} the harbour was widened, and ships of {number} tons could come in. "
_FLOOD_CLIENTS = 100
_BUSY = 0.3  # part of the server's time that the calm tenants use together
_BEGUN_S = 4.0  # of a flood before it counts
_REFUSED_S = 0.05  # until a refused client asks again
FLOODS = ("requests", "length", "choices", "documents")


def question(rng: random.Random, most: int = 16, **fields: object) -> Ask:
    """Return a short question, as a streamed chat with further fields."""
    body = {
        "messages": [{"role": "user", "content": _QUESTION.format(number=rng.randrange(10**6))}],
        "max_tokens": most, "stream": True,
    }  # fmt: skip
    return Ask("greedy", "chat/completions", body | fields)


def flooding(kind: str, rng: random.Random) -> Ask:
    """Return a request of the flooding tenant."""
    sentences = [_SENTENCE.format(number=rng.randrange(1000, 9999)) for _ in range(400)]
    fields: dict[str, dict[str, object]] = {
        "requests": {},
        "length": {"messages": [{"role": "user", "content": "".join(sentences[:45])}]},
        "choices": {"n": 32, "temperature": 0.8},
        "documents": {"reference_documents": ["".join(sentences)] * 10},
    }
    return question(rng, 256, ignore_eos=True, **fields[kind])


def _key(number: int) -> str:
    return f"outrider-fairness-{number}"


async def _ask(client: httpx.AsyncClient, model: str, request: Ask, tenant: int) -> Answer:
    return await ask(client, model, request, headers={"Authorization": f"Bearer {_key(tenant)}"})


async def trial(server: Served, model: str, args: argparse.Namespace, progress: Progress) -> Results:
    """Measure all numbers of tenants, each without a flood and with each kind."""
    rows = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        one = [await _ask(client, model, question(random.Random(at)), 1) for at in range(6)]
        alone_s = min(answer.seconds for answer in one)
        for tenants in args.tenants:
            pause_s = (tenants - 1) * alone_s / _BUSY
            calm = await phase(client, model, tenants, pause_s, None, args)
            for kind in args.floods:
                found = await phase(client, model, tenants, pause_s, kind, args)
                times = found["ttft_s"]["p95"] / calm["ttft_s"]["p95"]
                rows.append({"tenants": tenants, "flood": kind, "calm_ttft_s": calm["ttft_s"], "times": times, **found})
                progress.say(f"{tenants} tenants, one floods by {kind}: {times:.2f} times the time to the first token")
    return {"alone_s": alone_s, "floods": rows}


async def phase(
    client: httpx.AsyncClient, model: str, tenants: int, pause_s: float, kind: str | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Run the calm tenants for some seconds, beside a flood unless ``kind`` is None."""
    answers: list[Answer] = []

    async def calm(number: int) -> None:
        own = random.Random(f"{args.seed}/{number}")
        until = time.monotonic() + args.seconds
        await asyncio.sleep(own.random() * pause_s)
        while time.monotonic() < until:
            answers.append(await _ask(client, model, question(own), number))
            await asyncio.sleep(min(own.expovariate(1 / pause_s), max(until - time.monotonic(), 0.0)))

    with contextlib.ExitStack() as running:
        statuses = Counter[str]()
        if kind is not None:
            statuses = running.enter_context(apart(flood, str(client.base_url), model, kind, args.seed))
            await asyncio.sleep(_BEGUN_S)
        await asyncio.gather(*(calm(number) for number in range(1, tenants)))
    await until_whole(client, 1)
    whole = [answer for answer in answers if answer.status == 200 and answer.error is None]
    return {
        "answers": len(answers),
        "failed": len(answers) - len(whole),
        "ttft_s": spread([answer.first_s for answer in whole if answer.first_s is not None]),
        "flooder": statuses,
    }


async def flood(url: str, model: str, kind: str, seed: int, ends: asyncio.Event) -> Counter[str]:
    """Run the flooding tenant's clients until the event is set, and count their answers by status."""
    rng, statuses = random.Random(seed), Counter[str]()

    async def go_on(client: httpx.AsyncClient) -> None:
        while True:
            answer = await _ask(client, model, flooding(kind, rng), 0)
            statuses[str(answer.status)] += 1
            if answer.status != 200:
                await asyncio.sleep(_REFUSED_S)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_FLOOD_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        tasks = [asyncio.create_task(go_on(client)) for _ in range(_FLOOD_CLIENTS)]
        await ends.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return statuses


def settings(args: argparse.Namespace) -> list[str]:
    """Return the settings of the server."""
    keys = [f'tenancy.tenants.t{number}.keys=["{hash_key(_key(number))}"]' for number in range(max(args.tenants))]
    return [f"model.dtype={args.dtype}", f"model.threads={args.threads}", *keys]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "bfloat16", ("bfloat16", "float32"), "smollm2-135m-instruct")
    parser.add_argument("--tenants", type=int, nargs="+", default=[2, 8, 32], help="number of tenants, with the flooding one")
    parser.add_argument("--floods", nargs="+", choices=FLOODS, default=list(FLOODS))
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each phase")
    parser.add_argument("--seed", type=int, default=0, help="seed of questions and pauses")
    parser.add_argument("--threads", type=int, default=2, help="number of torch threads")


def failed(results: Results, args: argparse.Namespace) -> list[str]:
    """Return the floods under which a calm tenant's request was not answered."""
    return [f"{row['tenants']} tenants, {row['flood']}: {row['failed']} failed" for row in results["floods"] if row["failed"]]


BENCH = Bench("service-fairness", __doc__ or "", conducted(trial, settings), options, {"tenants": 2, "threads": 1}, wrong=failed)
