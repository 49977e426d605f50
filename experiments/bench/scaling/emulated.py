"""Strong scaling on emulated GPUs: the product as it is served, whose forwards take the time of a GPU by sleeping."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from outrider.cluster.cli.generate.prompt_file import PromptRecord, read_prompts
from outrider.cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies
from outrider.cluster.serving.shared_answer import FRESH_S
from outrider.configs.schema import find_model
from outrider.configs.slices import EmulationOptions, EngineOptions
from outrider.decoding.replay import KnownText
from outrider.decoding.request import PLAIN
from outrider.engine.emulation.hardware import DEVICES, FIGURES
from outrider.engine.emulation.roofline import DeviceRoofline, Split
from outrider.engine.loading.model import load_config
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.engines.traffic import Journey
from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.record import ROOT, Kept, git_state, spread
from outrider.experiments.bench.run import Results, Run
from outrider.experiments.bench.scaling.prediction import Prediction, Totals, decode_forward_s, fitted_host
from outrider.experiments.bench.scaling.results import KINDS, Form, ask
from outrider.experiments.bench.workloads import fitting_records, interleaved
from outrider.experiments.service.served import Served, served
from outrider.experiments.simulation.replica import KnownTarget, SimulatedReplica, Step
from outrider.experiments.simulation.steps import EXCHANGE_S, Host, RankLoad, StepTimes

FORMS = tuple(kind for kind in KINDS if kind != "threads")
_TITLES = {
    "replicas": "replicas", "lookahead": "LP", "elastic": "elastic LP", "tensor": "TP", "pipeline": "PP",
}  # fmt: skip
_SPLITS = ("tensor", "pipeline")
CHECKED = (1.0, 4.0)  # dilations whose figures must agree
AGREES = 0.05
FEWEST = 8  # prompts of a cell
_DELAYS_MS = (0.0, 1.0)  # of the drafter
HOLDS = 0.15
_RATIO = "outrider:emulated_step_ratio"
_SUMS = {
    "hidden_s": "outrider:emulated_hidden_seconds_total",
    "device_s": "outrider:emulated_device_seconds_total",
    "forwards": "outrider:emulated_forwards_total", "late": "outrider:emulated_late_forwards_total",
    "device_bytes": "outrider:emulated_exchange_bytes_total",
}  # fmt: skip
_T = TypeVar("_T")
Cell = Mapping[str, Any]  # figures of one repeat of a form, strategy, and number of concurrent requests


def settings_of(args: argparse.Namespace, form: Form, dilation: float, delay_ms: float, outputs: Path) -> list[str]:
    """Return the settings of a form's server."""
    names = [choice.label for choice in _choices(args)]
    found = [
        f"emulation.device={args.emulate}", f"emulation.model={args.as_model}", f"emulation.time_dilation={dilation:g}",
        f"emulation.outputs={outputs}", f"emulation.bits={args.bits}", f"emulation.form={args.forward}",
        f"emulation.drafter_ms={delay_ms:g}", "model.device=cpu", f"engine.max_running={max(8, *args.clients)}",
        "engine.prefix_caching=false", "cache.enabled=false", f"speculation.strategies={json.dumps(names)}",
    ]  # fmt: skip
    if args.link is not None:
        found.append(f"emulation.link={args.link}")
    if args.budget is not None:
        found.append(f"speculation.max_draft_tokens={args.budget}")
    return [*found, *form.settings()]


def _choices(args: argparse.Namespace) -> list[StrategyChoice]:
    """Return the strategies besides plain decoding."""
    return [choice for choice in chosen_strategies(args.strategy or ["auto"]) if choice.name != PLAIN]


def _records(args: argparse.Namespace, model: str) -> list[PromptRecord]:
    """Return the first records of each file in turns. Raises ``ValueError`` for one without an output, or too few."""
    tokenizer, context = load_tokenizer(model), int(load_config(model).get_text_config().max_position_embeddings)
    found = []
    for path in args.prompts:
        fitting = [record for record, _ in fitting_records(read_prompts(path), tokenizer, context - args.max_tokens)]
        if len(fitting) < args.records:
            raise ValueError(f"{path.stem} has {len(fitting)} prompts that fit, {args.records} are needed: lower --records")
        without = next((record.id for record in fitting[: args.records] if not record.output), None)
        if without is not None:
            raise ValueError(f"{path.stem}: record {without} has no output to follow: give files with outputs")
        found.append(fitting[: args.records])
    records = list(interleaved(found))
    if len({record.prompt for record in records}) < len(records):
        raise ValueError("two records have the same prompt: leave one of them out of --prompts")
    return records


