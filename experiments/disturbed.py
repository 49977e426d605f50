"""Requests of a served group of ranks while one of its processes gets a signal: what clients see, and what ``/health`` says."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import psutil
from openai import AsyncOpenAI, OpenAIError

from experiments.served import Served

LEADER, FOLLOWER = "ray::ServeReplica:outrider:engine", "ray::RankActor"  # titles of their processes
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, greedy at temperature 0."""

    prompt: str
    temperature: float
    seed: int


@dataclass(slots=True)
class Heard:
    """What a client got."""

    text: str = ""
    finish: str | None = None
    error: str | None = None
    times: list[float] = field(default_factory=list)  # time.monotonic of each piece, the beginning first

    def pause_s(self, since: float) -> float:
        """The longest time without a piece that ended after ``since``; 0 for who had everything by then."""
        return max((later - at for at, later in zip(self.times, self.times[1:], strict=False) if later > since), default=0.0)


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


async def ask_all(url: str, model: str, asks: Sequence[Ask], max_tokens: int, came: Callable[[str], None]) -> list[Heard]:
    """Streams some requests at once; ``came`` is called with each piece of text."""

    async def one(client: AsyncOpenAI, ask: Ask) -> Heard:
        heard = Heard(times=[time.monotonic()])
        try:
            stream = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": ask.prompt}], max_tokens=max_tokens,
                temperature=ask.temperature, seed=ask.seed, stream=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for chunk in stream:
                heard.times.append(time.monotonic())
                heard.text += chunk.choices[0].delta.content or ""
                heard.finish = chunk.choices[0].finish_reason or heard.finish
                came(chunk.choices[0].delta.content or "")
        except OpenAIError as error:
            heard.error = f"{type(error).__name__}: {error}"
        return heard

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        return list(await asyncio.gather(*(one(client, ask) for ask in asks)))


@dataclass(frozen=True, slots=True)
class Trial:
    """The group that is disturbed, and what is right."""

    server: Served
    model: str
    world: int
    max_tokens: int
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

        asking = asyncio.create_task(ask_all(self.server.url, self.model, asks, self.max_tokens, came))
        await sent.wait()
        noticed_s, recovered_s = await self._watch(at_s)
        answers = await asking
        if victim.is_running() and victim.status() == psutil.STATUS_STOPPED:
            victim.kill()
            raise RuntimeError(f"process {victim.pid} was left behind, stopped: the group must end who it replaces")
        errors = tuple(answer.error for answer in answers if answer.error is not None)
        identical = sum(answer.text == text for answer, text in zip(answers, right, strict=True))
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
