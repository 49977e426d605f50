"""Random hostile requests beside a calm client: is any answer a 5xx, does memory grow, is the calm client slower?

outrider bench service fuzz [--cases 20000] [--seed 0] [--first 0]

A server runs with a key for a calm client and one for hostile ones. First the calm client is alone. Then cases drawn by a seed
are sent beside it from a low-priority process: schemas, grammars, texts, numbers and lists in every field of every route, files,
event ids, hosts, heads, the operator's routes, and connections that are broken, stalled, cut off or contradictory. A failing case
is reduced as long as it fails, and printed with its number: ``--seed 0 --first NUMBER --cases 1`` sends it again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import httpx

from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.run import Bench, Results
from outrider.experiments.service.attacks import run as attacks
from outrider.experiments.service.attacks.calm import CalmClient
from outrider.experiments.service.attacks.shots import Reply, Target, answered, event_ids, fire, is_fault
from outrider.experiments.service.fuzzing.requests import RESUMED, Case, Server, make_case, reduced
from outrider.experiments.service.served import Served, conducted, give_way, memory_mib, spread, until_whole

_MOST_TOKENS = 32  # of an answer
_ALONE_S, _WARM_UP_S = 20.0, 10.0
_AT_ONCE = 8
_WITHIN_S = 61.0  # for the answer to a case
_TOLD_S = 10.0  # between two lines of progress
_REDUCED = 12  # failures whose input is reduced, each of another kind, status or message
_SHOWN = 1500  # characters of an input
_DIGITS = re.compile(r"\d+|[0-9a-f]{8,}")
_MESSAGE = re.compile(rb'"message": ?"((?:[^"\\]|\\.){0,200})')


def settings(args: argparse.Namespace) -> list[str]:
    """Return the settings of the server."""
    return [*attacks.settings(args), f"limits.max_output_tokens={_MOST_TOKENS}"]


async def trial(server: Served, model: str, args: argparse.Namespace, progress: Progress) -> Results:
    """Measure the calm client alone, then beside the cases."""
    parts = urlsplit(server.url)
    target = Target(str(parts.hostname), int(parts.port or 80), model, attacks.ATTACKERS)
    with contextlib.closing(CalmClient(target.host, target.port, model, attacks.CALM)) as calm:
        alone = await asyncio.to_thread(calm.window, _ALONE_S, _WARM_UP_S)
        progress.say("hostile clients beside the calm one")
        pids, memory = server.serve_pids(), [memory_mib(server)]
        with _drawn(target, args.seed, args.first, args.cases) as pipe:
            beside = await asyncio.to_thread(calm.until, pipe.poll)
            drawn = pipe.recv()
        memory.append(memory_mib(server))
    async with httpx.AsyncClient(base_url=server.url, timeout=120, headers={"Authorization": f"Bearer {attacks.CALM}"}) as client:
        whole_again_s = await until_whole(client, 1)
        memory.append(memory_mib(server))
        health = (await client.get("/health")).json()
    before, after = spread(alone.wholes_s), spread(beside.wholes_s)
    return {
        "cases": args.cases,
        "drawn": drawn,
        "calm_s": {"alone": before, "beside": after},
        "calm_answers": {"alone": len(alone.wholes_s), "beside": len(beside.wholes_s)},
        "times": after["p95"] / before["p95"] if before and after else None,
        "failed": alone.failed + beside.failed,
        "memory_mib": memory,
        "same_processes": pids == server.serve_pids(),
        "health": health["status"],
        "whole_again_s": whole_again_s,
    }


@contextlib.contextmanager
def _drawn(target: Target, seed: int, first: int, count: int) -> Iterator[Connection]:
    """Run cases in a low-priority process, which sends their results through the yielded pipe."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_run_apart, args=(target, seed, first, count, theirs))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()  # if this process is interrupted
        process.join()


def _run_apart(target: Target, seed: int, first: int, count: int, pipe: Connection) -> None:
    give_way()
    found = event_ids(target, {"model": target.model, **RESUMED})
    server = Server(target.model, attacks.ATTACKERS[0], attacks.OPERATOR, target.admin_port, tuple(found))
    pipe.send(asyncio.run(run_cases(target, server, seed, first, count)))


