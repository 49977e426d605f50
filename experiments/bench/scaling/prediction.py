"""Prediction of strong scaling by the simulation, with the host's times fitted to one worker."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.cluster.cli.generate.known_texts import TextTokenizer, known_texts
from outrider.cluster.cli.generate.prompt_file import PromptRecord
from outrider.cluster.cli.generate.strategy_option import StrategyChoice
from outrider.configs.slices import EngineOptions
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.replay import KnownText
from outrider.decoding.request import PLAIN
from outrider.engine.emulation.hardware import ModelShape
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.engines.traffic import Journey
from outrider.experiments.bench.scaling.results import Entry, Form
from outrider.experiments.bench.workloads import prompt_ids
from outrider.experiments.simulation.cluster import SimulatedCluster
from outrider.experiments.simulation.replica import KnownTarget, SimulatedReplica
from outrider.experiments.simulation.steps import Host, Mode, Software, StepTimes

_SOFTWARE = Software()


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of all requests of a form, strategy and number of concurrent requests on one worker."""

    rounds: int
    seconds: float  # of all rounds, each from the first request to the last answer
    requests: float
    steps: float
    request_steps: float
    ttft_s: float  # of all requests
    decode_s: float  # of all requests, after their first token
    forward_s: float  # of one forward, without the host
    decode_forward_s: float  # the same after the first token

    @property
    def host_s(self) -> float:
        """Return the seconds of the host in a step of a request that is alone, after its first token."""
        return max(0.0, self.decode_s / max(1.0, self.request_steps - self.requests) - self.decode_forward_s)


def fitted_host(plain: Totals, many: Totals, drafting: Totals) -> tuple[Host, float]:
    """Return the host's times, and the seconds of a request outside the engine.

    Args:
        plain: plain decoding of one request at a time.
        many: plain decoding of several at once; equal to ``plain`` if there is no other measurement.
        drafting: one request at a time with the strategy.

    Example: a forward of 10 ms. Steps of one request take 10.5 ms, those of four together 12: half a millisecond a request and
    nothing else. With drafts they take 10.8 ms: 0.3 ms of drafting.
    """
    alone_s = plain.host_s
    gap_s = max(0.0, plain.seconds - plain.ttft_s - plain.decode_s) / plain.requests
    together = many.request_steps / many.steps
    request_s = alone_s
    if together > 1.0:
        # One client's request is outside the engine while another's is computed, except at the beginning and the end of a round.
        other_s = (many.seconds - many.rounds * gap_s) / many.steps - many.forward_s
        request_s = min(max((other_s - alone_s) / (together - 1.0), 0.0), other_s / together)
    return Host(max(0.0, alone_s - request_s), request_s, max(0.0, drafting.host_s - alone_s)), gap_s


def totals_of(entry: Entry, curve: LatencyCurve) -> Totals:
    """Return the totals of an entry of one worker, whose forwards take what ``curve`` says."""
    rounds = [one for own in entry.rounds.values() for one in own]
    steps, request_steps = entry.total("steps"), entry.total("request_steps")
    forward_s = decode_forward_s(curve, request_steps / steps, entry.total("drafted") / request_steps)
    seconds, requests = sum(one.wall_s for one in rounds), sum(one.requests for one in rounds)
    times = entry.total("ttft_s"), entry.total("decode_s")
    return Totals(len(rounds), seconds, requests, steps, request_steps, *times, forward_s, forward_s)


def decode_forward_s(curve: LatencyCurve, sequences: float, drafted: float) -> float:
    """Return the seconds of a forward of so many sequences, each with ``drafted`` rows besides the root."""
    load = StepLoad(max(1, round(sequences)), max(1, round(sequences)), round(sequences * curve.context))
    return float(curve.seconds(np.array([sequences * (1.0 + drafted)], np.float64), load)[0])


def fitted_hosts(entries: Sequence[Entry], curve: LatencyCurve) -> tuple[dict[str, Host], float]:
    """Return the host's times by strategy, and the gap between requests, from the entries of one worker."""
    one = {(entry.strategy, entry.clients): totals_of(entry, curve) for entry in entries if entry.form.kind == "one"}
    plain, many = one[PLAIN, 1], one[PLAIN, max(clients for _, clients in one)]
    found = {name: fitted_host(plain, many, one[name, 1]) for name, clients in one if clients == 1}
    return {name: host for name, (host, _) in found.items()}, found[PLAIN][1]


