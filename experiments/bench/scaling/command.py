"""``outrider bench scaling``: one worker and several together, in every form of parallelism, on the same prompts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.cluster.cli.generate.prompt_file import read_prompts
from outrider.cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies
from outrider.configs.schema import find_model
from outrider.decoding.request import PLAIN
from outrider.engine.emulation.hardware import ModelShape, shape_of
from outrider.engine.loading.model import load_config
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.options import add_model, add_prompts, check_distinct, check_prompts, numbers
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.bench.scaling import emulated
from outrider.experiments.bench.scaling.prediction import Prediction, beside, fitted_hosts
from outrider.experiments.bench.scaling.results import (
    KINDS,
    Entry,
    ask,
    calibrated,
    crossover,
    figures,
    forms_of,
    one_worker,
    row_of,
)
from outrider.experiments.bench.workloads import fitting_records, interleaved
from outrider.experiments.papers.numbers.scaling import beside_figures
from outrider.experiments.service.served import memory_mib, served

TEXT = """Measure strong scaling: one worker and several together answer the same prompts, one request at a time and many.

A worker is a GPU, or on a CPU a process with --threads threads. Each form is an `outrider serve`:
  one         one worker
  threads     one worker with as many threads as N workers have (CPU only)
  lookahead   LP, lookahead parallelism: N copies of the model share each step's draft tree
  elastic     LP whose width follows the load: one request has all N, N requests have one each
  tensor      TP by DeepSpeed: each of N workers has a slice of every layer
  pipeline    PP: each of N workers has some of the layers
  replicas    N independent workers behind the router
Each answers greedily with plain decoding and with every --strategy, for each number of concurrent --clients. In each repeat every
form is started anew, every other time in reverse, so that a drift of the machine hits all alike. Nothing is drafted from earlier
answers (`cache: off`), which would be the same ones. Two speeds are measured: of a request after its first token by the engine's
clock, and of all requests together by the client's clock. A form that cannot run here is skipped with the reason. Every output is
compared with plain decoding on one worker. The simulation predicts each speed-up from `outrider doctor --calibrate`, with a
device for each worker. With fewer cores than threads of all workers, only the tokens per step are meaningful.

With --emulate each worker is a GPU that is emulated: a forward takes what the roofline of the GPU says, by sleeping, and
requests follow the known outputs of the files. All else is the product. N requests at once are the first N prompts, and 8 at
least. The times of GPUs and links are multiplied by --time-dilation, and all figures are emulated seconds: those of the wall
clock without what dilation added. With --check-dilation the figures of two dilations are compared, of one GPU and of LP with
two, and with a drafter that takes 1 ms longer.

example, some minutes with a real model on two cores:
  outrider bench scaling --model smollm2-135m-instruct --prompts chat.jsonl code.jsonl --strategy auto --strategy jacobi
example, on eight GPUs:
  outrider bench scaling --model DIR --dtype bfloat16 --prompts chat.jsonl --records 64 --workers 1,2,4,8 --clients 1,4,16,64
example, on eight emulated GPUs:
  outrider bench scaling --emulate A100-80 --as llama-3.1-8b --time-dilation 8 --prompts known.jsonl --records 64 \\
    --workers 1,2,4,8 --clients 1,2,4,8,16,32,64 --kept cells.jsonl
