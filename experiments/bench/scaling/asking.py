"""The requests of one server: so many at once, and what its engines counted meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from decoding.request import PLAIN
from experiments.bench.scaling.forms import Form
from experiments.service.served import fresh_sums

TIMEOUT_S = 600.0
_DECODE = "vllm:request_decode_time_seconds_sum"
_COUNTERS = {
    "steps": "outrider:steps_total", "rows": "outrider:step_rows_total", "forward_s": "outrider:forward_seconds_total",
    "exchange_s": "outrider:exchange_seconds_total", "exchange_bytes": "outrider:exchange_bytes_total",
    "decode_s": _DECODE, "request_steps": "outrider:request_steps_total", "tokens": "outrider:tokens_total",
    "drafted": "outrider:draft_tokens_total",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Round:
    """Some requests, so many at once: what they took, and what the engines counted (see ``_COUNTERS``)."""

    requests: int
    tokens: int
    wall_s: float  # from the first request to the last answer, HTTP and this process included
    counts: Mapping[str, float]

    @property
    def decode_rate(self) -> float:
        """Tokens per second of a request after its first token, by the engine's own clock."""
        return (self.tokens - self.requests) / self.counts["decode_s"]


@dataclass(slots=True)
class Entry:
    """A strategy in a form with so many requests at once, and what it did: by workload a round for each repeat.

    More than one request at once come from all workloads together, as the one workload ``all``.
    """

    form: Form
    strategy: str
    clients: int = 1
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    differing: int = 0

    @property
    def label(self) -> str:
        """For tables."""
        at_once = f", {self.clients} at once" if self.clients > 1 else ""
        return f"{self.form.label}, {'plain' if self.strategy == PLAIN else self.strategy}{at_once}"

    def rates(self, workload: str) -> list[float]:
        """Tokens per second of a request after its first, repeat by repeat."""
        return [one.decode_rate for one in self.rounds[workload]]

    @property
    def wall_rates(self) -> list[float]:
        """Tokens per second of all requests together by the clock of who asks, repeat by repeat."""
        repeats = zip(*self.rounds.values(), strict=True)
        return [sum(one.tokens for one in own) / sum(one.wall_s for one in own) for own in repeats]

    def total(self, name: str) -> float:
        """What the engines counted, over all rounds; of ``_COUNTERS``."""
        return sum(one.counts[name] for own in self.rounds.values() for one in own)


def ask(url: str, body: Mapping[str, Any], prompts: Sequence[str], clients: int) -> tuple[Round, list[str]]:
    """Asks for whole answers, so many at once; the texts in the order of the prompts.

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
    counts = {name: after[name] - before[name] for name in _COUNTERS}
    return Round(len(prompts), sum(tokens for tokens, _ in answers), wall_s, counts), [text for _, text in answers]


def _counters(host: str, port: int | None) -> dict[str, float]:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)) as connection:
        sums = fresh_sums(connection)
    return {name: sums.get(sample, 0.0) for name, sample in _COUNTERS.items()}
