"""Plain decoding, without drafts: our engine with ``autoregressive`` beside transformers, in one run.

    python -m experiments.plain_decoding --random-model 110m --threads 2

Our engine at several batch sizes; transformers' ``generate`` with its own cache, alone and as a padded batch; its prompt lookup;
its continuous batching (``generate_batch``). They take turns, so that a drift of the machine hits all alike; each repeat gives a
ratio. What is measured is decoding: tokens after the first of each request, over the seconds after all requests of a batch have
their first. Prompts are random tokens or cut from files, all of one length; outputs have one length, so that a batch stays full.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table
from transformers import PreTrainedModel

from cluster.known_texts import TextTokenizer
from cluster.prompt_file import PromptFileError, read_prompts
from configs.slices import EngineOptions
from decoding.drafters import build_drafter
from decoding.request import Request, SamplingParams
from engine.attention import TREE_ATTENTION
from engine.engine import Engine
from engine.executor import LocalExecutor
from engine.loading import ModelInfo, load_weights
from engine.runner import ModelRunner
from experiments.bench_models import LIBRARY_FAULTS, calm
from experiments.competition import progress_bar
from experiments.contestants import Contestant, Prompt, Run
from experiments.guided import SIZES, random_model, stock_twin
from experiments.plots import plain_decoding
from experiments.record import RESULTS, write_record
from experiments.run_options import refused
from experiments.stock_batching import StockBatching
from experiments.stock_generate import LOOKUP_TOKENS, StockGenerate, StockPromptLookup

VOCAB = 50_257  # of the random models: GPT-2's
ENGINE = "autoregressive"

Cell = tuple[str, int]  # a contestant and a batch size


class PlainEngine:
    """Our engine with ``autoregressive``. A prompt's KV is never reused."""

    name = ENGINE

    def __init__(self, model: PreTrainedModel, options: EngineOptions, context: int, max_tokens: int) -> None:
        """
        Args:
            model: with tree attention.
            options: enough slots for a batch, and a step that takes all of its prompts.
            context: tokens of prompt and output together.
            max_tokens: of each output.
        """
        info = ModelInfo(
            served_name=ENGINE, max_model_len=context, vocab_size=model.config.get_text_config().vocab_size,
            dtype=str(model.dtype).removeprefix("torch."), device=str(model.device), num_parameters=model.num_parameters(),
            eos_token_ids=(), strategy=ENGINE, lossless=True, model_revision="", tokenizer_revision="",
        )  # fmt: skip
        executor = LocalExecutor(ModelRunner(model, options.max_running, context))
        self._engine = Engine(executor, build_drafter(ENGINE, {}), options, 0, info)
        self._max_tokens = max_tokens

    def renew(self) -> None:
        """It keeps nothing: its requests have no tenant."""

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """See ``Contestant``. The prefill lasts until each prompt has its first token."""
        requests = [Request(prompt.id, prompt.ids, SamplingParams(self._max_tokens)) for prompt in prompts]
        began = time.perf_counter()
        for request in requests:
            self._engine.add(request)
        without, prefill_s = {request.request_id for request in requests}, 0.0
        while self._engine.has_work:
            without -= {output.request_id for output in self._engine.step()}
            if not without and not prefill_s:
                prefill_s = time.perf_counter() - began
        wall_s = time.perf_counter() - began
        outputs = [request.output_ids.tolist() for request in requests]
        return Run(outputs, sum(map(len, outputs)), prefill_s, wall_s - prefill_s, 0.0, 0)


