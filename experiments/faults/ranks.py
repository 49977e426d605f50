"""Requests while ranks of a lookahead-parallel group die or stop: exactness of outputs, pauses, and times of recovery.

outrider bench faults ranks --prompts FILE.jsonl [--runs 20] [--signal KILL STOP]

``outrider serve`` runs twice: with plain decoding for the expected texts, greedy and seeded ones in turns, and as one group of
ranks. In each run four requests stream at once, and at a random share of their text a random rank, which may be the leader, gets
the signal. The next run begins when ``/health`` reports all ranks again.
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

from outrider.cluster.cli.generate.prompt_file import PromptFileError, read_prompts
from outrider.configs.schema import find_model
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench import run as bench
from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.record import spread
from outrider.experiments.bench.workloads import fitting_records
from outrider.experiments.service.asks import Answer, Ask, play
from outrider.experiments.service.served import Served, served

TOGETHER = 4  # requests in flight
LEADER, FOLLOWER = "ray::ServeReplica:outrider:engine", "ray::RankActor"  # titles of their processes
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
_RANK_TIMEOUT_S = 2.0  # after which the group replaces a silent rank
_HANG_S = 240.0  # time limit of a run
_CONTEXT = 2048  # tokens of prompt and output
_TEMPERATURE, _POLL_S, _SEED = 0.8, 0.05, 0


@dataclass(frozen=True, slots=True)
class Run:
    """The effects of a signal."""

    signal: str
    victim: str  # leader or follower
    share: float  # of the text before the signal
    identical: int  # number of requests with the expected text
    errors: tuple[str, ...]
    pause_s: float  # the longest of any request
    noticed_s: float | None  # from the signal until /health reports a fault
    recovered_s: float | None  # from the signal until /health reports all ranks again


def streaming(prompt: str, temperature: float, seed: int, max_tokens: int) -> Ask:
    """Return a streaming chat of exactly ``max_tokens`` tokens; greedy at temperature 0."""
    said = {"messages": [{"role": "user", "content": prompt}], "temperature": temperature, "seed": seed}
    return Ask("chat", "chat/completions", {**said, "max_tokens": max_tokens, "stream": True, "ignore_eos": True})


async def ask_all(url: str, model: str, asks: Sequence[Ask], came: Callable[[str], None] = lambda text: None) -> list[Answer]:
    """Stream some requests at once; ``came`` is called with each piece of text."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        return (await play(client, model, asks, len(asks), came))[0]


@dataclass(frozen=True, slots=True)
class Trial:
    """The group that is disturbed."""

    server: Served
    model: str
    world: int

    async def disturb(self, asks: Sequence[Ask], right: Sequence[str], name: str, rng: random.Random) -> Run:
        """Stream requests and send the signal to a rank.

        Args:
            asks: requests that are streamed at once.
            right: their expected texts.
            name: of the signal.
            rng: draws the victim and the moment.

        Raises:
            TimeoutError: requests hang, or ranks do not come back.
            RuntimeError: the number of ranks is wrong, or a stopped rank was not ended.
        """
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

        try:
            async with asyncio.timeout(_HANG_S):
                asking = asyncio.create_task(ask_all(self.server.url, self.model, asks, came))
                await sent.wait()
                noticed_s, recovered_s = await self._watch(at_s)
                answers = await asking
        except TimeoutError:
            raise TimeoutError(f"SIG{name}: not all requests done and ranks back within {_HANG_S:g} s") from None
        if victim.is_running() and victim.status() == psutil.STATUS_STOPPED:
            victim.kill()
            raise RuntimeError(f"process {victim.pid} was left behind, stopped: the group must end a rank that it replaces")
        errors = tuple(answer.error for answer in answers if answer.error is not None)
        pause_s = max(answer.pause_s(at_s) for answer in answers)
        role = "follower" if rank else "leader"
        return Run(name, role, round(share, 3), same_texts(answers, right), errors, round(pause_s, 3), noticed_s, recovered_s)

    def victim(self, rank: int) -> psutil.Process:
        """Return the leader's process for rank 0, else a follower's."""
        leaders, followers = self.server.processes(LEADER), self.server.processes(FOLLOWER)
        if len(leaders) != 1 or len(followers) != self.world - 1:
            raise RuntimeError(f"found {len(leaders)} leaders and {len(followers)} followers in a group of {self.world}")
        return followers[rank - 1] if rank else leaders[0]

    async def _watch(self, since: float) -> tuple[float, float]:
        """Return the seconds until ``/health`` reports a fault, and until it reports none."""
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


def same_texts(answers: Sequence[Answer], right: Sequence[str]) -> int:
    """Return the number of answers with the expected text."""
    return sum(answer.texts.get(0) == text for answer, text in zip(answers, right, strict=True))


