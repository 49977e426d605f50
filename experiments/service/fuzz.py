"""Hostile and clumsy clients beside a calm one: is any answer a 5xx, does memory grow, does the calm one notice?

python -m experiments.service fuzz [--cases 20000] [--seed 0] [--first 0] [--examples 0] [--seconds 20]

``outrider serve`` runs once, with one key for a calm client, which asks one short question after the other, and one for the rest.
First the calm one is alone. Then come cases that are drawn by a seed (``fuzzing.cases``): schemas, grammars, texts, numbers and
lists in every field of every route, files, ids of events, hosts, heads and the operator's routes. A case that fails is made
smaller as long as it fails, and printed with its number: ``--seed 0 --first NUMBER --cases 1`` sends it again. With them come
connections that send what no client library would: broken, stalled, cut off, contradictory; and with ``--examples`` schemathesis,
in an environment of its own. All give way to all other processes, as if they were on another machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from cache_service.namespace import hash_key
from experiments.bench.options import add_model
from experiments.bench.progress import Progress
from experiments.bench.run import Bench, Results
from experiments.peers.environments import Environments, MissingPeerError
from experiments.service import clients
from experiments.service.asks import Ask
from experiments.service.attacks.shots import Target
from experiments.service.fuzzing.run_cases import cases_in_process
from experiments.service.overload import Outcome, engine_pids, try_once
from experiments.service.served import Served, apart, conducted, give_way, memory_mib, spread, until_whole

_CALM, _HOSTILE, _OPERATOR = "outrider-calm", "outrider-hostile", "outrider-operator"
_MOST_TOKENS = 32  # of an answer: the cases are many
_AT_ONCE = 12  # connections
_STALL_S = 5.0
_ANSWER_S = 30.0
_COUNTED = re.compile(r"(\d+) generated")
_DEEP = 5000


def settings(args: argparse.Namespace) -> list[str]:
    """Of the server."""
    return [
        f"model.dtype={args.dtype}", "model.threads=1", f"limits.max_output_tokens={_MOST_TOKENS}",
        f'tenancy.tenants.calm.keys=["{hash_key(_CALM)}"]', f'tenancy.tenants.hostile.keys=["{hash_key(_HOSTILE)}"]',
        f'tenancy.admin_keys=["{hash_key(_OPERATOR)}"]',
    ]  # fmt: skip


async def trial(server: Served, model: str, args: argparse.Namespace, progress: Progress) -> Results:
    """The calm client alone, then beside the others."""
    bin_ = None
    if args.examples:
        bin_ = Environments(args.venvs, {}, True, progress.say).of(clients.CLIENTS["schemathesis"].package).parent
    async with httpx.AsyncClient(base_url=server.url, timeout=120, headers={"Authorization": f"Bearer {_CALM}"}) as client:
        await ask_for(client, model, args.warm_up)
        alone = await ask_for(client, model, args.seconds)
        progress.say("hostile clients beside the calm one")
        pids, memory = engine_pids(server), [memory_mib(server)]
        ends = asyncio.Event()
        with apart(send_raw, server.url, model, args.seed) as statuses:
            calm = asyncio.create_task(ask_for(client, model, None, ends))
            drawn = await draw(server.url, model, args)
            printed, code = await fuzz(server.url, bin_, args) if bin_ is not None else ([], 0)
            memory.append(memory_mib(server))
            ends.set()
            beside = await calm
        whole_again_s = await until_whole(client, 1)
        memory.append(memory_mib(server))
        health = (await client.get("/health")).json()
    failed = [one.note for one in (*alone, *beside) if one.status != 200 or not one.whole]
    errors = sum(count for status, count in statuses.items() if status.rpartition(" ")[2].startswith("5"))
    before, after = (spread([one.seconds for one in outcomes]) for outcomes in (alone, beside))
    same = pids == engine_pids(server)
    generated = sum(int(found) for line in printed for found in _COUNTED.findall(line))
    return {
        "cases": generated + sum(statuses.values()) + args.cases,
        "drawn": drawn,
        "schemathesis": {"exit_code": code, "printed": printed},
        "connections": dict(sorted(statuses.items())),
        "server_errors": errors,
        "calm_s": {"alone": before, "beside": after},
        "calm_answers": {"alone": len(alone), "beside": len(beside)},
        "times": after["p95"] / before["p95"],
        "failed": failed,
        "memory_mib": memory,
        "same_processes": same,
        "health": health["status"],
        "whole_again_s": whole_again_s,
        "well": not (errors or failed or code or drawn["failures"]) and same and health["status"] == "ok",
    }


async def ask_for(
    client: httpx.AsyncClient, model: str, seconds: float | None, ends: asyncio.Event | None = None
) -> list[Outcome]:
    """Short questions, one after the other, for some seconds or until something ends."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    while time.monotonic() - began < seconds if seconds is not None else ends is not None and not ends.is_set():
        text = f"When does library number {len(outcomes)} open?"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "stream": True, "ignore_eos": True}
        outcomes.append(await try_once(client, model, Ask("greedy", "chat/completions", body)))
        await asyncio.sleep(0.1)
    return outcomes