def asked(texts: Sequence[_T], clients: int) -> Sequence[_T]:
    """Return the prompts of a cell of strong scaling: one for each concurrent request, and ``FEWEST`` at least."""
    return texts[: max(FEWEST, clients)]


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Measure all forms on emulated GPUs, or with ``--check-dilation`` one and two ranks with several dilations.

    Returns:
        ``emulated``: the device, and each figure's source; ``overall``: a row for each form, strategy and number of requests;
        ``prediction``: the simulation beside it; or ``dilation``: a row for each form, strategy and delay of the drafter.

    Raises:
        ValueError, ModelLoadError: an unusable file, model or option.
    """
    model, choices = find_model(args.model), _choices(args)
    roofline = DeviceRoofline.of(EmulationOptions(args.emulate, args.as_model, 1.0, None, args.link, args.bits, args.forward))
    records = _records(args, model)
    clients = sorted({1, *args.clients})
    if len(records) < clients[-1]:
        raise ValueError(f"{clients[-1]} requests at once need as many prompts, and there are {len(records)}: raise --records")
    forms = [Form("one", 1, 1)]
    runs: list[tuple[float, float]] = [(args.time_dilation, 0.0)]
    if args.check_dilation:
        forms, runs = [*forms, Form("lookahead", 2, 1)], [(n, ms) for ms in _DELAYS_MS for n in CHECKED]
    else:
        kinds = args.form or FORMS
        forms += [Form(kind, count, 1) for count in args.workers if count > 1 for kind in FORMS[1:] if kind in kinds]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        outputs = folder / "known.jsonl"
        lines = [json.dumps({"prompt": record.prompt, "output": record.output}) for record in records]
        outputs.write_text("\n".join(lines) + "\n", encoding="utf-8")
        setting = {name: getattr(args, name) for name in sorted(vars(args)) if name not in ("kept", "out", "json", "repeats")}
        kept = Kept(args.kept or folder / "kept.jsonl", {"git": git_state(ROOT), **_plain(setting)}, key_of)
        wanted = [(repeat, *one, form) for repeat in range(args.repeats) for one in runs for form in forms]
        for repeat, dilation, delay_ms, form in wanted:
            cells = [(form.label, choice, count) for count in clients for choice in (PLAIN, *(c.label for c in choices))]
            left = [cell for cell in cells if not kept.has((*cell, dilation, delay_ms, repeat))]
            if not left:
                continue
            run.progress.say(f"repeat {repeat + 1} of {args.repeats}: {form.label}, dilation {dilation:g}")
            with served(model, settings_of(args, form, dilation, delay_ms, outputs)) as server:
                for label, strategy, count in left:
                    told = {"form": label, "strategy": strategy, "clients": count, "dilation": dilation, "delay_ms": delay_ms}
                    chosen = records if args.check_dilation else asked(records, count)
                    cell = _cell(server, Path(model).name, chosen, strategy, count, args.max_tokens)
                    kept.add({**told, "repeat": repeat, **cell})
                    run.progress.note(f"{label}, {strategy}, {count} at once")
    return _results(args, roofline, forms, kept.found, records, model)


def key_of(cell: Cell) -> tuple[Any, ...]:
    """Return what identifies a cell among those of a run."""
    return tuple(cell[name] for name in ("form", "strategy", "clients", "dilation", "delay_ms", "repeat"))


def _plain(setting: Mapping[str, Any]) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(json.dumps(setting, default=str)))


def _results(
    args: argparse.Namespace, roofline: DeviceRoofline, forms: Sequence[Form], cells: Sequence[Cell],
    records: Sequence[PromptRecord], model: str,
) -> Results:  # fmt: skip
    about = {
        "device": roofline.card.name, "device_sources": roofline.card.sources, "model": roofline.model.name,
        "bits": roofline.bits, "form": roofline.form, "link": roofline.link.name,
        "figures": {name: dataclasses.asdict(one) for name, one in FIGURES.items()},
    }  # fmt: skip
    if args.check_dilation:
        return {"emulated": about, "dilation": dilation_rows(cells)}
    rows = overall(forms, cells, args.time_dilation)
    told = validated(forms, cells, rows, roofline, records, model, args)
    figures = {
        _TITLES[kind]: panel("lines", f"{about['model']} on {about['device']}, emulated", "requests at once",
                             "tokens/s", _lines(rows, kind, strategy))
        for kind in _TITLES for strategy in [next((c.label for c in _choices(args)), PLAIN)]
    }  # fmt: skip
    return {"emulated": about | {"dilation": args.time_dilation}, "overall": rows, "prediction": told, "figures": figures}


def _lines(rows: Mapping[str, Cell], kind: str, strategy: str) -> dict[str, dict[str, Any]]:
    """Return a line for each number of devices; empty if the form was not measured."""
    own = [row for row in rows.values() if row["strategy"] == strategy and row["kind"] in ("one", kind)]
    if all(row["kind"] == "one" for row in own):
        return {}
    lines: dict[str, dict[str, Any]] = {}
    for row in own:
        lines.setdefault(f"{row['workers']} GPU{'s' * (row['workers'] > 1)}", {})[str(row["clients"])] = row["tokens_per_s"]
    return lines


def _cell(
    server: Served, model: str, records: Sequence[PromptRecord], strategy: str, clients: int, max_tokens: int
) -> dict[str, Any]:
    """Answer the prompts of a cell once, after a few of them as a warm-up."""
    spoken = {"max_draft_tokens": 0} if strategy == PLAIN else {"strategy": strategy}
    body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "cache": "off", "speculation": spoken}
    prompts = [record.prompt for record in records]
    ask(server.url, body, prompts[: min(clients, FEWEST)], clients)
    before, cpu_s = _readings(server.url), processor_s(server)
    done, texts = ask(server.url, body, prompts, clients)
    cpu_s, after = processor_s(server) - cpu_s, _readings(server.url)
    sums = {name: _sum(after, sample) - _sum(before, sample) for name, sample in _SUMS.items()}
    differing = sum(not (record.output or "").startswith(text) for record, text in zip(records, texts, strict=True))
    return {
        "requests": done.requests, "tokens": done.tokens, "wall_s": done.wall_s, "latency_s": done.latency_s, "cpu_s": cpu_s,
        "cores": os.cpu_count(), "differing": differing,
        "ratio": statistics.median(after.get(_RATIO, {"": 0.0}).values()), **done.counts, **sums,
    }  # fmt: skip


def _readings(url: str) -> dict[str, dict[str, float]]:
    """Return the sums of ``/metrics`` by sample and engine."""
    time.sleep(FRESH_S)
    at = urlsplit(url)
    found: dict[str, dict[str, float]] = {}
    with contextlib.closing(http.client.HTTPConnection(at.hostname or "", at.port, timeout=60.0)) as connection:
        connection.request("GET", "/metrics")
        for family in text_string_to_metric_families(connection.getresponse().read().decode()):
            for sample in family.samples:
                engines, engine = found.setdefault(sample.name, {}), sample.labels.get("engine", "")
                engines[engine] = engines.get(engine, 0.0) + sample.value
    return found


def _sum(readings: Mapping[str, Mapping[str, float]], name: str) -> float:
    return sum(readings.get(name, {}).values())


def processor_s(server: Served) -> float:
    """Return the processor seconds of a server's live processes."""
    total = 0.0
    for process in (server.process, *server.process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = process.cpu_times()
            total += times.user + times.system
    return total


def seconds_of(cell: Cell) -> float:
    """Return the emulated seconds of a cell: the share of its wall seconds that dilation did not hide from its requests.

    Example: requests wait 8 s each for an answer, of which dilation hid 7. A cell of 80 wall seconds has 10 emulated ones.
    """
    return float(cell["wall_s"] * (1.0 - cell["hidden_s"] / cell["latency_s"]))


def _figures(cells: Sequence[Cell]) -> dict[str, list[float]]:
    """Return the emulated figures of each repeat."""
    return {
        "tokens_per_s": [round(cell["tokens"] / seconds_of(cell), 2) for cell in cells],
        "ttft_ms": [round(1e3 * cell["ttft_s"] / cell["requests"], 3) for cell in cells],
        "tpot_ms": [round(1e3 * cell["decode_s"] / max(1, cell["tokens"] - cell["requests"]), 4) for cell in cells],
    }


def _grouped(cells: Iterable[Cell], *names: str) -> dict[tuple[Any, ...], list[Cell]]:
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell["repeat"]):
        groups.setdefault(tuple(cell[name] for name in names), []).append(cell)
    return groups