def measure(args: argparse.Namespace, run: bench.Run) -> bench.Results:
    """Run plain decoding for the expected texts, then a group whose ranks get signals."""
    model = find_model(args.model)
    asks = read_asks(model, args)
    common = [f"model.dtype={args.dtype}", f"model.max_model_len={_CONTEXT}", "model.threads=1", "server.cpus_per_replica=0.5"]
    right = right_texts(model, [*common, "speculation.strategy=autoregressive", "cache.enabled=false"], asks)
    group = [
        *common, "tenancy.anonymous=local", "parallelism.mode=lookahead", f"parallelism.world_size={args.world_size}",
        f"parallelism.rank_timeout_s={_RANK_TIMEOUT_S}",
    ]  # fmt: skip
    rng, runs = random.Random(_SEED), []
    with served(model, group) as server:
        trial = Trial(server, Path(model).name, args.world_size)
        calm = asyncio.run(ask_all(server.url, trial.model, asks[:TOGETHER]))
        for name in args.signal:
            for at in range(args.runs):
                part = slice(at * TOGETHER, (at + 1) * TOGETHER)
                runs.append(asyncio.run(trial.disturb(asks[part], right[part], name, rng)))
                run.progress.say(f"{name} {at + 1} of {args.runs}: {runs[-1]}")
    return {
        "undisturbed": {
            "identical": same_texts(calm, right[:TOGETHER]), "of": TOGETHER,
            "pause_s": round(max(answer.pause_s(0.0) for answer in calm), 3),
        },
        "summary": {name: summary([run for run in runs if run.signal == name]) for name in args.signal},
        "runs": [asdict(run) for run in runs],
    }  # fmt: skip


def read_asks(model: str, args: argparse.Namespace) -> list[Ask]:
    """Return four requests per run, every second one sampled; prompts are repeated if the file has too few.

    Raises:
        PromptFileError: the file cannot be read, or has fewer than four prompts that fit.
        ModelLoadError: the model has no tokenizer.
    """
    fitting = fitting_records(read_prompts(args.prompts), load_tokenizer(model), _CONTEXT - args.max_tokens)
    prompts = [record.prompt for record, _ in fitting]
    if len(prompts) < TOGETHER:
        raise PromptFileError(f"{args.prompts} has {len(prompts)} prompts that fit, {TOGETHER} are needed")
    many = args.runs * TOGETHER
    return [streaming(prompts[at % len(prompts)], _TEMPERATURE * (at % 2), at, args.max_tokens) for at in range(many)]


def right_texts(model: str, settings: Sequence[str], asks: Sequence[Ask]) -> list[str]:
    """Return the texts of plain decoding on one replica; ``RuntimeError`` if a request fails."""
    texts: list[str] = []
    with served(model, settings) as server:
        for at in range(0, len(asks), TOGETHER):
            answers = asyncio.run(ask_all(server.url, Path(model).name, asks[at : at + TOGETHER]))
            failed = [answer.error for answer in answers if answer.error is not None]
            if failed:
                raise RuntimeError(f"plain decoding failed: {failed[0]}")
            texts += [answer.texts[0] for answer in answers]
    return texts


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Count identical outputs and summarize the times, for followers, the leader and both together."""
    parts = {"all": runs} | {role: [run for run in runs if run.victim == role] for role in ("follower", "leader")}
    times = ("pause_s", "noticed_s", "recovered_s")
    return {
        name: {
            "runs": len(part), "identical": sum(run.identical for run in part), "of": len(part) * TOGETHER,
            **{key: spread([value for run in part if (value := getattr(run, key)) is not None]) for key in times},
        }
        for name, part in parts.items() if part
    }  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "float32")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with prompt")
    parser.add_argument("--runs", type=int, default=20, help="runs per signal, with four requests in flight")
    parser.add_argument("--signal", nargs="+", choices=sorted(SIGNALS), default=["KILL", "STOP"])
    parser.add_argument("--world-size", type=int, default=3, help="ranks of the group, including the leader")
    parser.add_argument("--max-tokens", type=int, default=160, help="tokens per output")


def other(results: bench.Results, args: argparse.Namespace) -> list[str]:
    """Return the number of outputs that differ from plain decoding."""
    counts = [results["undisturbed"]["identical"], *(run["identical"] for run in results["runs"])]
    wrong = len(counts) * TOGETHER - sum(counts)
    return [f"{wrong} of {len(counts) * TOGETHER} outputs are not plain decoding's"] if wrong else []


BENCH = bench.Bench("rank-faults", __doc__ or "", measure, options, {"runs": 1, "world_size": 2, "max_tokens": 1}, wrong=other)
