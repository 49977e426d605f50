"""Our engine beside transformers' ``generate``, in one run: the same tokens, and how much sooner.

    python -m experiments.against_transformers --model demo_model --workloads ../shared/workloads/open/llma_rag.jsonl

For every record that fits: ``generate`` greedy (sdpa, its own cache), ``generate`` with its prompt lookup, and the engine with
each strategy. The contestants take turns on each group of records, so that a drift of the machine hits all alike. In float32 and
float64 the exit code is 1 if a lossless strategy gives another token than ``generate``. In shorter types a forward rounds by its
number of rows, so outputs may part where the two best tokens are nearly equal: the gap between them is recorded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from cluster.prompt_file import PromptFileError, read_prompts
from cluster.strategy_option import StrategyChoice
from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from engine.loading import LoadedModel, load_model, load_weights
from experiments.competition import compete, divergence, progress_bar, summary
from experiments.contestants import EngineContestant, Prompt
from experiments.record import RESULTS, write_record
from experiments.shared_model import SharedModel
from experiments.stock_generate import LOOKUP_TOKENS, StockGenerate, StockPromptLookup
from experiments.workloads import fits, prompt_ids

EXACT_DTYPES = ("float32", "float64")


def load_prompts(paths: Sequence[Path], model: LoadedModel, max_tokens: int, limit: int | None) -> tuple[list[Prompt], int]:
    """The records that fit, in the order of the files, at most ``limit``; and how many did not fit.

    Raises:
        PromptFileError: a workload cannot be read, or two records have one id.
    """
    tokenizer, too_long = model.tokenizer, 0
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for record in (record for path in paths for record in read_prompts(path)):
        if len(prompts) == limit:
            break
        if record.id in seen:
            raise PromptFileError(f"two records have the id {record.id!r}: give each its own")
        seen.add(record.id)
        ids = prompt_ids(record, tokenizer)
        if fits(len(ids), max_tokens, model.max_model_len):
            references = [tokenizer.encode(text, add_special_tokens=False) for text in record.references]
            prompts.append(Prompt(record.id, ids, references))
        else:
            too_long += 1
    return prompts, too_long


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Loads everything and lets it compete; returns the results and the device.

    Raises:
        PromptFileError: a workload cannot be read, or no record of any fits.
    """
    model_options = ModelOptions(args.model, dtype=args.dtype, device=args.device, threads=args.threads)
    options = EngineOptions(max_running=args.batch_size, max_waiting=args.batch_size, prefix_caching=False)
    loaded = load_model(model_options)
    shared = SharedModel(loaded, options, SpeculationOptions().max_draft_tokens)
    device, end_tokens = str(loaded.model.device), loaded.eos_token_ids
    stock = load_weights(args.model, getattr(torch, args.dtype), "sdpa", loaded.model.device).eval()
    prompts, too_long = load_prompts(args.workloads, loaded, args.max_tokens, args.limit)
    if not prompts:
        raise PromptFileError(f"no record fits the context of {loaded.max_model_len} tokens with --max-tokens {args.max_tokens}")
    baseline = StockGenerate(stock, args.max_tokens, end_tokens)
    lookup = StockPromptLookup(stock, args.max_tokens, end_tokens)
    choices = [StrategyChoice(name, name, {}) for name in args.strategies.split(",")]
    ours = [EngineContestant(partial(shared.engine, choice), args.max_tokens) for choice in choices]
    with progress_bar() as progress:
        expected, tallies = compete([baseline, lookup, *ours], prompts, args.repeats, args.batch_size, progress)
    by_id = {prompt.id: prompt for prompt in prompts}
    contestants = {}
    for name, tally in tallies.items():
        parted = [divergence(stock, by_id[key], expected[key], output) for key, output in tally.differing.items()]
        contestants[name] = summary(tally, tallies[baseline.name], parted, len(prompts), args.repeats)
    results = {
        "records": len(prompts),
        "too_long": too_long,
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
        "lossless": [contestant.name for contestant in ours if contestant.engine.info.lossless],
        "contestants": contestants,
        "record_ids": list(by_id),
    }
    return results, device


def unfaithful(results: dict[str, Any], dtype: str) -> list[str]:
    """The lossless strategies with an output that is not generate's; none in a type whose rounding excuses it."""
    if dtype not in EXACT_DTYPES:
        return []
    return [name for name in results["lossless"] if results["contestants"][name]["identical"] < results["records"]]


def table(results: dict[str, Any]) -> Table:
    """A row a contestant."""
    shown = Table(Column("contestant", no_wrap=True), "identical", "speed-up", "min-max", "tok/step", "tok/s", "gap")
    for name, row in results["contestants"].items():
        identical = f"{row['identical']}/{results['records']}"
        spread = f"{min(row['speedup']):.2f}-{max(row['speedup']):.2f}"
        gap = "" if row["largest_gap"] is None else f"{row['largest_gap']:.3g}"
        rates = (f"{row['tokens_per_step']:.2f}", f"{row['tokens_per_s']:.0f}")
        shown.add_row(name, identical, f"{row['speedup_median']:.2f}", spread, *rates, gap)
    return shown


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo_model", help="folder of the model, or its name on the hub")
    parser.add_argument("--workloads", type=Path, nargs="+", required=True, help="JSON-lines files with id, prompt, references")
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--strategies", default="llma,prompt_lookup,autoregressive", help="of the engine, with commas between")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=1, help="records at once; transformers' prompt lookup always takes one")
    parser.add_argument("--limit", type=int, help="at most so many records")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; the exit code says whether the outputs are what they must be."""
    args, started, console = arguments(argv), datetime.now(UTC), Console()
    torch.set_num_threads(args.threads)
    results, device = measure(args)
    config = vars(args) | {"prompts": "one user message in the model's chat template", "prompt_lookup_num_tokens": LOOKUP_TOKENS}
    path = write_record("against-transformers", config, results, None, started, device, args.results)
    console.print(table(results))
    console.print(f"{results['too_long']} records do not fit; record: {path.name}")
    wrong = unfaithful(results, args.dtype)
    if wrong:
        console.print(f"not identical to generate in {args.dtype}: {', '.join(wrong)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
