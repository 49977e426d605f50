"""Entries of strong scaling: forms of parallelism, and the requests of each to its server."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from outrider.decoding.request import PLAIN
from outrider.experiments.service.served import fresh_sums

TIMEOUT_S = 600.0
_NAMES = {
    "one": "", "threads": "", "lookahead": "LP ", "elastic": "LP elastic ", "tensor": "TP ", "pipeline": "PP ",
    "replicas": "replicas ",
}  # fmt: skip
KINDS = tuple(_NAMES)
COUNTERS = {
    "steps": "outrider:steps_total", "rows": "outrider:step_rows_total", "forward_s": "outrider:forward_seconds_total",
    "exchange_s": "outrider:exchange_seconds_total", "exchange_bytes": "outrider:exchange_bytes_total",
    "decode_s": "vllm:request_decode_time_seconds_sum", "request_steps": "outrider:request_steps_total",
    "tokens": "outrider:tokens_total", "drafted": "outrider:draft_tokens_total",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """A form of parallelism."""

    kind: str  # of ``KINDS``
    workers: int  # further threads of one rank count as workers
    threads: int  # per worker

    @property
    def ranks(self) -> int:
        """Return the number of processes that compute."""
        return 1 if self.kind in ("one", "threads") else self.workers

    @property
    def rank_threads(self) -> int:
        """Return the torch threads of each rank."""
        return self.threads * self.workers // self.ranks

    @property
    def label(self) -> str:
        """Return the name in tables: ``LP 2 x 1`` has two ranks with a thread each."""
        return f"{_NAMES[self.kind]}{self.ranks} x {self.rank_threads}"

    def settings(self) -> list[str]:
        """Return the settings of its server."""
        found = [f"model.threads={self.rank_threads}", f"server.cpus_per_replica={min(0.5, 1 / self.ranks)}"]
        if self.kind in ("elastic", "replicas"):
            found.append(f"server.replicas={self.ranks}")
        if self.kind == "elastic":
            found += ["parallelism.mode=lookahead", "parallelism.world_size=auto", "parallelism.adaptive=false"]
        elif self.kind in ("lookahead", "tensor", "pipeline"):
            found += [f"parallelism.mode={self.kind}", f"parallelism.world_size={self.ranks}", "parallelism.adaptive=false"]
        return found


def forms_of(kinds: Sequence[str], workers: Sequence[int], threads: int, gpus: int | None) -> tuple[list[Form], dict[str, str]]:
    """Return the forms that this machine can run, one worker first, and the reasons of the others.

    ``gpus`` is the number of GPUs to compute on; None to compute on the processor.
    """
    found, skipped = [Form("one", 1, threads)], {}
    for count, kind in itertools.product([count for count in workers if count > 1], KINDS[1:]):
        form = Form(kind, count, threads)
        reason = _missing(form, gpus)
        if kind in kinds and reason is None:
            found.append(form)
        elif kind in kinds:
            skipped[form.label] = reason or ""
    return found, skipped


def _missing(form: Form, gpus: int | None) -> str | None:
    if form.kind == "threads" and gpus is not None:
        return "more threads do not apply to a GPU"
    if gpus is not None and gpus < form.workers:
        return f"this machine has {gpus} GPU{'s' * (gpus != 1)}"
    if form.kind == "tensor" and find_spec("deepspeed") is None:
        return "DeepSpeed is not installed: pip install -e '.[baselines]'"
    return None


@dataclass(frozen=True, slots=True)
class Round:
    """Concurrent requests, their duration, and the engines' counters (see ``COUNTERS``)."""

    requests: int
    tokens: int
    wall_s: float  # from the first request to the last answer, HTTP included
    counts: Mapping[str, float]

    @property
    def decode_rate(self) -> float:
        """Return tokens per second of a request after its first token, by the engine's clock."""
        return (self.tokens - self.requests) / self.counts["decode_s"]


@dataclass(slots=True)
class Entry:
    """A strategy in a form with a number of concurrent requests; a round per repeat by workload.

    Several concurrent requests are from all workloads together, as the single workload ``all``.
    """

    form: Form
    strategy: str
    clients: int = 1
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    differing: int = 0

    @property
    def label(self) -> str:
        """Return the name in tables."""
        at_once = f", {self.clients} at once" if self.clients > 1 else ""
        return f"{self.form.label}, {'plain' if self.strategy == PLAIN else self.strategy}{at_once}"

    def rates(self, workload: str) -> list[float]:
        """Return tokens per second of a request after its first token, for each repeat."""
        return [one.decode_rate for one in self.rounds[workload]]

    @property
    def wall_rates(self) -> list[float]:
        """Return tokens per second of all requests together by the client's clock, for each repeat."""
        repeats = zip(*self.rounds.values(), strict=True)
        return [sum(one.tokens for one in own) / sum(one.wall_s for one in own) for own in repeats]

    def total(self, name: str) -> float:
        """Return a counter of ``COUNTERS`` over all rounds."""
        return sum(one.counts[name] for own in self.rounds.values() for one in own)


def ask(url: str, body: Mapping[str, Any], prompts: Sequence[str], clients: int) -> tuple[Round, list[str]]:
    """Send prompts with ``clients`` concurrent requests; return the texts in the order of the prompts.

    Raises:
        RuntimeError: a request is refused.
    """
    at = urlsplit(url)

    def one(prompt: str) -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection(at.hostname or "", at.port, timeout=TIMEOUT_S)) as connection:
            data = json.dumps({**body, "messages": [{"role": "user", "content": prompt}]})
            connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {answer}")
        return answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"] or ""

    before, began = _counters(at.hostname or "", at.port), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(one, prompts))
    wall_s, after = time.perf_counter() - began, _counters(at.hostname or "", at.port)
    counts = {name: after[name] - before[name] for name in COUNTERS}
    return Round(len(prompts), sum(tokens for tokens, _ in answers), wall_s, counts), [text for _, text in answers]


def _counters(host: str, port: int | None) -> dict[str, float]:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)) as connection:
        sums = fresh_sums(connection)
    return {name: sums.get(sample, 0.0) for name, sample in COUNTERS.items()}
