"""Deployments under traffic, one simulation each, as rows of a table."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from cluster.cli.generate.strategy_option import StrategyChoice
from configs.slices import EngineOptions
from decoding.replay import KnownText
from experiments.simulation.cluster import SimulatedCluster, keyed
from experiments.simulation.hardware import find_gpu, find_shape
from experiments.simulation.replica import KnownTarget, SimulatedReplica
from experiments.simulation.search import usd_per_million
from experiments.simulation.steps import Host, Mode, Software, StepTimes, fits, read_curve, step_times


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """How GPUs are used."""

    mode: Mode
    replicas: int
    width: int  # GPUs of a replica
    strategy: StrategyChoice

    @property
    def gpus(self) -> int:
        """Of all replicas."""
        return self.replicas * self.width

    @property
    def label(self) -> str:
        """For tables."""
        one = "1 GPU" if self.width == 1 else f"{self.width} GPUs {self.mode}"
        return f"{self.replicas} x {one}"


class Simulation:
    """Traffic, and deployments that it comes to."""

    def __init__(self, args: argparse.Namespace) -> None:
        """
        Args:
            args: of ``experiments.simulation.command``.

        Raises:
            ValueError: a file, a strategy, a GPU or a model that cannot be used.
        """
        self._args = args
        cutter = TextTokenizer(args.tokenizer)
        texts = {path.stem: read_known_texts(path, cutter, args.max_tokens) for path in args.workloads}
        self.texts: list[tuple[str, KnownText]] = keyed(texts, args.requests or sum(map(len, texts.values())))
        self._context = max(len(text.prompt_ids) + len(text.output_ids) for _, text in self.texts)
        self._vocab_size, self._end_token = cutter.vocab_size, cutter.end_token_id
        self._gpu = None if args.gpu is None else find_gpu(args.gpu)
        self._model = None if args.model is None else find_shape(args.model)
        self._curve = None if args.curve is None else read_curve(args.curve)
        self._software = Software(args.bandwidth_share, args.flops_share, args.launch_us / 1e6)
        self._host = Host(*(value / 1e3 for value in args.host_ms))
        self._options = EngineOptions(max_running=args.max_running, max_waiting=len(self.texts))
        self.usd_per_hour = self._price(args.usd_per_hour)

    def _price(self, asked: float | None) -> float:
        """Of a GPU and hour; nothing for processors that nobody gave a price."""
        if asked is not None or self._gpu is None:
            return asked or 0.0
        if self._gpu.usd_per_hour is None:
            raise ValueError(f"no price of {self._gpu.name} is known: give --usd-per-hour")
        return self._gpu.usd_per_hour

    def deployments(self, choices: Sequence[StrategyChoice]) -> tuple[list[Deployment], list[str]]:
        """All that were asked for, and those that do not fit a GPU's memory by name."""
        found, too_large = [], []
        args = self._args
        for choice, mode, width, replicas in itertools.product(choices, args.mode, args.width, args.replicas):
            one = Deployment(mode if width > 1 else "lookahead", replicas, width, choice)
            if one.gpus > args.max_gpus or one in found:
                continue
            slots, capacity = args.max_running, self._context + args.budget * width
            if self._gpu and self._model and not fits(one.mode, width, self._gpu, self._model, slots, capacity):
                too_large.append(one.label)
                continue
            found.append(one)
        return found, list(dict.fromkeys(too_large))

    def run(self, one: Deployment, rate: float | None, clients: int | None) -> dict[str, Any]:
        """One deployment under one traffic.

        Args:
            one: the deployment.
            rate: requests a second; None with ``clients``.
            clients: that ask one after the other.

        Returns:
            A row of the table. Times are seconds.
        """
        args, times = self._args, self._times(one)
        target = KnownTarget(self._vocab_size, self._end_token, self._context, times.curve)
        replicas = [
            SimulatedReplica(one.strategy, times, target, self._options, args.budget, args.adaptive) for _ in range(one.replicas)
        ]
        lag_s = None if args.lag_ms is None else args.lag_ms / 1e3
        cluster = SimulatedCluster(replicas, lag_s, args.router_ms / 1e3, args.seed)
        if clients is None:
            assert rate is not None, "no traffic"
            found = cluster.open_loop(self.texts, arrivals(rate, len(self.texts), args.burstiness, args.seed))
        else:
            found = cluster.closed_loop(self.texts, clients)
        cost = usd_per_million(one.gpus, self.usd_per_hour, found["tokens_per_s"])
        seconds = {name: _seconds(found[f"{name[:-2]}_ms"]) for name in ("e2e_s", "ttft_s", "tpot_s")}
        return {
            "traffic": f"{rate:g} a second" if clients is None else f"{clients} clients",
            "deployment": one.label,
            "strategy": one.strategy.label,
            "gpus": one.gpus,
            **seconds,
            "tokens_per_s": found["tokens_per_s"],
            "requests_per_s": found["requests_per_s"],
            "tokens_per_step": found["tokens_per_step"],
            "drafted_per_request_step": found["drafted_per_request_step"],
            "busy": found["busy"],
            "usd_per_million": round(cost, 4),
            "requests": found["requests"],
        }

    def _times(self, one: Deployment) -> StepTimes:
        exchange_s = self._args.exchange_ms / 1e3
        if self._curve is not None:
            return StepTimes(one.mode, one.width, self._curve, self._host, exchange_s, bare_share=self._args.prefill_share)
        assert self._gpu is not None and self._model is not None, "neither a curve nor a GPU"
        return step_times(one.mode, one.width, self._gpu, self._model, self._software, self._host, exchange_s)

    def assumptions(self) -> dict[str, Any]:
        """All numbers that the times come from."""
        known = {"gpu": self._gpu, "model": self._model, "software": self._software, "host": self._host}
        told: dict[str, Any] = {
            name: dataclasses.asdict(value)
            for name, value in known.items()
            if value is not None and not (self._curve is not None and name == "software")
        }
        if self._curve is not None:
            told["curve"] = self._curve.to_json()
        return told | {"usd_per_hour": self.usd_per_hour, "context": self._context}


def arrivals(rate: float, count: int, burstiness: float, seed: int) -> list[float]:
    """Seconds at which requests come, with gaps of a gamma law: same seed, same times, stretched by the rate.

    Example: a burstiness of 1 is a Poisson process, whose gaps vary as much as they are long; at 0.25 they vary twice as much, so
    that many come at once and then none for long; at 100 requests come nearly evenly.

    Args:
        rate: requests a second.
        count: of requests.
        burstiness: shape of the law, as in vLLM's ``bench serve``; above 0.
        seed: of the gaps.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def _seconds(milliseconds: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value / 1e3, 5) for name, value in milliseconds.items()}
