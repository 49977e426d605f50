"""``outrider bench scaling``: one worker beside lookahead, tensor and pipeline parallelism, on the same prompts."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster.cli.generate.prompt_file import read_prompts
from cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies
from configs.schema import find_model
from decoding.request import PLAIN
from engine.loading.model import load_config
from engine.text.tokenizer import load_tokenizer
from experiments.bench.figure import panel
from experiments.bench.options import add_model, add_prompts, check_prompts, numbers
from experiments.bench.run import Bench, Results, Run
from experiments.bench.workloads import fitting_records, interleaved
from experiments.papers.numbers.scaling import beside_figures
from experiments.service.served import ENGINE_SECONDS, engine_seconds, served

TEXT = """Strong scaling: the same prompts, one request at a time, answered by one worker and by several that work together.

A worker is a GPU, or on a CPU a process with --threads threads. The forms that compete, each an `outrider serve` of its own:
  one         one worker
  threads     one worker with as many threads as N workers have (CPUs alone)
  lookahead   LP, lookahead parallelism: N copies of the model share each step's draft tree
  tensor      TP by DeepSpeed: each of N workers has a slice of every layer
  pipeline    PP: each of N workers has some of the layers
Each answers with plain decoding, one token a step, and with every --strategy, greedily. In each repeat every form is started
anew, every other time in reverse, so that a drift of the machine hits all alike. Times are the engine's own, from the first
token to the last; the way over HTTP is not in them. A form that cannot run here is left out by name, with the reason. Every
output is compared with that of plain decoding on one worker. Let nothing else run: ranks that wait take many times as long.

example, some minutes with a real model on two cores:
  outrider bench scaling --model smollm2-135m-instruct --prompts chat.jsonl code.jsonl --strategy auto --strategy jacobi