"""
_EXACT = ("float32",)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_prompts(parser)
    add_model(parser, "float32", ("float32", "bfloat16", "float16"))
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; repeatable; default: all")
    parser.add_argument("--form", action="append", choices=KINDS, help="repeatable; default: all; `one` always runs")
    parser.add_argument("--workers", type=numbers(int, 1), default=(1, 2), help="numbers of workers besides one: 1,2,4,8")
    parser.add_argument("--clients", type=numbers(int, 1), default=(1,), help="concurrent requests besides one: 1,4,16,64")
    budget = "maximum draft tokens per rank and step; default: 8, on emulated GPUs as many as pay off"
    parser.add_argument("--budget", type=int, help=budget)
    parser.add_argument("--records", type=int, default=1, help="records of each file, the first that fit")
    parser.add_argument("--max-tokens", type=int, default=48, help="maximum output tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per worker")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="workers use the first GPUs")
    emulated.add_options(parser)


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Measure all forms, strategies and numbers of concurrent requests in turns.

    Returns:
        ``skipped`` with reasons, ``workloads`` and ``overall`` with a row per entry, ``crossover``, ``prediction``, and the
        claims of the paper (``beside_figures``).

    Raises:
        ValueError, ModelLoadError: an unusable file or model.
    """
    if args.emulate is not None:
        return emulated.measure(args, run)
    import torch

    gpus = torch.cuda.device_count() if args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available()) else None
    model, choices = find_model(args.model), [c for c in chosen_strategies(args.strategy) if c.name != PLAIN]
    plain = chosen_strategies([PLAIN])[0]
    prompts = _read(args, model)
    asked = list(interleaved([[(name, text) for text in texts] for name, texts in prompts.items()]))
    clients = sorted({1, *args.clients})
    if len(asked) < clients[-1]:
        raise ValueError(f"{clients[-1]} requests at once need as many prompts, and there are {len(asked)}: raise --records")
    forms, skipped = forms_of(args.form or KINDS, args.workers, args.threads, gpus)
    names = [choice.label for choice in (plain, *choices)]
    entries = [Entry(form, name, count) for form in forms for count in clients for name in names]
    common = [
        f"model.dtype={args.dtype}", f"model.device={'cpu' if gpus is None else 'cuda'}", "engine.prefix_caching=false",
        f"engine.max_running={max(8, clients[-1])}", f"speculation.max_draft_tokens={args.budget}", "cache.enabled=false",
        f"speculation.strategies={_listed(choices)}",
    ]  # fmt: skip
    expected: dict[str, str] = {}
    memory: dict[str, dict[str, float]] = {}
    for repeat in range(args.repeats):
        for form in forms if repeat % 2 == 0 else [forms[0], *reversed(forms[1:])]:
            if form.label in skipped:
                continue
            run.progress.say(f"repeat {repeat + 1} of {args.repeats}: {form.label}")
            try:
                with served(model, [*common, *form.settings()]) as server:
                    own = [entry for entry in entries if entry.form == form]
                    _answer(server.url, Path(model).name, own, asked, args.max_tokens, expected, run)
                    memory[form.label] = memory_mib(server) if gpus is None else _gpu_mib(gpus)
            except RuntimeError as error:
                if form.kind == "one":
                    raise ValueError(f"one worker cannot be started: {error}") from error
                skipped[form.label] = str(error).strip().splitlines()[-1]  # the last line of its server
    entries = [entry for entry in entries if entry.form.label not in skipped]
    shape = _shape(model, args.dtype)
    results = results_of(entries, skipped, args.dtype, gpus, shape, memory)
    run.progress.say("calibrating one worker")
    curve = calibrated(model, args.dtype, "cpu" if gpus is None else "cuda", args.threads)
    hosts, gap_s = fitted_hosts(entries, curve)
    prediction = Prediction(curve, shape, expected, model, args.budget, hosts, gap_s)
    every = {choice.label: choice for choice in (plain, *choices)}
    told = beside(results["overall"], {form.label: form for form in forms}, every, plain, prediction)
    results["prediction"] = {"curve": curve.to_json(), **told}
    return results | {"figures": figures(list(results["overall"].values()), told)}


def _listed(choices: Sequence[StrategyChoice]) -> str:
    return "[" + ",".join(f'"{choice.label}"' for choice in choices) + "]"


def _shape(model: str, dtype: str) -> ModelShape | None:
    """Return the shape of a model for the simulation; None if its configuration is unlike Llama's."""
    config = load_config(model).get_text_config().to_dict()
    try:
        found = shape_of(Path(model).name, config)
    except (KeyError, TypeError):
        return None
    return ModelShape(**{name: getattr(found, name) for name in found.__slots__} | {"value_bytes": 4 if dtype in _EXACT else 2})