async def run_cases(target: Target, server: Server, seed: int, first: int, count: int) -> dict[str, Any]:
    """Send ``count`` cases of a seed, beginning with number ``first``.

    Returns:
        By kind the number of answers of each status and their mean time; and the failures, similar ones once, with their numbers
        and the smallest input of the first.
    """
    kinds: dict[str, Counter[str]] = {}
    took_s, failures = defaultdict[str, float](float), dict[tuple[str, str, str], dict[str, Any]]()
    numbers, told_s, began = iter(range(first, first + count)), time.monotonic(), time.monotonic()

    async def go_on() -> None:
        nonlocal told_s
        for number in numbers:
            case = make_case(seed, number, server)
            sent = time.monotonic()
            reply = await answered(case.shot(server), target, _WITHIN_S)
            took_s[case.kind] += time.monotonic() - sent
            kinds.setdefault(case.kind, Counter())[reply.label] += 1
            if (fault := fault_of(case, reply)) is not None:
                await _note(failures, case, reply, fault, (seed, number), target, server)
            if time.monotonic() - told_s > _TOLD_S:
                told_s = time.monotonic()
                sent_cases = number - first + 1
                _say(f"case {sent_cases:,} of {count:,}, {sent_cases / (told_s - began):.0f} a second, {len(failures)} fail")

    await asyncio.gather(*(go_on() for _ in range(_AT_ONCE)))
    return {
        "seconds": round(time.monotonic() - began, 1),
        "kinds": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kinds.items())},
        "mean_s": {kind: round(took_s[kind] / counts.total(), 3) for kind, counts in sorted(kinds.items())},
        "failures": list(failures.values()),
    }


def fault_of(case: Case, reply: Reply) -> str | None:
    """Return how a case fails: a 5xx, the same within a stream, or no answer; None if it does not."""
    label = reply.label
    asks_for_time = isinstance(case.body, dict) and case.body.get("timeout") is not None
    if (label.startswith("5") or is_fault(label)) and not (asks_for_time and b"timeout" in reply.text):
        return label
    return "no answer" if case.raw is None and not reply.statuses else None


async def _note(
    failures: dict[tuple[str, str, str], dict[str, Any]], case: Case, reply: Reply, fault: str, drawn: tuple[int, int],
    target: Target, server: Server,
) -> None:  # fmt: skip
    seed, number = drawn
    found = _MESSAGE.search(reply.text)
    message = found[1].decode(errors="replace") if found else ""
    key = case.kind, fault, _DIGITS.sub("#", message)
    if key in failures:
        failures[key]["numbers"].append(number)
        return
    failures[key] = {
        "seed": seed, "kind": case.kind, "fault": fault, "message": message, "numbers": [number], "input": case.shown()[:_SHOWN],
    }  # fmt: skip
    _say(f"fails: --seed {seed} --first {number} --cases 1: {case.kind}: {fault} {message}")
    if len(failures) <= _REDUCED and fault != "no answer":

        async def fails(smaller: Case) -> bool:
            return fault_of(smaller, await fire(smaller.shot(server), target)) == fault

        failures[key]["input"] = (await reduced(case, fails)).shown()[:_SHOWN]
    _say(f"  {failures[key]['input'][:400]}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "bfloat16")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of the seed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases")


def not_well(results: Results, args: argparse.Namespace) -> list[str]:
    """Return failing cases, failed calm requests, and a server that is not as before."""
    found = [
        f"{each['fault']}, {len(each['numbers'])} of --seed {each['seed']} --first {each['numbers'][0]}: {each['input'][:300]}"
        for each in results["drawn"]["failures"]
    ]
    found += [f"{results['failed']} calm requests failed"] if results["failed"] else []
    found += [f"health is {results['health']}"] if results["health"] != "ok" else []
    found += [] if results["same_processes"] else ["a process was replaced"]
    return found + (["the server is not whole again"] if results["whole_again_s"] is None else [])


BENCH = Bench(
    "service-fuzz", __doc__ or "", conducted(trial, settings), options, {"cases": 1, "first": 0},
    wrong=not_well, refuses=(EOFError,),
)  # fmt: skip