"""
KINDS = ("one", "threads", "lookahead", "tensor", "pipeline")
_NAMES = {"one": "", "threads": "", "lookahead": "LP ", "tensor": "TP ", "pipeline": "PP "}
_EXACT = ("float32",)


@dataclass(frozen=True, slots=True)
class Form:
    """A way to put workers to one request."""

    kind: str  # of ``KINDS``
    workers: int  # that it has; threads of one rank count as workers, too
    threads: int  # of each worker

    @property
    def ranks(self) -> int:
        """Processes that compute."""
        return 1 if self.kind in ("one", "threads") else self.workers

    @property
    def rank_threads(self) -> int:
        """Torch threads of each."""
        return self.threads * self.workers // self.ranks

    @property
    def label(self) -> str:
        """For tables: ``LP 2 x 1`` has two ranks with a thread each."""
        return f"{_NAMES[self.kind]}{self.ranks} x {self.rank_threads}"

    def settings(self) -> list[str]:
        """Of its server."""
        found = [f"model.threads={self.rank_threads}", "server.cpus_per_replica=0.5"]
        if self.ranks > 1:
            found += [f"parallelism.mode={self.kind}", f"parallelism.world_size={self.ranks}", "parallelism.adaptive=false"]
        return found


def forms_of(kinds: Sequence[str], workers: Sequence[int], threads: int, gpus: int | None) -> tuple[list[Form], dict[str, str]]:
    """The forms that can be tried, one worker first, and by label why the others cannot.

    Args:
        kinds: of ``KINDS``.
        workers: numbers of them, from 2 on.
        threads: of each.
        gpus: of this machine, to compute on; None to compute on its processor.
    """
    found, skipped = [Form("one", 1, threads)], {}
    for count, kind in itertools.product(workers, KINDS[1:]):
        form = Form(kind, count, threads)
        reason = _missing(form, gpus)
        if kind in kinds and reason is None:
            found.append(form)
        elif kind in kinds:
            skipped[form.label] = reason or ""
    return found, skipped


def _missing(form: Form, gpus: int | None) -> str | None:
    """What a form needs and does not find."""
    if form.kind == "threads" and gpus is not None:
        return "a GPU has no threads of ours"
    if gpus is not None and gpus < form.workers:
        return f"this machine has {gpus} GPU{'s' * (gpus != 1)}"
    if form.kind == "tensor" and find_spec("deepspeed") is None:
        return "DeepSpeed is not installed: pip install -e '.[baselines]'"
    return None


@dataclass(frozen=True, slots=True)
class Timed:
    """One request, as its engine saw it."""

    tokens: int
    whole_s: float
    decode_s: float  # after the first token
    text: str


def ask(connection: http.client.HTTPConnection, body: Mapping[str, Any], prompt: str) -> Timed:
    """Asks for a whole answer: nothing is streamed, so that nobody but the engine computes meanwhile.

    Raises:
        RuntimeError: it is refused.
    """
    before = engine_seconds(connection)
    data = json.dumps({**body, "messages": [{"role": "user", "content": prompt}]})
    connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {answer}")
    after = engine_seconds(connection)
    _, whole_s, decode_s = (after[name] - before[name] for name in ENGINE_SECONDS)
    return Timed(answer["usage"]["completion_tokens"], whole_s, decode_s, answer["choices"][0]["message"]["content"] or "")


@dataclass(slots=True)
class Entry:
    """A strategy in a form, and what it did: by workload, the requests of each repeat."""

    form: Form
    strategy: str
    timed: dict[str, list[list[Timed]]] = field(default_factory=dict)
    differing: int = 0

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.form.label}, {'plain' if self.strategy == PLAIN else self.strategy}"

    def rates(self, workload: str) -> list[float]:
        """Tokens per second after the first tokens, repeat by repeat."""
        return [sum(one.tokens - 1 for one in own) / sum(one.decode_s for one in own) for own in self.timed[workload]]


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_prompts(parser)
    add_model(parser, "float32", ("float32", "bfloat16", "float16"))
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; several times; all when absent")
    parser.add_argument("--form", action="append", choices=KINDS, help="several times; all when absent, `one` always")
    parser.add_argument("--workers", type=numbers(int, 2), default=(2,), help="numbers of workers beside one: 2,4,8")
    parser.add_argument("--budget", type=int, default=8, help="most drafted rows of a rank in a step")
    parser.add_argument("--records", type=int, default=1, help="of each file, the first that fit")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an output")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a worker")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="workers are the GPUs from the first on"
    )


def measure(args: argparse.Namespace, run: Run) -> Results:
    """All forms and strategies in turns.

    Returns:
        ``skipped`` with reasons, ``workloads`` and ``overall`` with a row an entry, and what ``beside_figures`` says.

    Raises:
        ValueError, ModelLoadError: a file or a model that cannot be used.
    """
    import torch

    gpus = torch.cuda.device_count() if args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available()) else None
    model, choices = find_model(args.model), [c for c in chosen_strategies(args.strategy) if c.name != PLAIN]
    prompts = _read(args, model)
    forms, skipped = forms_of(args.form or KINDS, args.workers, args.threads, gpus)
    entries = [Entry(form, name) for form in forms for name in (PLAIN, *(choice.label for choice in choices))]
    common = [
        f"model.dtype={args.dtype}", f"model.device={'cpu' if gpus is None else 'cuda'}", "engine.prefix_caching=false",
        f"speculation.max_draft_tokens={args.budget}", "cache.enabled=false", f"speculation.strategies={_listed(choices)}",
    ]  # fmt: skip
    expected: dict[str, str] = {}
    for repeat in range(args.repeats):
        for form in forms if repeat % 2 == 0 else [forms[0], *reversed(forms[1:])]:
            if form.label in skipped:
                continue
            run.progress.say(f"repeat {repeat + 1} of {args.repeats}: {form.label}")
            try:
                with served(model, [*common, *form.settings()]) as server:
                    own = [entry for entry in entries if entry.form == form]
                    _answer(server.url, Path(model).name, own, prompts, args.max_tokens, expected, run)
            except RuntimeError as error:
                if form.kind == "one":
                    raise ValueError(f"one worker cannot be started: {error}") from error
                skipped[form.label] = str(error)
    return _results([entry for entry in entries if entry.form.label not in skipped], skipped, args, gpus)


def _listed(choices: Sequence[StrategyChoice]) -> str:
    return "[" + ",".join(f'"{choice.label}"' for choice in choices) + "]"


def _read(args: argparse.Namespace, model: str) -> dict[str, list[str]]:
    """The first prompts of each file that fit. Raises ``ValueError`` where there are too few."""
    tokenizer, context = load_tokenizer(model), int(load_config(model).get_text_config().max_position_embeddings)
    found = {}
    for path in args.prompts:
        fitting = [record.prompt for record, _ in fitting_records(read_prompts(path), tokenizer, context - args.max_tokens)]
        if len(fitting) < args.records:
            raise ValueError(f"{path.stem} has {len(fitting)} prompts that fit, {args.records} are needed: lower --records")
        found[path.stem] = fitting[: args.records]
    return found


def _answer(
    url: str, model: str, entries: Sequence[Entry], prompts: Mapping[str, Sequence[str]], max_tokens: int,
    expected: dict[str, str], run: Run,
) -> None:  # fmt: skip
    """All entries of a form on all prompts, one request at a time; the first text to a prompt is what is expected."""
    at = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(at.hostname or "", at.port, timeout=600)) as connection:
        asked = list(interleaved([[(name, text) for text in texts] for name, texts in prompts.items()]))
        for entry in entries:
            spoken = {"max_draft_tokens": 0} if entry.strategy == PLAIN else {"strategy": entry.strategy}
            body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "speculation": spoken}
            ask(connection, body, asked[0][1])  # code is compiled, tables are read
            for name in prompts:
                entry.timed.setdefault(name, []).append([])
            for name, text in asked:
                timed = ask(connection, body, text)
                entry.timed[name][-1].append(timed)
                entry.differing += timed.text != expected.setdefault(text, timed.text)
            run.progress.note(entry.label)


def _results(entries: Sequence[Entry], skipped: dict[str, str], args: argparse.Namespace, gpus: int | None) -> Results:
    base = entries[0]
    rows = {entry.label: _row(entry, base) for entry in entries}
    workloads = {
        name: {
            "entries": {entry.label: {"decode_tokens_per_s": [round(rate, 2) for rate in entry.rates(name)]} for entry in entries}
        }
        for name in base.timed
    }
    speed: dict[str, dict[str, list[float]]] = {}
    for entry in entries:
        speed.setdefault(entry.form.label, {})[entry.strategy] = rows[entry.label]["decode_ratio"]["plain"]
    own = {"skipped": skipped, "workloads": workloads, "overall": rows}
    figures = {"speed after the first token": panel("bars", "", "", "times plain decoding on one worker", speed)}
    return own | beside_figures(own, args.dtype, "cpu" if gpus is None else "cuda") | {"figures": figures}


def _row(entry: Entry, base: Entry) -> dict[str, Any]:
    """An entry over all workloads; the ratio is the mean over them, repeat by repeat."""
    pairs = [[a / b for a, b in zip(entry.rates(name), base.rates(name), strict=True)] for name in entry.timed]
    done = [one for lists in entry.timed.values() for own in lists for one in own]
    form = entry.form
    return {
        "form": form.label, "kind": form.kind, "workers": form.workers, "ranks": form.ranks, "threads": form.rank_threads,
        "strategy": entry.strategy,
        "tokens_per_s": round(sum(one.tokens for one in done) / sum(one.whole_s for one in done), 2),
        "identical": len(done) - entry.differing, "records": len(done),
        "decode_ratio": {"plain": [round(statistics.fmean(repeat), 3) for repeat in zip(*pairs, strict=True)]},
    }  # fmt: skip


def parted(results: Results, args: argparse.Namespace) -> list[str]:
    """The entries whose outputs are not all plain decoding's; none where the type's rounding excuses it."""
    if args.dtype not in _EXACT:
        return []
    rows = results["overall"].items()
    return [
        f"{label}: {row['identical']} of {row['records']} as plain" for label, row in rows if row["identical"] < row["records"]
    ]


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the process with code 2 where a number of workers or a file is named twice."""
    check_prompts(args, parser)
    if len(set(args.workers)) < len(args.workers):
        parser.error("--workers must name no number twice")


BENCH = Bench(
    "bench-scaling", TEXT, measure, options, dict.fromkeys(("budget", "records", "repeats", "threads"), 1) | {"max_tokens": 2},
    check, parted,
)  # fmt: skip
