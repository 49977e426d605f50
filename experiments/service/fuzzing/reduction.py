"""The smallest request that still fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from experiments.service.fuzzing.case import Case

Fails = Callable[[Case], Awaitable[bool]]


async def reduced(case: Case, fails: Fails, most: int = 80) -> Case:
    """Return a case with as little in it as still fails, found with so many tries at most."""
    tries, found = 0, True
    while found:
        found = False
        for smaller in _smaller_cases(case):
            if tries >= most:
                return case
            tries += 1
            if await fails(smaller):
                case, found = smaller, True
                break
    return case


def _smaller_cases(case: Case) -> Iterator[Case]:
    if case.raw is not None:
        yield from (dataclasses.replace(case, raw=smaller) for smaller in _halves(case.raw))
        return
    for name in case.headers or ():
        yield dataclasses.replace(case, headers={other: told for other, told in (case.headers or {}).items() if other != name})
    for body in smaller_values(case.body):
        yield dataclasses.replace(case, body=body)


def smaller_values(value: Any) -> Iterator[Any]:
    """Yield the value with a part of it left out, large parts first."""
    if isinstance(value, dict):
        for name in value:
            yield {other: told for other, told in value.items() if other != name}
        for name, told in value.items():
            yield from ({**value, name: smaller} for smaller in smaller_values(told))
    elif isinstance(value, list):
        yield from _halves(value)
        if len(value) <= 8:
            for at, item in enumerate(value):
                yield from ([*value[:at], smaller, *value[at + 1 :]] for smaller in smaller_values(item))
    elif isinstance(value, str | bytes):
        yield from _halves(value)


def _halves(value: Any) -> Iterator[Any]:
    """Yield a sequence without one of its halves, then quarters, and so on to single items."""
    size = len(value) // 2 if len(value) > 1 else len(value)
    while size:
        for at in range(0, len(value), size):
            yield value[:at] + value[at + size :]
        size //= 2
