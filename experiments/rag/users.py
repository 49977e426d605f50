"""Those who ask: they play a day over HTTP, in streams, and note what they were told, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from experiments.rag.traffic import PAIRED, Asked
from experiments.service.asks import Ask, ask

WARM_UP = "warm-up"  # the tenant of a server's first requests
_LONG = {"report", "edit"}  # kinds whose answers may have a third more tokens
_TIMEOUT_S = 300.0
_SETTLES_S, _QUIET, _QUIET_PERCENT = 90.0, 8, 20.0  # at most; seconds in a row at so little of all cores
_WARMING = Asked("", 0, "new", "bank", 0, ("The library opens at nine. On Sundays it stays closed.",), ("When does it open?",))


@dataclass(frozen=True, slots=True)
class Told:
    """What came of a request."""

    kind: str
    text: str
    seconds: float  # from its sending to its end
    first_s: float  # to its first text
    tokens: int
    prompt_tokens: int
    cached_tokens: int  # of the prompt
    error: str | None


def api_key(tenant: str) -> str:
    """Of a tenant of an experiment's own server."""
    return f"outrider-rag-{tenant}"


class Users:
    """Clients of a server."""

    def __init__(self, client: httpx.AsyncClient, model: str, max_tokens: int, references: bool) -> None:
        """
        Args:
            client: with the server as its base.
            model: its name.
            max_tokens: of an answer; reports and edits may have a third more.
            references: whether documents go along as ``reference_documents``, too.
        """
        self._client, self._model, self._max_tokens, self._references = client, model, max_tokens, references

    async def ask(self, asked: Asked, tenant: str, answers: Mapping[str, str]) -> Told:
        """One request, by a tenant's key.

        Args:
            asked: the request.
            tenant: who asks.
            answers: of the requests before it, see ``Asked.messages``.
        """
        most = self._max_tokens * 4 // 3 if asked.kind in _LONG else self._max_tokens
        body: dict[str, Any] = {"messages": asked.messages(answers), "max_tokens": most, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self._references:
            body["reference_documents"] = asked.documents
        first: list[float] = []
        headers, began = {"Authorization": f"Bearer {api_key(tenant)}"}, time.monotonic()

        def came(text: str) -> None:
            if text and not first:
                first.append(time.monotonic() - began)

        answer = await ask(self._client, self._model, Ask(asked.kind, "chat/completions", body), came, headers)
        seconds, usage = time.monotonic() - began, answer.usage
        return Told(
            asked.kind, answer.texts.get(0, ""), seconds, first[0] if first else seconds, usage.get("completion_tokens", 0),
            usage.get("prompt_tokens", 0), (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0, answer.error,
        )  # fmt: skip

    async def warm_up(self, count: int) -> None:
        """So many requests at once, for what only a server's first requests wait for."""
        await asyncio.gather(*(self.ask(_WARMING, WARM_UP, {}) for _ in range(count)))

    async def settled(self) -> None:
        """Waits until a server computes nothing: after its first answers ours measures how long its steps take."""
        deadline, quiet = time.monotonic() + _SETTLES_S, 0
        await asyncio.to_thread(psutil.cpu_percent)
        while quiet < _QUIET and time.monotonic() < deadline:
            await asyncio.sleep(1.0)
            quiet = quiet + 1 if psutil.cpu_percent() < _QUIET_PERCENT else 0

    async def play(
        self, day: Sequence[Asked], clients: int, seconds: float, note: Callable[[str], None]
    ) -> tuple[dict[str, Told], float]:
        """A day: so many at a time ask, each when the next request is due and it has its answer.

        Args:
            day: in the order of their coming.
            clients: how many ask.
            seconds: the length of the day; 0: all is due at once.
            note: is told how far it is.

        Returns:
            What they were told, by key, and the seconds from the first request to the last answer.
        """
        loop, left, told = asyncio.get_running_loop(), iter(day), dict[str, Told]()
        answers: dict[str, asyncio.Future[str]] = {asked.key: loop.create_future() for asked in day}
        began = time.monotonic()

        async def client() -> None:
            for asked in left:
                await asyncio.sleep(began + asked.at * seconds - time.monotonic())
                earlier = {key: await answers[key] for key in asked.earlier}
                told[asked.key] = await self.ask(asked, asked.tenant, earlier)
                answers[asked.key].set_result(told[asked.key].text)
                note(f"{len(told)} of {len(day)} requests")

        await asyncio.gather(*(client() for _ in range(clients)))
        return told, time.monotonic() - began

    async def play_pairs(self, pairs: Sequence[tuple[Asked, Asked]], note: Callable[[str], None]) -> dict[str, Told]:
        """The second request of each pair, cold and warm: by a tenant that has had nothing, and by one that has had the first.

        Of ``other_tenant`` a third one has had the first. Which of the two asks first changes from pair to pair of a kind.

        Returns:
            What they were told, by the tenant: ``cold-0``, ``warm-0``, ``cold-1``, ...

        Raises:
            RuntimeError: a request failed.
        """
        told: dict[str, Told] = {}
        for number, (first, second) in enumerate(pairs):
            cold, warm = f"cold-{number}", f"warm-{number}"
            before = await self.ask(first, "stranger" if second.kind == "other_tenant" else warm, {})
            for tenant in (warm, cold) if number // len(PAIRED) % 2 else (cold, warm):
                told[tenant] = await self.ask(second, tenant, {first.key: before.text})
                if told[tenant].error or before.error:
                    raise RuntimeError(f"a request of pair {number + 1} failed: {before.error or told[tenant].error}")
            note(f"pair {number + 1} of {len(pairs)}")
        return told


def pair_tenants(pairs: int) -> list[str]:
    """The tenants of ``Users.play_pairs``."""
    return ["stranger", *(f"{way}-{number}" for number in range(pairs) for way in ("cold", "warm"))]


@asynccontextmanager
async def users_of(url: str, model: str, max_tokens: int, references: bool, warm_up: int) -> AsyncIterator[Users]:
    """Users of the server at an address, after so many requests at once that warm it up; the others as for ``Users``."""
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as client:
        found = Users(client, model, max_tokens, references)
        await found.warm_up(warm_up)
        yield found