async def draw(url: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the drawn cases in a process of their own; see ``run_cases``."""
    parts = urlsplit(url)
    target = Target(str(parts.hostname), int(parts.port or 80), model, (_HOSTILE, _HOSTILE))
    work = partial(cases_in_process, target, model, (_HOSTILE, _OPERATOR), args.seed, args.first, args.cases)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_draw, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = await asyncio.to_thread(ours.recv)
        return found
    finally:
        process.kill()  # where this one is ended before it
        process.join()


def _draw(work: Callable[[], dict[str, Any]], told: Connection) -> None:
    give_way()
    told.send(work())


async def fuzz(url: str, bin_: Path, args: argparse.Namespace) -> tuple[list[str], int]:
    """What schemathesis prints last, and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        target = clients.Target(url, "", "", args.seconds, 1, args.examples, Path(folder))
        key = ["--mode", "all", "--header", f"Authorization: Bearer {_HOSTILE}"]
        command = [*clients.CLIENTS["schemathesis"].command(bin_, target), *key]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=folder,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "160"},
            preexec_fn=give_way,
        )  # fmt: skip
        said, _ = await process.communicate()
        return clients.tail(said.decode(errors="replace")), process.returncode or 0


# ---- connections that no library would make ------------------------------------------------------------------------------------


def _post(body: bytes, length: int | str | None = None, more: str = "", path: str = "/v1/chat/completions") -> bytes:
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {_HOSTILE}\r\nContent-Type: application/json\r\n"
    return f"{head}{more}Content-Length: {size}\r\n\r\n".encode() + body


def _chat(model: str, **fields: object) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **fields}
    return json.dumps(body).encode()


def _noise(rng: random.Random, body: bytes) -> bytes:
    """A body with some bytes changed, cut out or repeated."""
    changed = bytearray(body)
    for _ in range(rng.randrange(1, 8)):
        at, kind = rng.randrange(len(changed)), rng.randrange(3)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            del changed[at : at + rng.randrange(1, 6)]
        else:
            changed[at:at] = changed[at : at + rng.randrange(1, 40)]
        if not changed:
            return b"{"
    return bytes(changed)