def overall(forms: Sequence[Form], cells: Sequence[Cell], dilation: float) -> dict[str, dict[str, Any]]:
    """Return a row for each form, strategy and number of concurrent requests, compared with plain decoding on one GPU.

    ``efficiency`` is the speed-up over as many GPUs; ``bytes`` are those of the ranks' messages in a step, or of what the GPUs of
    a tensor-parallel or pipeline group would exchange; ``processor`` is the used share of all cores.
    """
    by_label = {form.label: form for form in forms}
    groups = _grouped(cells, "form", "strategy", "clients")
    rows: dict[str, dict[str, Any]] = {}
    for (label, strategy, clients), own in groups.items():
        form, found = by_label[label], _figures(own)
        base = _figures(groups[forms[0].label, PLAIN, clients])["tokens_per_s"]
        speed_up = [round(a / b, 3) for a, b in zip(found["tokens_per_s"], base, strict=False)]
        steps, request_steps = sum(cell["steps"] for cell in own), sum(cell["request_steps"] for cell in own)
        moved = "device_bytes" if form.kind in ("tensor", "pipeline") else "exchange_bytes"
        rows[f"{label}, {'plain' if strategy == PLAIN else strategy}, {clients} at once"] = {
            "form": label, "kind": form.kind, "workers": form.workers, "strategy": strategy, "clients": clients, **found,
            "interval": {name: spread(values) for name, values in found.items()},
            "speed_up": speed_up, "efficiency": round(statistics.median(speed_up) / form.workers, 3),
            "tokens_per_step": round(sum(cell["tokens"] for cell in own) / request_steps, 3),
            "bytes": round(sum(cell[moved] for cell in own) / steps, 1),
            "exchange_ms": round(1e3 * sum(cell["exchange_s"] for cell in own) / steps, 4),
            "processor_s": [round(cell["cpu_s"], 2) for cell in own],
            "processor": round(statistics.median(cell["cpu_s"] / cell["wall_s"] / cell["cores"] for cell in own), 3),
            "step_ratio": round(statistics.median(cell["ratio"] for cell in own), 4),
            "late": round(sum(cell["late"] for cell in own) / max(1, sum(cell["forwards"] for cell in own)), 4),
            "dilation": dilation, "differing": sum(cell["differing"] for cell in own),
        }  # fmt: skip
    return rows


