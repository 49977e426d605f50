"""Cases against a server, and the smallest input of each kind that fails."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter, defaultdict
from typing import Any

from experiments.service.attacks.generating import event_ids
from experiments.service.attacks.shots import Reply, Shot, Target, fire
from experiments.service.attacks.verdicts import is_fault
from experiments.service.fuzzing.case import Case, Server
from experiments.service.fuzzing.cases import make_case
from experiments.service.fuzzing.odd_requests import RESUMED
from experiments.service.fuzzing.reduction import reduced

_AT_ONCE = 8
_TRIES, _AGAIN_S = 5, 0.2
_TOLD_S = 10.0
_REDUCED = 12  # failures whose input is made smaller, each of another kind, status or message
_SHOWN = 1500  # characters of an input
_DIGITS = re.compile(rb"\d+|[0-9a-f]{8,}")
_MESSAGE = re.compile(rb'"message": ?"((?:[^"\\]|\\.){0,200})')


def fault_of(case: Case, reply: Reply) -> str | None:
    """Return how a case fails: a 5xx, the same within a stream, or no answer; None where it does not."""
    label = reply.label
    asks_for_time = isinstance(case.body, dict) and case.body.get("timeout") is not None
    if (label.startswith("5") or is_fault(label)) and not (asks_for_time and b"timeout" in reply.text):
        return label
    return "no answer" if case.raw is None and not reply.statuses else None


async def run_cases(target: Target, server: Server, seed: int, first: int, count: int) -> dict[str, Any]:
    """Send the cases of a seed from one number on.

    Args:
        target: the server.
        server: of whom the cases ask.
        seed: of the cases.
        first: number of the first one.
        count: how many there are.

    Returns:
        By kind how many answers had which status, and the failures, those that are alike once, with their numbers and, of the
        first, the smallest input.
    """
    kinds: dict[str, Counter[str]] = {}
    took_s, failures = defaultdict[str, float](float), dict[tuple[str, str, str], dict[str, Any]]()
    numbers, told_s, began = iter(range(first, first + count)), time.monotonic(), time.monotonic()

    async def go_on() -> None:
        nonlocal told_s
        for number in numbers:
            case = make_case(seed, number, server)
            sent = time.monotonic()
            reply = await _answer(case.shot(server), target)
            took_s[case.kind] += time.monotonic() - sent
            kinds.setdefault(case.kind, Counter())[reply.label] += 1
            fault = fault_of(case, reply)
            if fault is not None:
                await _note(failures, case, reply, fault, (seed, number), target, server)
            if time.monotonic() - told_s > _TOLD_S:
                told_s = time.monotonic()
                rate = (number - first + 1) / (told_s - began)
                print(
                    f"case {number - first + 1:,} of {count:,}, {rate:.0f} a second, {len(failures)} fail",
                    file=sys.stderr,
                    flush=True,
                )

    await asyncio.gather(*(go_on() for _ in range(_AT_ONCE)))
    return {
        "seconds": round(time.monotonic() - began, 1),
        "kinds": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kinds.items())},
        "mean_s": {kind: round(took_s[kind] / counts.total(), 3) for kind, counts in sorted(kinds.items())},
        "failures": [{"seed": seed, **told} for told in failures.values()],
    }


async def _answer(shot: Shot, target: Target) -> Reply:
    """Return the answer to a shot, which is fired again where the server has too much to do."""
    for _ in range(_TRIES):
        reply = await fire(shot, target)
        if reply.status not in (429, 503):
            break
        await asyncio.sleep(_AGAIN_S)
    return reply


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def _note(
    failures: dict[tuple[str, str, str], dict[str, Any]], case: Case, reply: Reply, fault: str, drawn: tuple[int, int],
    target: Target, server: Server,
) -> None:  # fmt: skip
    seed, number = drawn
    found = _MESSAGE.search(reply.text)
    message = found[1].decode(errors="replace") if found else ""
    key = case.kind, fault, _DIGITS.sub(b"#", message.encode()).decode()
    if key in failures:
        failures[key]["numbers"].append(number)
        return
    failures[key] = told = {
        "kind": case.kind,
        "fault": fault,
        "message": message,
        "numbers": [number],
        "input": case.shown()[:_SHOWN],
    }
    _say(f"fails: --seed {seed} --first {number} --cases 1: {case.kind}: {fault} {message}")
    if len(failures) <= _REDUCED and fault != "no answer":

        async def fails(smaller: Case) -> bool:
            return fault_of(smaller, await fire(smaller.shot(server), target)) == fault

        told["input"] = (await reduced(case, fails)).shown()[:_SHOWN]
    _say(f"  {told['input'][:400]}")


def cases_in_process(target: Target, model: str, keys: tuple[str, str], seed: int, first: int, count: int) -> dict[str, Any]:
    """Run cases in this process. ``keys`` are that of the cases and the operator's."""
    told = event_ids(target, {"model": model, **RESUMED})
    return asyncio.run(run_cases(target, Server(model, keys[0], keys[1], target.admin_port, tuple(told)), seed, first, count))