class Prediction:
    """Predicted speed of forms on known outputs, with a device for each worker."""

    def __init__(
        self, curve: LatencyCurve, shape: ModelShape | None, texts: Mapping[str, str], model: str, budget: int,
        hosts: Mapping[str, Host], gap_s: float, max_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """Predict from the ``curve`` of one worker and the outputs of a model by prompt (``texts``).

        Tensor parallelism needs the model's ``shape``. ``budget`` is the maximum draft tokens per rank and step. ``hosts`` and
        ``gap_s`` are of ``fitted_hosts``. Outputs are cut to ``max_tokens``.
        """
        self._curve, self._shape, self._budget, self._hosts, self._gap_s = curve, shape, budget, hosts, gap_s
        cutter = TextTokenizer(Path(model))
        records = [PromptRecord(str(at), "all", prompt, (), output) for at, (prompt, output) in enumerate(texts.items())]
        tokenizer = load_tokenizer(model)
        known = zip(records, known_texts(records, cutter, max_tokens), strict=True)
        # Prompts are sent as the only message of a chat.
        self._texts = [
            (text.id, replace(text, prompt_ids=np.asarray(prompt_ids(record, tokenizer), np.int32))) for record, text in known
        ]
        self._context = max(len(text.prompt_ids) + len(text.output_ids) for _, text in self._texts)
        self._vocabulary = cutter.vocab_size, cutter.end_token_id

    def tokens_per_s(self, form: Form, choice: StrategyChoice, clients: int) -> float:
        """Return tokens per second of all requests together, by the simulated clock.

        Raises:
            ValueError: the strategy or the form cannot be simulated; with the reason.
        """
        replicas, times = self._times(form, clients, choice.label)
        target = KnownTarget(*self._vocabulary, self._context, times.curve)
        options = EngineOptions(max_running=max(clients, EngineOptions().max_running), max_waiting=len(self._texts))
        every = [self._replica(choice, times, target, options) for _ in range(replicas)]
        cluster = SimulatedCluster(every, None, 0.0, 0, self._gap_s)
        found = cluster.closed_loop(self._asked(clients), clients)
        # Of all requests, the last ones included, as it is measured.
        return float(found["output_tokens"] / (found["wall_s"] - self._hidden_s(found["wall_s"], every, cluster.journeys)))

    def _replica(
        self, choice: StrategyChoice, times: StepTimes, target: KnownTarget, options: EngineOptions
    ) -> SimulatedReplica:  # fmt: skip
        return SimulatedReplica(choice, times, target, options, self._budget, False)

    def _hidden_s(self, wall_s: float, replicas: Sequence[SimulatedReplica], journeys: Mapping[str, Journey]) -> float:
        """Return the seconds of the whole run that are not counted."""
        return 0.0

    def _asked(self, clients: int) -> Sequence[tuple[str, KnownText]]:
        """Return the texts that this number of clients asks for."""
        return self._texts

    def _times(self, form: Form, clients: int, label: str) -> tuple[int, StepTimes]:
        """Return the number of replicas and the times of their steps with a strategy."""
        mode: Mode = "lookahead"
        replicas, width, curve = 1, form.ranks, self._curve
        if form.kind == "threads":
            raise ValueError("the calibration is of one worker's threads")
        if form.kind == "replicas":
            replicas, width = form.ranks, 1
        elif form.kind == "elastic":  # the widest blocks that leave one for each request
            replicas = 1 << (min(clients, form.ranks).bit_length() - 1)
            width = form.ranks // replicas
        elif form.kind == "tensor":
            mode, curve = "tensor", self._sliced(form.ranks)
        elif form.kind == "pipeline":
            mode = "pipeline"
        return replicas, StepTimes(mode, width, curve, self._hosts[label], hop_s=_SOFTWARE.hop_s)

    def _sliced(self, ranks: int) -> LatencyCurve:
        """Return the curve of tensor parallelism: each rank takes its part of the time, plus two sums per layer."""
        if self._shape is None:
            raise ValueError("the shape of the model is unknown")
        curve, sums_s = self._curve, 2 * self._shape.layers * _SOFTWARE.collective_s
        seconds = tuple(each / ranks + sums_s for each in curve.rows_s)
        return replace(
            curve, rows_s=seconds, sequence_s=curve.sequence_s / ranks, entry_s=curve.entry_s / ranks,
            row_entry_s=curve.row_entry_s / ranks,
        )  # fmt: skip


def beside(
    rows: Mapping[str, Mapping[str, Any]], forms: Mapping[str, Form], choices: Mapping[str, StrategyChoice],
    plain: StrategyChoice, prediction: Prediction,
) -> dict[str, Any]:  # fmt: skip
    """Return each row's measured and predicted speed-up, and why some are not predicted; forms and choices are by label."""
    told: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    one: dict[int, float] = {}
    for label, row in rows.items():
        form, clients = forms[row["form"]], row["clients"]
        try:
            if clients not in one:
                one[clients] = prediction.tokens_per_s(Form("one", 1, form.threads), plain, clients)
            guess = prediction.tokens_per_s(form, choices[row["strategy"]], clients) / one[clients]
        except ValueError as error:
            left_out[label] = str(error)
            continue
        measured = statistics.median(row["speed_up"])
        told[label] = {"measured": measured, "predicted": round(guess, 3), "error": round(guess / measured - 1, 3)}
    return {"rows": told, "left_out": left_out}
