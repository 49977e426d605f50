"""What the way from the engine to a client costs: time to the first token and tokens per second, at one request at a time.

python -m experiments.service overhead [--rounds 3] [--requests 60]

Each round starts ``outrider serve`` afresh, in turns: with Serve's HAProxy, with its Python proxy, and with HAProxy and each kind
of ``server.stream_guard``. Every request is streamed; between two of them ``/metrics`` is read, so that the engine's own times of
just this request are known. The time that the client saw, less the engine's, is what lies between them.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from configs.schema import find_model
from engine.environment import environment
from experiments.bench.options import add_model, add_settings
from experiments.bench.run import Bench, Results, Run
from experiments.service.asks import make_prompt
from experiments.service.served import ENGINE_SECONDS, engine_seconds, served, spread

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"  # Ray's own switch
MODES = {  # value of that, settings of the server
    "haproxy": ("1", ()),
    "serve": ("0", ()),
    "pad": ("1", ("server.stream_guard=pad",)),
    "cadence": ("1", ("server.stream_guard=cadence",)),
    "both": ("1", ("server.stream_guard=both",)),
}
GOAL_TTFT_MS, GOAL_RATE = 10.0, 0.95
_WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Timed:
    """One request, as the client and the engine saw it; seconds."""

    tokens: int
    first_s: float
    whole_s: float
    engine_first_s: float
    engine_whole_s: float
    engine_decode_s: float
    events: int
    received: int  # bytes

    @property
    def added_first_ms(self) -> float:
        """What came on top of the engine's time to the first token."""
        return 1e3 * (self.first_s - self.engine_first_s)

    @property
    def rate(self) -> float:
        """Tokens per second of the whole request over the engine's."""
        return self.engine_whole_s / self.whole_s

    @property
    def decode_rate(self) -> float:
        """The same after the first token."""
        return self.engine_decode_s / (self.whole_s - self.first_s)


def run_modes(args: argparse.Namespace, run: Run) -> Results:
    """All modes, round by round."""
    model = find_model(args.model)
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.mode}
    for number in range(args.rounds):
        for mode in args.mode[:: 1 if number % 2 == 0 else -1]:
            proxy, settings = MODES[mode]
            with (
                environment(HAPROXY, proxy),
                served(model, [f"model.dtype={args.dtype}", "model.threads=1", *settings, *args.set]) as server,
            ):
                timed = list(measure(server.url, Path(model).name, args, number))
            runs[mode].append(summary(timed))
            run.progress.say(f"round {number + 1} of {args.rounds}, {mode}: {runs[mode][-1]}")
    modes = {mode: {"median": medians(rounds), "rounds": rounds} for mode, rounds in runs.items()}
    return {"goals": {"added_ttft_ms_p50": GOAL_TTFT_MS, "rate_p50": GOAL_RATE}, "modes": modes}


def measure(url: str, model: str, args: argparse.Namespace, number: int) -> Iterator[Timed]:
    """Requests one after the other, after some to warm up.

    Args:
        url: of the server, which has one replica and nobody else to serve.
        model: its name.
        args: the command line.
        number: of the round; the same prompts come in each mode of it.
    """
    at, rng = urlsplit(url), random.Random(args.seed + number)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=120)
    with contextlib.closing(connection):
        before = engine_seconds(connection)
        for turn in range(_WARM_UP + args.requests):
            body = {
                "model": model, "messages": [{"role": "user", "content": make_prompt(rng)}], "temperature": 0, "stream": True,
                "max_tokens": args.max_tokens, "ignore_eos": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            first_s, whole_s, events, tokens, received = stream(connection, body)
            after = engine_seconds(connection)
            engine_first_s, engine_whole_s, engine_decode_s = (after[name] - before[name] for name in ENGINE_SECONDS)
            before = after
            if turn >= _WARM_UP:
                yield Timed(tokens, first_s, whole_s, engine_first_s, engine_whole_s, engine_decode_s, events, received)


def stream(connection: http.client.HTTPConnection, body: Mapping[str, Any]) -> tuple[float, float, int, int, int]:
    """One streamed chat: seconds to the first text and to the end of it, events with text, tokens by the usage, and bytes.

    Raises:
        RuntimeError: it is refused, or has no text.
    """
    events, tokens, received, first_s, last_s = 0, 0, 0, 0.0, 0.0
    data = json.dumps(body)
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read().decode()[:300]}")
    while line := response.readline():
        at_s = time.perf_counter() - began
        received += len(line)
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        if event["choices"] and event["choices"][0]["delta"].get("content"):
            events, last_s, first_s = events + 1, at_s, first_s or at_s
    if events < 2:
        raise RuntimeError(f"a stream of {body['max_tokens']} tokens had {events} events with text: ask for more tokens")
    return first_s, last_s, events, tokens, received


def summary(timed: Sequence[Timed]) -> dict[str, Any]:
    """The figures of one round."""
    return {
        "requests": len(timed),
        "added_ttft_ms": spread([each.added_first_ms for each in timed]),
        "ttft_ms": spread([1e3 * each.first_s for each in timed]),
        "engine_ttft_ms": spread([1e3 * each.engine_first_s for each in timed]),
        "rate_p50": round(float(np.median([each.rate for each in timed])), 4),
        "decode_rate_p50": round(float(np.median([each.decode_rate for each in timed])), 4),
        "engine_tokens_per_s_p50": round(float(np.median([each.tokens / each.engine_whole_s for each in timed])), 1),
        "bytes_per_token": round(sum(each.received for each in timed) / sum(each.tokens for each in timed), 1),
        "tokens_per_event": round(sum(each.tokens for each in timed) / sum(each.events for each in timed), 2),
    }


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure over the rounds."""
    return {
        name: medians([each[name] for each in rounds])
        if isinstance(value, Mapping)
        else round(float(np.median([each[name] for each in rounds])), 4)
        for name, value in rounds[0].items()
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_model(parser, "bfloat16")
    modes = list(MODES)
    parser.add_argument("--mode", nargs="+", choices=modes, default=modes, help="what is served through, the judged one first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60, help="of a round, in each mode")
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    add_settings(parser)


def missed(results: Results, args: argparse.Namespace) -> list[str]:
    """The goals that the first mode misses."""
    judged = results["modes"][args.mode[0]]["median"]
    added, rate = judged["added_ttft_ms"]["p50"], judged["rate_p50"]
    late = [f"{added:.1f} ms come on top of the engine's time to the first token"] if added > GOAL_TTFT_MS else []
    return late + ([f"{rate:.2f} of the engine's tokens per second"] if rate < GOAL_RATE else [])


BENCH = Bench("service-overhead", __doc__ or "", run_modes, options, {"rounds": 1, "requests": 1, "max_tokens": 8}, wrong=missed)
