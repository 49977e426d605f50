"""Clients that stream a day's requests over HTTP and note answers and times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from outrider.experiments.rag.traffic import PAIRED, Asked
from outrider.experiments.service.asks import Ask, ask

WARM_UP = "warm-up"  # tenant of a server's first requests
_TIMEOUT_S = 300.0
_SETTLES_S, _QUIET, _QUIET_PERCENT = 90.0, 8, 20.0  # time limit; required seconds with at most this load of all cores
_WARMING = Asked("", 0, "new", "bank", 0, ("The library opens at nine. On Sundays it stays closed.",), ("When does it open?",))


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to a request, and its times."""

    kind: str
    text: str
    seconds: float  # of the whole request
    first_s: float  # to the first text
    tokens: int
    prompt_tokens: int
    cached_tokens: int  # of the prompt
    error: str | None


def api_key(tenant: str) -> str:
    """Return the API key of a tenant of an experiment's server."""
    return f"outrider-rag-{tenant}"


def pair_tenants(pairs: int) -> list[str]:
    """Return the tenants of ``Users.play_pairs``."""
    return ["stranger", *(f"{way}-{number}" for number in range(pairs) for way in ("cold", "warm"))]


@dataclass(frozen=True, slots=True)
class Users:
    """Clients of a server."""

    client: httpx.AsyncClient  # with the server as its base URL
    model: str
    max_tokens: int  # of an answer; reports and edits may have a third more
    references: bool  # whether documents are also sent as ``reference_documents``

    async def ask(self, asked: Asked, tenant: str, answers: Mapping[str, str]) -> Told:
        """Send a request with a tenant's key; ``answers`` holds those of the earlier requests in ``asked.earlier``."""
        most = self.max_tokens * 4 // 3 if asked.kind in ("report", "edit") else self.max_tokens
        body: dict[str, Any] = {"messages": asked.messages(answers), "max_tokens": most, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.references:
            body["reference_documents"] = asked.documents
        first: list[float] = []
        headers, began = {"Authorization": f"Bearer {api_key(tenant)}"}, time.monotonic()

        def came(text: str) -> None:
            if text and not first:
                first.append(time.monotonic() - began)

        answer = await ask(self.client, self.model, Ask(asked.kind, "chat/completions", body), came, headers)
        seconds, usage = time.monotonic() - began, answer.usage
        return Told(
            asked.kind, answer.texts.get(0, ""), seconds, first[0] if first else seconds, usage.get("completion_tokens", 0),
            usage.get("prompt_tokens", 0), (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0, answer.error,
        )  # fmt: skip

    async def settled(self) -> None:
        """Wait until the server computes nothing: after its first answers this project's measures the times of its steps."""
        deadline, quiet = time.monotonic() + _SETTLES_S, 0
        await asyncio.to_thread(psutil.cpu_percent)
        while quiet < _QUIET and time.monotonic() < deadline:
            await asyncio.sleep(1.0)
            quiet = quiet + 1 if psutil.cpu_percent() < _QUIET_PERCENT else 0

    async def play(
        self, day: Sequence[Asked], clients: int, seconds: float, note: Callable[[str], None]
    ) -> tuple[dict[str, Told], float]:
        """Play a day: each client sends the next request when it is due and the client's last one is answered.

        A day of 0 ``seconds`` has all requests due at once.

        Returns:
            The answers by key, and the seconds from the first request to the last answer.
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
        """Send the second request of each pair cold and warm: for a tenant without requests, and for one that sent the first.

        Of ``other_tenant`` a third tenant sent the first. The order of cold and warm alternates among the pairs of a kind.

        Returns:
            The answers by tenant: ``cold-0``, ``warm-0``, ``cold-1``, ...

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


@asynccontextmanager
async def users_of(url: str, model: str, max_tokens: int, references: bool, warm_up: int) -> AsyncIterator[Users]:
    """Yield users of the server at an address, after ``warm_up`` concurrent requests that take the cost of first requests."""
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as client:
        found = Users(client, model, max_tokens, references)
        await asyncio.gather(*(found.ask(_WARMING, WARM_UP, {}) for _ in range(warm_up)))
        yield found