Raw = Callable[[random.Random, str], bytes]
RAW: dict[str, Raw] = {
    "changed bytes": lambda rng, model: _post(_noise(rng, _chat(model, stream=rng.random() < 0.5, stop=["é", "\ud83d\ude00"]))),
    "random bytes": lambda rng, model: _post(rng.randbytes(rng.randrange(2000))),
    "no HTTP": lambda rng, model: rng.randbytes(rng.randrange(1, 500)) + b"\r\n\r\n",
    "half a surrogate": lambda rng, model: _post(_chat(model).replace(b"hello", b"\\ud800 \\udfff")),
    "no UTF-8": lambda rng, model: _post(_chat(model).replace(b"hello", b"\xff\xfe\x00")),
    "NUL": lambda rng, model: _post(_chat(model).replace(b"hello", b"\\u0000\x00")),
    "deep lists": lambda rng, model: _post(_chat(model).replace(b'"hello"', b"[" * _DEEP + b"]" * _DEEP)),
    "deep objects": lambda rng, model: _post(_chat(model).replace(b'"hello"', b'{"a":' * _DEEP + b"1" + b"}" * _DEEP)),
    "long number": lambda rng, model: _post(_chat(model, seed="@").replace(b'"@"', b"9" * rng.choice((50, 5000, 100_000)))),
    "two of a name": lambda rng, model: _post(b'{"model":5,' + _chat(model)[1:]),
    "many names": lambda rng, model: _post(_chat(model, **{f"n{at}": at for at in range(20_000)})),
    "length too long": lambda rng, model: _post(_chat(model), 10**6),
    "length too short": lambda rng, model: _post(_chat(model), rng.randrange(60)),
    "length negative": lambda rng, model: _post(_chat(model), -1),
    "length no number": lambda rng, model: _post(_chat(model), "many"),
    "length enormous": lambda rng, model: _post(_chat(model), 10**18),
    "two lengths": lambda rng, model: _post(_chat(model), None, "Content-Length: 3\r\n"),
    "length and chunks": lambda rng, model: _post(_chat(model), None, "Transfer-Encoding: chunked\r\n"),
    "broken chunks": lambda rng, model: _post(b"zz\r\n" + _chat(model), 0, "Transfer-Encoding: chunked\r\n"),
    "long header": lambda rng, model: _post(_chat(model), None, f"X-Long: {'x' * 100_000}\r\n"),
    "many headers": lambda rng, model: _post(_chat(model), None, "".join(f"X-{at}: 1\r\n" for at in range(5000))),
    "odd method": lambda rng, model: _post(_chat(model)).replace(b"POST", rng.choice((b"BREW", b"TRACE", b"post", b"P\x00T")), 1),
    "odd path": lambda rng, model: _post(_chat(model), path=rng.choice(("/v1/" + "a" * 60_000, "/%00", "/../../a", "//"))),
    "odd version": lambda rng, model: _post(_chat(model)).replace(b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/9.9", b"ICY")), 1),
    "not JSON": lambda rng, model: _post(rng.choice((b"", b"null", b"[]", b"1e999", b'"x"', b"NaN", b"{}", b"true"))),
    "gzip": lambda rng, model: _post(b"\x1f\x8b" + rng.randbytes(50), None, "Content-Encoding: gzip\r\n"),
    "pipelined": lambda rng, model: _post(_chat(model)) * 5,
    "expectation": lambda rng, model: _post(_chat(model), None, "Expect: 200-ok\r\n"),
}  # fmt: skip
_LEAVINGS = ("stays", "stays", "hangs up", "half and hangs up", "half and stalls", "byte by byte")


async def send_raw(url: str, model: str, seed: int, ends: asyncio.Event) -> Counter[str]:
    """Connections of every kind, until something ends; how many had which status, 0 where none came."""
    rng, statuses = random.Random(seed), Counter[str]()

    async def go_on() -> None:
        while not ends.is_set():
            kind, leaving = rng.choice(list(RAW)), rng.choice(_LEAVINGS)
            status = await send(url, RAW[kind](rng, model), leaving)
            statuses[f"{kind}, {leaving}: {status}"] += 1

    await asyncio.gather(*(go_on() for _ in range(_AT_ONCE)))
    return statuses


async def send(url: str, data: bytes, leaving: str) -> int:
    """Sends bytes in some way; the status of the first answer, 0 where there was none or nobody waited for it."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        sent = data[: len(data) // 2] if leaving.startswith("half") else data
        if leaving == "byte by byte":
            for at in range(min(len(sent), 200)):
                writer.write(sent[at : at + 1])
                await writer.drain()  # raises where the server has closed it
                await asyncio.sleep(0.002)
            sent = sent[200:]
        writer.write(sent)
        await writer.drain()
        if leaving.endswith("hangs up"):
            await asyncio.sleep(random.random() * 0.05)
            writer.transport.abort()
            return 0
        async with asyncio.timeout(_STALL_S if leaving.endswith("stalls") else _ANSWER_S):
            line = await reader.readline()
        found = re.match(rb"HTTP/1\.[01] (\d{3})", line)
        return int(found[1]) if found else 0
    except (OSError, TimeoutError):
        return 0
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_model(parser, "bfloat16")
    parser.add_argument("--cases", type=int, default=20_000, help="that are drawn")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of the seed")
    parser.add_argument("--examples", type=int, default=0, help="of schemathesis for each operation, at most; 0: without it")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which the calm client is alone")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds of it that are not counted")
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "outrider-clients", help="kept between runs")
    parser.add_argument("--seed", type=int, default=0, help="of the cases and connections")


def not_well(results: Results, args: argparse.Namespace) -> list[str]:
    """That an answer was a 5xx, a calm request failed, or a process was replaced."""
    counts = f"{results['server_errors']} connections got a 5xx, {len(results['failed'])} calm requests failed"
    found = [
        f"{each['fault']}, {len(each['numbers'])} of --seed {each['seed']} --first {each['numbers'][0]}: {each['input'][:300]}"
        for each in results["drawn"]["failures"]
    ]
    if not results["well"]:
        found.append(f"{counts}, health {results['health']}, same processes: {results['same_processes']}")
    return found


BENCH = Bench(
    "service-fuzz",
    __doc__ or "",
    conducted(trial, settings),
    options,
    {"cases": 1, "first": 0, "examples": 0, "seconds": 1},
    wrong=not_well,
    refuses=(MissingPeerError,),
)