def _gpu_mib(gpus: int) -> dict[str, float]:
    """Return the memory in use on each GPU."""
    import torch

    return {f"gpu {at}": round(torch.cuda.device_memory_used(at) / 2**20, 1) for at in range(gpus)}


def _read(args: argparse.Namespace, model: str) -> dict[str, list[str]]:
    """Return the first prompts of each file that fit. Raises ``ValueError`` for too few."""
    tokenizer, context = load_tokenizer(model), int(load_config(model).get_text_config().max_position_embeddings)
    found = {}
    for path in args.prompts:
        fitting = [record.prompt for record, _ in fitting_records(read_prompts(path), tokenizer, context - args.max_tokens)]
        if len(fitting) < args.records:
            raise ValueError(f"{path.stem} has {len(fitting)} prompts that fit, {args.records} are needed: lower --records")
        found[path.stem] = fitting[: args.records]
    return found


def _answer(
    url: str, model: str, entries: Sequence[Entry], asked: Sequence[tuple[str, str]], max_tokens: int, expected: dict[str, str],
    run: Run,
) -> None:  # fmt: skip
    """Run all entries of a form on all prompts; the first text for a prompt becomes the expected one."""
    texts = [text for _, text in asked]
    for entry in entries:
        spoken = {"max_draft_tokens": 0} if entry.strategy == PLAIN else {"strategy": entry.strategy}
        body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "cache": "off", "speculation": spoken}
        ask(url, body, texts[: entry.clients], entry.clients)  # warm-up: compilation, tables
        by_workload: dict[str, list[str]] = {}
        for name, text in asked:
            by_workload.setdefault(name if entry.clients == 1 else "all", []).append(text)
        for name, own in by_workload.items():
            done, said = ask(url, body, own, entry.clients)
            entry.rounds.setdefault(name, []).append(done)
            entry.differing += sum(told != expected.setdefault(text, told) for text, told in zip(own, said, strict=True))
        run.progress.note(entry.label)


def results_of(
    entries: Sequence[Entry], skipped: Mapping[str, str], dtype: str, gpus: int | None, shape: ModelShape | None,
    memory: Mapping[str, Mapping[str, float]],
) -> Results:  # fmt: skip
    """Return the results without the prediction; see ``measure``."""
    rows = {
        entry.label: row_of(entry, one_worker(entries, entry.clients), shape, memory.get(entry.form.label, {}))
        for entry in entries
    }
    alone = [entry for entry in entries if entry.clients == 1]
    workloads = {
        name: {
            "entries": {entry.label: {"decode_tokens_per_s": [round(rate, 2) for rate in entry.rates(name)]} for entry in alone}
        }
        for name in alone[0].rounds
    }
    own = {"skipped": dict(skipped), "workloads": workloads, "overall": rows, "crossover": crossover(list(rows.values()))}
    paper = {"workloads": workloads, "overall": {label: row for label, row in rows.items() if row["clients"] == 1}}
    return own | beside_figures(paper, dtype, "cpu" if gpus is None else "cuda")


def parted(results: Results, args: argparse.Namespace) -> list[str]:
    """Return the entries with outputs unlike plain decoding's; none in dtypes whose rounding may change them."""
    if args.emulate is not None:
        rows = results.get("overall", {}).items()
        return [f"{label}: {row['differing']} outputs are not the known ones" for label, row in rows if row["differing"]]
    if args.dtype not in _EXACT:
        return []
    rows = results["overall"].items()
    return [
        f"{label}: {row['identical']} of {row['records']} as plain" for label, row in rows if row["identical"] < row["records"]
    ]


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 if a number or a file is given twice."""
    check_prompts(args, parser)
    check_distinct(args, parser, "workers", "clients")
    emulated.check_options(args, parser)
    if args.emulate is None and args.budget is None:
        args.budget = 8


BENCH = Bench(
    "bench-scaling", TEXT, measure, options, dict.fromkeys(("budget", "records", "repeats", "threads"), 1) | {"max_tokens": 2},
    check, parted,
)  # fmt: skip