def prompts_of(args: argparse.Namespace, vocab_size: int) -> list[Prompt]:
    """As many prompts as the largest batch takes, of one length.

    Raises:
        PromptFileError: a file that cannot be read, or holds too little text.
    """
    count, length = max(args.batches), args.prompt_tokens
    if args.prompts is None:
        drawn = np.random.default_rng(args.seed).integers(1, vocab_size, (count, length)).tolist()
        return [Prompt(str(number), ids, []) for number, ids in enumerate(drawn)]
    texts = [record.prompt for path in args.prompts for record in read_prompts(path)]
    cut = [ids[:length] for ids in TextTokenizer(args.tokenizer or Path(args.model)).encode(texts) if len(ids) >= length]
    if len(cut) < count or max(map(max, cut)) >= vocab_size:
        fault = f"{len(cut)} prompts have {length} tokens of the model's, and the largest batch takes {count}"
        raise PromptFileError(f"{fault}: give more files, lower --prompt-tokens, or the tokenizer of the model")
    return [Prompt(str(number), ids, []) for number, ids in enumerate(cut[:count])]


def models(args: argparse.Namespace, context: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model as our engine and as transformers runs it; no token ends an output."""
    dtype = getattr(torch, args.dtype)
    if args.random_model is None:
        ours = load_weights(args.model, dtype, TREE_ATTENTION).eval()
    else:
        ours = random_model(args.random_model, VOCAB, context, dtype, args.seed)
    stock = stock_twin(ours)
    stock.generation_config.eos_token_id = None
    return ours, stock


def cells(args: argparse.Namespace) -> tuple[dict[Cell, Callable[[], Run]], PreTrainedModel]:
    """What runs, by contestant and batch size, and the model.

    Raises:
        PromptFileError: prompts that cannot be used.
    """
    context, most = args.prompt_tokens + args.output_tokens, max(args.batches)
    ours, stock = models(args, context)
    prompts = prompts_of(args, ours.config.get_text_config().vocab_size)
    options = EngineOptions(max_running=most, max_step_tokens=most * args.prompt_tokens)
    tokens, stock_batches = args.output_tokens, sorted({1, min(8, most)})
    batching = StockBatching(stock, tokens, (), most, context, options.max_step_tokens, prefix_caching=False)
    field: list[tuple[Contestant, Sequence[int]]] = [
        (PlainEngine(ours, options, context, tokens), args.batches),
        (StockGenerate(stock, tokens, ()), stock_batches),
        (StockPromptLookup(stock, tokens, ()), [1]),
        (batching, stock_batches),
    ]
    runs: dict[Cell, Callable[[], Run]] = {
        (contestant.name, batch): partial(contestant.run, prompts[:batch]) for contestant, batches in field for batch in batches
    }
    return runs, ours


def measure(runs: Mapping[Cell, Callable[[], Run]], repeats: int) -> dict[str, Any]:
    """Lets all cells run in turns.

    Returns:
        ``tokens_per_s`` of each contestant by batch size, one figure a repeat; ``ratios``; ``identical``, see there; and
        ``skipped``, by cell why it cannot run.
    """
    outputs: dict[Cell, list[list[int]]] = {}
    skipped: dict[str, str] = {}
    rates: dict[Cell, list[float]] = {}
    with progress_bar() as progress:
        task = progress.add_task("in turns", total=(repeats + 1) * len(runs))
        for repeat, (cell, run) in itertools.product(range(repeats + 1), runs.items()):
            progress.advance(task)
            if f"{cell[0]} {cell[1]}" in skipped:
                continue
            began = time.perf_counter()
            try:
                done = run()
            except LIBRARY_FAULTS as error:  # the record says that it cannot run here, and why
                if cell[0] == ENGINE:
                    raise
                skipped[f"{cell[0]} {cell[1]}"] = f"{type(error).__name__}: {error}"
                continue
            took = time.perf_counter() - began
            outputs[cell] = done.outputs
            if repeat:  # the first one warms up
                after = sum(map(len, done.outputs)) - len(done.outputs)
                rates.setdefault(cell, []).append(after / (took - done.prefill_s))
    by_name: dict[str, dict[int, list[float]]] = {}
    for (name, batch), values in rates.items():
        by_name.setdefault(name, {})[batch] = [round(value, 2) for value in values]
    return {"tokens_per_s": by_name, "ratios": ratios(by_name), "identical": identical(outputs), "skipped": skipped}


def ratios(rates: Mapping[str, Mapping[int, Sequence[float]]]) -> dict[str, list[float]]:
    """Our engine against transformers at the same batch size, and against itself at batch 1, repeat by repeat."""
    ours = rates[ENGINE]
    pairs = {
        f"{ENGINE} / {name}, batch {batch}": (ours[batch], theirs)
        for name, by_batch in rates.items()
        for batch, theirs in by_batch.items()
        if name != ENGINE and batch in ours
    }
    pairs |= {f"{ENGINE}, batch {batch} / batch 1": (ours[batch], ours[1]) for batch in ours if batch > 1 and 1 in ours}
    return {label: [round(a / b, 3) for a, b in zip(above, below, strict=True)] for label, (above, below) in pairs.items()}


def identical(outputs: Mapping[Cell, Sequence[Sequence[int]]]) -> dict[str, str]:
    """By cell, how many of its outputs are those of our engine's largest batch: in float32 all, unless two tokens tie."""
    reference = outputs[max((cell for cell in outputs if cell[0] == ENGINE), key=lambda cell: cell[1])]
    return {
        f"{name} {batch}": f"{sum(list(a) == list(b) for a, b in zip(own, reference, strict=False))}/{len(own)}"
        for (name, batch), own in outputs.items()
    }


def table(results: Mapping[str, Any]) -> Table:
    """A row a cell, then a row a ratio."""
    shown = Table("", Column("median", justify="right"), Column("min-max", justify="right"))
    for name, by_batch in results["tokens_per_s"].items():
        for batch, values in by_batch.items():
            spread = f"{min(values):.1f}-{max(values):.1f}"
            shown.add_row(f"{name}, batch {batch}: tokens/s", f"{statistics.median(values):.1f}", spread)
    shown.add_section()
    for label, values in results["ratios"].items():
        shown.add_row(label, f"{statistics.median(values):.2f}", f"{min(values):.2f}-{max(values):.2f}")
    return shown


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder of a model")
    which.add_argument("--random-model", choices=sorted(SIZES), help="a Llama with random weights and 50,257 tokens")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="of torch; default: 2")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of our engine; default: 1 2 4 8 16")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each prompt; default: 128")
    parser.add_argument("--output-tokens", type=int, default=64, help="of each output; default: 64")
    parser.add_argument("--prompts", type=Path, nargs="+", help="files to cut prompts from; random tokens when absent")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer that cuts them; default: the model's")
    parser.add_argument("--repeats", type=int, default=3, help="default: 3")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and prompts; default: 0")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record; default: experiments/results")
    args = parser.parse_args(argv)
    if min(*args.batches, args.prompt_tokens, args.output_tokens - 1, args.repeats, args.threads) < 1:
        parser.error("--batches, --prompt-tokens, --repeats and --threads must be at least 1, --output-tokens at least 2")
    if args.prompts and args.random_model and args.tokenizer is None:
        parser.error("--prompts with --random-model needs --tokenizer")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; 2 for prompts that cannot be used."""
    args, started = arguments(argv), datetime.now(UTC)
    calm(args.threads)
    try:
        runs, model = cells(args)
    except PromptFileError as error:
        return refused(error)
    results = measure(runs, args.repeats)
    config = vars(args) | {"prompt_lookup_num_tokens": LOOKUP_TOKENS, "num_parameters": model.num_parameters()}
    path = write_record(
        "plain-decoding", config, json.loads(json.dumps(results)), args.seed, started, str(model.device), args.out
    )
    plain_decoding(results, path.with_suffix(".svg"))
    Console(width=None if sys.stdout.isatty() else 120).print(table(results))
    for cell, reason in results["skipped"].items():
        print(f"{cell} does not run: {reason}", file=sys.stderr)
    print(f"record: {path.name}, figure: {path.stem}.svg", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
