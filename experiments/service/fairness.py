"""What one tenant that floods does to the others: their time to the first token, beside that without the flood.

python -m experiments.service fairness [--model smollm2-135m-instruct] [--tenants 2 8 32] [--seconds 20]

``outrider serve`` runs once, with a key for each tenant. All but the first ask short questions one after the other, with
pauses, so that together they take a part of what the server can give. The first one does nothing at first; then it sends what
it can, in each of these ways: very many requests, long prompts, many choices (``n``), long ``reference_documents``. A hundred
clients of it ask again as soon as they have an answer, or 50 ms after a refusal; their process gives way to all others.
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
from experiments.service.asks import Ask
from experiments.service.overload import Outcome, try_once
from experiments.service.served import Served, apart, conducted, spread, until_whole

_QUESTION = "Name the rivers that meet in city number {number}, and say which of them is the longest."
_SENTENCE = "In the year {number} the harbour was widened, and ships of {number} tons could come in. "
_FLOOD_CLIENTS = 100
_BUSY = 0.3  # of the time of one request alone, that the calm tenants keep the server busy together
_BEGUN_S = 4.0  # for which a flood runs before it counts
_REFUSED_S = 0.05  # until a client that was refused comes again
FLOODS = ("requests", "length", "choices", "documents")


def question(rng: random.Random) -> Ask:
    """A short one."""
    return _ask(_QUESTION.format(number=rng.randrange(10**6)), 16)


def flooding(kind: str, rng: random.Random) -> Ask:
    """What the first tenant sends."""
    numbers = [rng.randrange(1000, 9999) for _ in range(400)]
    if kind == "length":
        text = "".join(_SENTENCE.format(number=number) for number in numbers[:45])
        return _ask(text, 256, ignore_eos=True)
    if kind == "choices":
        return _ask(question(rng).body["messages"][0]["content"], 256, n=32, temperature=0.8, ignore_eos=True)
    if kind == "documents":
        documents = ["".join(_SENTENCE.format(number=number) for number in numbers) for _ in range(10)]
        return _ask(question(rng).body["messages"][0]["content"], 256, reference_documents=documents, ignore_eos=True)
    return _ask(question(rng).body["messages"][0]["content"], 256, ignore_eos=True)


def _ask(text: str, most: int, **fields: object) -> Ask:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": most, "stream": True, **fields}
    return Ask("greedy", "chat/completions", body)


def _keys(count: int) -> list[str]:
    return [f'tenancy.tenants.t{number}.keys=["{hash_key(_key(number))}"]' for number in range(count)]


def _key(number: int) -> str:
    return f"outrider-fairness-{number}"


async def trial(server: Served, model: str, args: argparse.Namespace, progress: Progress) -> Results:
    """All numbers of tenants, each without a flood and with each kind."""
    rows = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        one = [await _once(client, model, question(random.Random(at)), 1) for at in range(6)]
        alone_s = min(outcome.seconds for outcome in one)
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
    """Some seconds of questions, with a flood that has begun or without."""
    answers: list[Outcome] = []

    async def calm(number: int) -> None:
        own = random.Random(f"{args.seed}/{number}")
        until = time.monotonic() + args.seconds
        await asyncio.sleep(own.random() * pause_s)
        while time.monotonic() < until:
            answers.append(await _once(client, model, question(own), number))
            await asyncio.sleep(min(own.expovariate(1 / pause_s), max(until - time.monotonic(), 0.0)))

    with contextlib.ExitStack() as running:
        statuses = Counter[str]()
        if kind is not None:
            statuses = running.enter_context(apart(flood, str(client.base_url), model, kind, args.seed))
            await asyncio.sleep(_BEGUN_S)
        await asyncio.gather(*(calm(number) for number in range(1, tenants)))
    await until_whole(client, 1)
    whole = [one for one in answers if one.status == 200 and one.whole]
    return {
        "answers": len(answers),
        "failed": len(answers) - len(whole),
        "ttft_s": spread([one.first_s for one in whole if one.first_s is not None]),
        "flooder": statuses,
    }


async def flood(url: str, model: str, kind: str, seed: int, ends: asyncio.Event) -> Counter[str]:
    """The first tenant's clients, until something ends; how many answers had which status."""
    rng, statuses = random.Random(seed), Counter[str]()

    async def go_on(client: httpx.AsyncClient) -> None:
        while True:
            outcome = await _once(client, model, flooding(kind, rng), 0)
            statuses[str(outcome.status)] += 1
            if outcome.status != 200:
                await asyncio.sleep(_REFUSED_S)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_FLOOD_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        tasks = [asyncio.create_task(go_on(client)) for _ in range(_FLOOD_CLIENTS)]
        await ends.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return statuses


async def _once(client: httpx.AsyncClient, model: str, request: Ask, tenant: int) -> Outcome:
    headed = httpx.Headers({"Authorization": f"Bearer {_key(tenant)}"})
    return await try_once(client, model, request, headed)


def settings(args: argparse.Namespace) -> list[str]:
    """Of the server."""
    return [f"model.dtype={args.dtype}", f"model.threads={args.threads}", *_keys(max(args.tenants))]


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_model(parser, "bfloat16", ("bfloat16", "float32"), "smollm2-135m-instruct")
    parser.add_argument("--tenants", type=int, nargs="+", default=[2, 8, 32], help="that have a key, the flooding one included")
    parser.add_argument("--floods", nargs="+", choices=FLOODS, default=list(FLOODS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--seed", type=int, default=0, help="of questions and pauses")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")


def failed(results: Results, args: argparse.Namespace) -> list[str]:
    """The floods under which a calm tenant's request was not answered."""
    return [f"{row['tenants']} tenants, {row['flood']}: {row['failed']} failed" for row in results["floods"] if row["failed"]]


BENCH = Bench("service-fairness", __doc__ or "", conducted(trial, settings), options, {"tenants": 2, "threads": 1}, wrong=failed)