def dilation_rows(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Return each figure with the dilations of ``CHECKED``, how far they differ, and whether it may be published."""
    rows = {}
    few, many = CHECKED
    groups = _grouped(cells, "form", "strategy", "clients", "delay_ms", "dilation")
    for (label, strategy, clients, delay_ms, dilation), own in groups.items():
        other = groups.get((label, strategy, clients, delay_ms, many))
        if dilation != few or other is None:
            continue
        ours, theirs = _figures(own), _figures(other)
        name = f"{label}, {'plain' if strategy == PLAIN else strategy}, {clients} at once, drafter +{delay_ms:g} ms"
        rows[name] = {
            figure: {
                f"{few:g}": statistics.median(ours[figure]), f"{many:g}": statistics.median(theirs[figure]),
                "difference": round(statistics.median(theirs[figure]) / statistics.median(ours[figure]) - 1, 4),
                "agrees": abs(statistics.median(theirs[figure]) / statistics.median(ours[figure]) - 1) <= AGREES,
            }
            for figure in ours
        }  # fmt: skip
    return rows


@dataclasses.dataclass(frozen=True, slots=True)
class _DilatedTimes(StepTimes):
    """Wall seconds of a step: its forward takes ``dilation`` times as long, and the host as long as without."""

    dilation: float = 1.0
    hidden_s: list[float] = dataclasses.field(default_factory=list)  # of each step

    def seconds(self, loads: Sequence[RankLoad], drafted_for: int) -> float:
        """See ``StepTimes``."""
        forward_s = max(self.forward_s(load) for load in loads)
        self.hidden_s.append((self.dilation - 1.0) * forward_s)
        return StepTimes.seconds(self, loads, drafted_for) + self.hidden_s[-1]


class _DilatedReplica(SimulatedReplica):
    """A replica in wall time, with the seconds that dilation hides."""

    def __init__(
        self, choice: StrategyChoice, times: _DilatedTimes, target: KnownTarget, options: EngineOptions, budget: int
    ) -> None:
        super().__init__(choice, times, target, options, budget, False)
        self._hidden_s, self.added_s = times.hidden_s, dict[str, float]()
        self._ends: list[tuple[float, float]] = [(0.0, 0.0)]  # (time, hidden seconds until then) at both ends of each step

    def add(self, key: str, text: KnownText, now: float) -> None:
        """See ``SimulatedReplica``."""
        self.added_s[key] = now
        super().add(key, text, now)

    def step(self, now: float) -> Step | None:
        """See ``SimulatedReplica``."""
        found = super().step(now)
        if found is not None:
            before = self._ends[-1][1]
            self._ends += [(now, before), (now + found.seconds, before + self._hidden_s[-1])]
        return found

    def hidden_between(self, start: float, end: float) -> float:
        """Return the hidden seconds of a time."""
        times, hidden = zip(*self._ends, strict=True)
        return float(np.interp(end, times, hidden) - np.interp(start, times, hidden))


class EmulatedPrediction(Prediction):
    """Predicted speed on the same GPUs with the same dilation, with times of the host fitted to one GPU and to two ranks.

    What the API does beside a running step is not dilated, so that requests that come at once reach the engine sooner than on a
    real GPU: the prediction has to be dilated, too.
    """

    def __init__(
        self, roofline: DeviceRoofline, records: Sequence[PromptRecord], model: str, budget: int, hosts: Mapping[str, Host],
        gap_s: float, group_s: Mapping[tuple[str, str], float], max_tokens: int, dilation: float,
    ) -> None:  # fmt: skip
        """Predict as ``Prediction``. ``group_s``: what two ranks add to the host's time of a step, by form and strategy."""
        texts = {record.prompt: record.output or "" for record in records}
        super().__init__(roofline.curve(), roofline.model, texts, model, budget, hosts, gap_s, max_tokens)
        self._roofline, self._group_s, self._dilation = roofline, group_s, dilation

    def _replica(self, choice: StrategyChoice, times: StepTimes, target: KnownTarget, options: EngineOptions) -> SimulatedReplica:
        own = {field.name: getattr(times, field.name) for field in dataclasses.fields(times)}
        return _DilatedReplica(choice, _DilatedTimes(**own, dilation=self._dilation), target, options, self._budget)

    def _hidden_s(self, wall_s: float, replicas: Sequence[SimulatedReplica], journeys: Mapping[str, Journey]) -> float:
        hidden_s = latency_s = 0.0
        for replica in replicas:
            assert isinstance(replica, _DilatedReplica)
            for key, added_s in replica.added_s.items():
                hidden_s += replica.hidden_between(added_s, journeys[key].last_s)
                latency_s += journeys[key].last_s - journeys[key].sent_s
        return wall_s * hidden_s / latency_s

    def _asked(self, clients: int) -> Sequence[tuple[str, KnownText]]:
        return asked(super()._asked(clients), clients)

    def _times(self, form: Form, clients: int, label: str) -> tuple[int, StepTimes]:
        replicas, times = super()._times(form, clients, label)
        if form.kind not in _SPLITS:
            exchange_s = self._group_s.get(("lookahead", label), 2 * EXCHANGE_S) / 2
            return replicas, dataclasses.replace(times, exchange_s=exchange_s)
        step_s = times.host.step_s + self._group_s.get((form.kind, label), 0.0) * form.ranks / 2
        host = dataclasses.replace(times.host, step_s=step_s)
        return 1, StepTimes("tensor", form.ranks, _split(self._roofline, form).curve(), host)


def _split(roofline: DeviceRoofline, form: Form) -> DeviceRoofline:
    return dataclasses.replace(roofline, split=cast(Split, form.kind), ranks=form.ranks) if form.kind in _SPLITS else roofline


def validated(
    forms: Sequence[Form], cells: Sequence[Cell], rows: Mapping[str, Mapping[str, Any]], roofline: DeviceRoofline,
    records: Sequence[PromptRecord], model: str, args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Return the tokens per second of each row as emulated and as simulated, and the share of errors up to ``HOLDS``."""
    by_label = {form.label: form for form in forms}
    totals = {
        key: [_totals(cell, _split(roofline, by_label[key[0]]), by_label[key[0]]) for cell in own]
        for key, own in _grouped(cells, "form", "strategy", "clients").items()
    }
    one, most = forms[0].label, max(args.clients)
    labels = [PLAIN, *(choice.label for choice in _choices(args))]
    # Each repeat is fitted by itself, and medians are taken, as of the measured figures: a repeat may run beside other work.
    hosts: dict[str, Host] = {}
    for label in labels:
        fits = [
            fitted_host(alone, many, alone) for alone, many in zip(totals[one, label, 1], totals[one, label, most], strict=True)
        ]
        found = zip(*(dataclasses.astuple(host) for host, _ in fits), strict=True)
        hosts[label] = Host(*map(statistics.median, found))
        if label == PLAIN:
            gap_s = statistics.median(gap for _, gap in fits)
    pairs = {form.kind: form.label for form in forms if form.workers == 2}
    alone_s = {key: statistics.median(each.host_s for each in own) for key, own in totals.items()}
    group_s = {
        (kind, label): max(0.0, alone_s[pairs[kind], label, 1] - alone_s[one, label, 1])
        for kind in ("lookahead", *_SPLITS) for label in labels if (pairs.get(kind), label, 1) in totals
    }  # fmt: skip
    budget = args.budget or (63 if roofline.form == "strict" else 64)
    prediction = EmulatedPrediction(roofline, records, model, budget, hosts, gap_s, group_s, args.max_tokens, args.time_dilation)
    choices = {choice.label: choice for choice in (*chosen_strategies([PLAIN]), *_choices(args))}
    told: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, row in rows.items():
        try:
            guess = prediction.tokens_per_s(by_label[row["form"]], choices[row["strategy"]], row["clients"])
        except ValueError as error:
            left_out[name] = str(error)
            continue
        found = statistics.median(row["tokens_per_s"])
        told[name] = {"measured": found, "predicted": round(guess, 2), "error": round(guess / found - 1, 3)}
    held = sum(abs(row["error"]) <= HOLDS for row in told.values())
    fitted = {label: dataclasses.asdict(host) for label, host in hosts.items()}
    return {
        "rows": told, "left_out": left_out, "held": held, "told": len(told),
        "fitted": {"hosts": fitted, "gap_s": gap_s, "group_s": {", ".join(key): value for key, value in group_s.items()}},
    }  # fmt: skip


def _totals(cell: Cell, roofline: DeviceRoofline, form: Form) -> Totals:
    steps, request_steps = cell["steps"], cell["request_steps"]
    drafted = cell["drafted"] / request_steps / (form.ranks if form.kind == "lookahead" else 1)
    return Totals(
        1, seconds_of(cell), cell["requests"], steps, request_steps, cell["ttft_s"], cell["decode_s"],
        cell["device_s"] / max(1.0, cell["forwards"]), decode_forward_s(roofline.curve(), request_steps / steps, drafted),
    )  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of emulated GPUs."""
    own = parser.add_argument_group("emulated GPUs")
    own.add_argument("--emulate", choices=DEVICES, help="GPU: measure on emulated ones. Needs --as")
    own.add_argument("--as", dest="as_model", metavar="MODEL", help="model whose steps are timed, such as llama-3.1-8b")
    own.add_argument("--time-dilation", type=float, default=8.0, help="factor of the emulated times, 1 to 16")
    own.add_argument("--link", choices=("nvlink", "pcie", "ethernet"), help="between GPUs; default: that of the GPU")
    own.add_argument("--bits", type=int, choices=(16, 8, 4), default=16, help="of a weight")
    own.add_argument("--forward", choices=("strict", "graphs", "eager"), default="strict", help="see emulation.form")
    own.add_argument("--kept", type=Path, help="file of finished cells, with which an interrupted run continues")
    own.add_argument("--check-dilation", action="store_true", help="compare dilations 1 and 4 on one GPU and two ranks instead")


def check_options(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 for options of emulated GPUs that do not go together."""
    if args.emulate is None:
        given = [
            f"--{name}" for name in ("as", "link", "kept") if getattr(args, "as_model" if name == "as" else name) is not None
        ]
        given += ["--check-dilation"] * args.check_dilation
        if given:
            parser.error(f"{given[0]} is for emulated GPUs: give --emulate, or leave it out")
        return
    if args.as_model is None:
        parser.error("--emulate needs --as, the model whose steps are timed, such as llama-3.1-8b")
    if not 1 <= args.time_dilation <= 16:
        parser.error(f"--time-dilation must be between 1 and 16, got {args.time_dilation:g}")
    if "threads" in (args.form or ()):
        parser.error("--form threads is for a CPU: leave it out with --emulate")
