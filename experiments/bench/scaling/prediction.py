"""What ``experiments.simulation`` predicts of the same requests, from this machine's own calibration."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.cli.generate.known_texts import TextTokenizer, known_texts
from cluster.cli.generate.prompt_file import PromptRecord
from cluster.cli.generate.strategy_option import StrategyChoice
from configs.slices import EngineOptions
from decoding.budget.latency import LatencyCurve
from experiments.bench.record import ROOT
from experiments.bench.scaling.forms import Form
from experiments.simulation.cluster import SimulatedCluster
from experiments.simulation.hardware import ModelShape
from experiments.simulation.replica import KnownTarget, SimulatedReplica
from experiments.simulation.steps import Host, Mode, Software, StepTimes

_CALIBRATE_S = 600.0
_SOFTWARE = Software()


def calibrated(model: str, dtype: str, device: str, threads: int) -> LatencyCurve:
    """The curve of one worker, as ``outrider doctor --calibrate`` finds it now.

    Raises:
        ValueError: the command fails; with the last line that it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = ["--model", model, "--dtype", dtype, "--device", device, "--threads", str(threads)]
        command = [sys.executable, "-m", "cluster.cli.main", "doctor", "--calibrate", "--json", "--out", folder, *settings]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_CALIBRATE_S)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ValueError(f"outrider doctor --calibrate failed, and it said: {said}")
    return LatencyCurve.from_json(json.loads(done.stdout)["curve"])


class Prediction:
    """Speed-ups of forms on known outputs, each worker a device of its own, whatever this machine has."""

    def __init__(self, curve: LatencyCurve, shape: ModelShape | None, texts: Mapping[str, str], model: str, budget: int) -> None:
        """
        Args:
            curve: of one worker.
            shape: of the model, for the sums of tensor parallelism; None where it is not known: that is not predicted then.
            texts: what the model said, by prompt.
            model: folder with the tokenizer.
            budget: most drafted rows of a rank in a step.
        """
        self._curve, self._shape, self._budget = curve, shape, budget
        cutter = TextTokenizer(Path(model))
        records = [PromptRecord(str(at), "all", prompt, (), output) for at, (prompt, output) in enumerate(texts.items())]
        self._texts = [(text.id, text) for text in known_texts(records, cutter, None)]
        self._context = max(len(text.prompt_ids) + len(text.output_ids) for _, text in self._texts)
        self._vocabulary = cutter.vocab_size, cutter.end_token_id

    def tokens_per_s(self, form: Form, choice: StrategyChoice, clients: int) -> float:
        """Of all requests together, by the simulated clock.

        Raises:
            ValueError: the strategy or the form cannot be simulated; with the reason.
        """
        replicas, times = self._times(form, clients)
        target = KnownTarget(*self._vocabulary, self._context, times.curve)
        options = EngineOptions(max_running=max(clients, EngineOptions().max_running), max_waiting=len(self._texts))
        every = [SimulatedReplica(choice, times, target, options, self._budget, False) for _ in range(replicas)]
        found = SimulatedCluster(every, None, 0.0, 0).closed_loop(self._texts, clients)
        return float(found["tokens_per_s"])

    def _times(self, form: Form, clients: int) -> tuple[int, StepTimes]:
        """How many replicas, and what a step of each takes."""
        mode: Mode = "lookahead"
        replicas, width, curve = 1, form.ranks, self._curve
        if form.kind == "threads":
            raise ValueError("the calibration is of one worker's threads")
        if form.kind == "replicas":
            replicas, width = form.ranks, 1
        elif form.kind == "elastic":  # halves, as long as there are requests for them
            replicas = 1 << (min(clients, form.ranks).bit_length() - 1)
            width = form.ranks // replicas
        elif form.kind == "tensor":
            mode, curve = "tensor", self._sliced(form.ranks)
        elif form.kind == "pipeline":
            mode = "pipeline"
        return replicas, StepTimes(mode, width, curve, Host(), hop_s=_SOFTWARE.hop_s)

    def _sliced(self, ranks: int) -> LatencyCurve:
        """Each of so many ranks takes its part of the time, and two sums a layer."""
        if self._shape is None:
            raise ValueError("the model's config.json does not tell its layers")
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
    """Each row's speed-up as measured and as predicted, and why some are not.

    Args:
        rows: of a run, by label.
        forms: by their labels.
        choices: by their labels, plain decoding among them.
        plain: plain decoding.
        prediction: of this machine.
    """
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
