"""Requests of a served group of ranks while one of its processes gets a signal: what clients see, and what ``/health`` says."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import psutil

from experiments.service.asks import Answer, Ask, play
from experiments.service.served import Served

LEADER, FOLLOWER = "ray::ServeReplica:outrider:engine", "ray::RankActor"  # titles of their processes
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """What a signal did."""

    signal: str
    victim: str  # leader or follower
    share: float  # of the text that had come
    identical: int  # of the requests
    errors: tuple[str, ...]
    pause_s: float  # the longest of any request
    noticed_s: float | None  # from the signal until /health says so
    recovered_s: float | None  # until /health says that all are there again


def streaming(prompt: str, temperature: float, seed: int, max_tokens: int) -> Ask:
    """A chat of so many tokens, in events; greedy at temperature 0."""
    said = {"messages": [{"role": "user", "content": prompt}], "temperature": temperature, "seed": seed}
    return Ask("chat", "chat/completions", {**said, "max_tokens": max_tokens, "stream": True, "ignore_eos": True})


async def ask_all(url: str, model: str, asks: Sequence[Ask], came: Callable[[str], None] = lambda text: None) -> list[Answer]:
    """Streams some requests at once; ``came`` is called with each piece of text."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return (await play(client, model, asks, len(asks), came))[0]


@dataclass(frozen=True, slots=True)
class Trial:
    """The group that is disturbed, and what is right."""

    server: Served
    model: str
    world: int
    timeout_s: float

    def disturb(self, asks: Sequence[Ask], right: Sequence[str], name: str, rng: random.Random) -> Run:
        """One run.

        Args:
            asks: to be streamed at once.
            right: their texts.
            name: of the signal.
            rng: draws the victim and the moment.

        Raises:
            TimeoutError: requests hang, or ranks do not come back.
            RuntimeError: there are other ranks than there should be, or one was left behind.
        """
        try:
            return asyncio.run(asyncio.wait_for(self._disturb(asks, right, name, rng), self.timeout_s))
        except TimeoutError:
            raise TimeoutError(f"SIG{name}: not all requests done and ranks back within {self.timeout_s:g} s") from None

    async def _disturb(self, asks: Sequence[Ask], right: Sequence[str], name: str, rng: random.Random) -> Run:
        share, rank = rng.uniform(0.02, 0.9), rng.randrange(self.world)
        victim = self.victim(rank)
        total, come, sent = sum(map(len, right)), 0, asyncio.Event()
        at_s = 0.0

        def came(text: str) -> None:
            nonlocal come, at_s
            come += len(text)
            if come >= share * total and not sent.is_set():
                at_s = time.monotonic()
                victim.send_signal(SIGNALS[name])
                sent.set()

        asking = asyncio.create_task(ask_all(self.server.url, self.model, asks, came))
        await sent.wait()
        noticed_s, recovered_s = await self._watch(at_s)
        answers = await asking
        if victim.is_running() and victim.status() == psutil.STATUS_STOPPED:
            victim.kill()
            raise RuntimeError(f"process {victim.pid} was left behind, stopped: the group must end who it replaces")
        errors = tuple(answer.error for answer in answers if answer.error is not None)
        identical = sum(answer.texts.get(0) == text for answer, text in zip(answers, right, strict=True))
        pause_s = max(answer.pause_s(at_s) for answer in answers)
        role = "follower" if rank else "leader"
        return Run(name, role, round(share, 3), identical, errors, round(pause_s, 3), noticed_s, recovered_s)

    def victim(self, rank: int) -> psutil.Process:
        """The leader's process for 0, else one of the followers'."""
        leaders, followers = self.server.processes(LEADER), self.server.processes(FOLLOWER)
        if len(leaders) != 1 or len(followers) != self.world - 1:
            raise RuntimeError(f"found {len(leaders)} leaders and {len(followers)} followers in a group of {self.world}")
        return followers[rank - 1] if rank else leaders[0]

    async def _watch(self, since: float) -> tuple[float, float]:
        """Seconds until ``/health`` says that something is wrong, and until it says that nothing is."""
        noticed: float | None = None
        async with httpx.AsyncClient(base_url=self.server.url, timeout=30.0) as client:
            while True:
                well = await _is_well(client)
                now = round(time.monotonic() - since, 3)
                if noticed is None and not well:
                    noticed = now
                elif noticed is not None and well:
                    return noticed, now
                await asyncio.sleep(_POLL_S)


async def _is_well(client: httpx.AsyncClient) -> bool:
    try:
        answer = await client.get("/health")
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and answer.json()["status"] == "ok"
