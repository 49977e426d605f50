"""Requests while ranks of a lookahead-parallel group die or stop: is every output right, how long is the pause, when is all well?

python -m experiments.faults ranks --prompts FILE.jsonl [--runs 20] [--signal KILL STOP]

``outrider serve`` runs twice: first with plain decoding, for the texts that are right, greedy and seeded ones by turns; then as
one group of ranks. In each run four requests stream at once, and when a random share of their text has come, a random rank, the
leader among them, gets the signal. The next run begins when ``/health`` says again that all ranks are there.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster.cli.generate.prompt_file import PromptFileError, read_prompts
from configs.schema import find_model
from engine.text.tokenizer import load_tokenizer
from experiments.bench import run as bench
from experiments.bench.options import add_model
from experiments.bench.record import spread
from experiments.bench.workloads import fitting_records
from experiments.service.asks import Answer, Ask, play
from experiments.service.served import Served, served

TOGETHER = 4  # requests in flight
_TEMPERATURE = 0.8
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


def measure(args: argparse.Namespace, run: bench.Run) -> bench.Results:
    """Plain decoding for the texts that are right, then a group of which one rank after the other gets a signal."""
    model = find_model(args.model)
    asks = read_asks(model, args)
    common = [
        f"model.dtype={args.dtype}", f"model.max_model_len={args.context}", "model.threads=1", "server.cpus_per_replica=0.5",
    ]  # fmt: skip
    right = right_texts(model, [*common, "speculation.strategy=autoregressive", "cache.enabled=false"], asks)
    group = [
        *common, "tenancy.anonymous=local", "parallelism.mode=lookahead", f"parallelism.world_size={args.world_size}",
        f"parallelism.rank_timeout_s={args.rank_timeout}",
    ]  # fmt: skip
    rng, runs = random.Random(args.seed), []
    with served(model, group) as server:
        trial = Trial(server, Path(model).name, args.world_size, args.timeout)
        calm_s, same = undisturbed(trial, asks[:TOGETHER], right)
        for at, name in enumerate(name for name in args.signal for _ in range(args.runs)):
            part = slice(at % args.runs * TOGETHER, (at % args.runs + 1) * TOGETHER)
            runs.append(trial.disturb(asks[part], right[part], name, rng))
            run.progress.say(f"{name} {at % args.runs + 1} of {args.runs}: {shown(runs[-1])}")
    return {
        "undisturbed": {"identical": same, "of": TOGETHER, "pause_s": round(calm_s, 3)},
        "summary": {name: summary([run for run in runs if run.signal == name]) for name in args.signal},
        "runs": [asdict(run) for run in runs],
    }


def read_asks(model: str, args: argparse.Namespace) -> list[Ask]:
    """Four requests a run, every second one sampled; prompts come again where the file has too few.

    Raises:
        PromptFileError: the file cannot be read, or has fewer than four prompts that fit.
        ModelLoadError: the model has no tokenizer.
    """
    tokenizer = load_tokenizer(model)
    fitting = fitting_records(read_prompts(args.prompts), tokenizer, args.context - args.max_tokens)
    prompts = [record.prompt for record, _ in fitting]
    if len(prompts) < TOGETHER:
        raise PromptFileError(f"{args.prompts} has {len(prompts)} prompts that fit, {TOGETHER} are needed")
    many = args.runs * TOGETHER
    return [streaming(prompts[at % len(prompts)], _TEMPERATURE * (at % 2), at, args.max_tokens) for at in range(many)]


def right_texts(model: str, settings: Sequence[str], asks: Sequence[Ask]) -> list[str]:
    """The texts of plain decoding on one replica. Raises RuntimeError when a request fails."""
    texts: list[str] = []
    with served(model, settings) as server:
        for at in range(0, len(asks), TOGETHER):
            part = asks[at : at + TOGETHER]
            answers = asyncio.run(ask_all(server.url, Path(model).name, part))
            failed = [answer.error for answer in answers if answer.error is not None]
            if failed:
                raise RuntimeError(f"plain decoding failed: {failed[0]}")
            texts += [answer.texts[0] for answer in answers]
    return texts


def undisturbed(trial: Trial, asks: Sequence[Ask], right: Sequence[str]) -> tuple[float, int]:
    """The longest pause of any request while nothing is wrong, and how many texts are right."""
    answers = asyncio.run(ask_all(trial.server.url, trial.model, asks))
    same = sum(answer.texts.get(0) == text for answer, text in zip(answers, right, strict=False))
    return max(answer.pause_s(0.0) for answer in answers), same


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Outputs that are right, and the times, for the followers, the leader and both together."""
    parts = {"all": runs} | {role: [run for run in runs if run.victim == role] for role in ("follower", "leader")}
    return {
        name: {
            "runs": len(part),
            "identical": sum(run.identical for run in part),
            "of": len(part) * TOGETHER,
            **{key: spread(_known(part, key)) for key in ("pause_s", "noticed_s", "recovered_s")},
        }
        for name, part in parts.items()
        if part
    }


def _known(runs: Sequence[Run], key: str) -> list[float]:
    return [value for run in runs if (value := getattr(run, key)) is not None]


def shown(run: Run) -> str:
    """A line of progress."""
    times = f"pause {run.pause_s:.2f} s, noticed after {run.noticed_s} s, all there after {run.recovered_s} s"
    return f"{run.victim} at {run.share:.0%}, {run.identical} of {TOGETHER} right, {times}{'; '.join(('', *run.errors))}"


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_model(parser, "float32")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with prompt")
    parser.add_argument("--runs", type=int, default=20, help="of each signal, with four requests in flight")
    parser.add_argument("--signal", nargs="+", choices=sorted(SIGNALS), default=["KILL", "STOP"])
    parser.add_argument("--world-size", type=int, default=3, help="ranks of the group, the leader among them")
    parser.add_argument("--rank-timeout", type=float, default=2.0, help="seconds after which a silent rank is lost")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an output")
    parser.add_argument("--context", type=int, default=2048, help="of the model; longer prompts are left out")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds after which a run is taken for a hang")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")


def other(results: bench.Results, args: argparse.Namespace) -> list[str]:
    """Outputs that are not plain decoding's."""
    counts = [results["undisturbed"]["identical"], *(run["identical"] for run in results["runs"])]
    wrong = len(counts) * TOGETHER - sum(counts)
    return [f"{wrong} of {len(counts) * TOGETHER} outputs are not plain decoding's"] if wrong else []


BENCH = bench.Bench("rank-faults", __doc__ or "", measure, options, {"runs": 1, "world_size": 2, "max_tokens": 1}, wrong=other)
