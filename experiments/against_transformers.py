"""Our engine beside transformers' ``generate``, in one run: the same tokens, and how much sooner.

    python -m experiments.against_transformers --model demo_model --workloads ../shared/workloads/open/llma_rag.jsonl

For every record that fits: ``generate`` greedy (sdpa, its own cache), ``generate`` with its prompt lookup, and the engine with
each strategy. The contestants take turns on each group of records, so that a drift of the machine hits all alike. In float32 and
float64 the exit code is 1 if a lossless strategy gives another token than ``generate``. In shorter types a forward rounds by its
number of rows, so outputs may part where the two best tokens are nearly equal: the gap between them is recorded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.prompt_file import PromptFileError, read_prompts
from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from engine.engine import Engine
from experiments.contestants import LOOKUP_TOKENS, Contestant, EngineContestant, Prompt, StockGenerate, StockPromptLookup
from experiments.record import RESULTS, write_record
from experiments.workloads import fits, prompt_ids

EXACT_DTYPES = ("float32", "float64")


@dataclass(slots=True)
class Tally:
    """What one contestant did in all repeats."""

    wall_s: list[float]  # per repeat
    tokens: int = 0
    steps: int = 0
    differing: dict[str, list[int]] = field(default_factory=dict)  # record id -> first output that is not that of generate


def compete(
    contestants: Sequence[Contestant], prompts: Sequence[Prompt], repeats: int, batch_size: int, progress: Progress
) -> tuple[dict[str, list[int]], dict[str, Tally]]:
    """Runs everything; the first group is run once more before, untimed, to warm up.

    Returns:
        The output of the first contestant on each record when it runs alone, by id, and a tally per contestant.
    """
    groups = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    task = progress.add_task("reference", total=len(prompts))
    expected: dict[str, list[int]] = {}
    for prompt in prompts:
        expected[prompt.id] = contestants[0].run([prompt])[0][0]
        progress.advance(task)
    tallies = {contestant.name: Tally([0.0] * repeats) for contestant in contestants}
    for contestant in contestants:
        contestant.run(groups[0])
    task = progress.add_task("in turns", total=repeats * len(groups) * len(contestants))
    for repeat in range(repeats):
        for group in groups:
            for contestant in contestants:
                tally, started = tallies[contestant.name], time.perf_counter()
                outputs, steps = contestant.run(group)
                tally.wall_s[repeat] += time.perf_counter() - started
                tally.steps += steps
                for prompt, output in zip(group, outputs, strict=True):
                    tally.tokens += len(output)
                    if output != expected[prompt.id]:
                        tally.differing.setdefault(prompt.id, output)
                progress.advance(task)
    return expected, tallies


@torch.inference_mode()
def divergence(model: PreTrainedModel, prompt: Prompt, expected: list[int], output: list[int]) -> dict[str, Any]:
    """Where an output leaves that of ``generate``, and how close the target's two best tokens are there.

    Returns:
        ``position`` in the output, ``top_logit``, the ``gap`` to the second one, and whether the outputs hold these two tokens.
    """
    shared = next((i for i, (a, b) in enumerate(zip(expected, output, strict=False)) if a != b), min(len(expected), len(output)))
    tokens = torch.tensor([prompt.ids + expected[:shared]], device=model.device)
    best = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1].double().topk(2)
    first, second = best.values.tolist()
    are_top_two = set(expected[shared : shared + 1] + output[shared : shared + 1]) == set(best.indices.tolist())
    return {"id": prompt.id, "position": shared, "top_logit": first, "gap": first - second, "top_two": are_top_two}


def summary(tally: Tally, baseline: Tally, divergences: list[dict[str, Any]], num_prompts: int, repeats: int) -> dict[str, Any]:
    """The figures of one contestant; ``speedup`` is generate's seconds over its own, repeat by repeat."""
    speedups = [base / own for base, own in zip(baseline.wall_s, tally.wall_s, strict=True)]
    gaps = [entry["gap"] for entry in divergences]
    return {
        "wall_s": [round(seconds, 3) for seconds in tally.wall_s],
        "speedup": [round(speedup, 3) for speedup in speedups],
        "speedup_median": round(statistics.median(speedups), 3),
        "output_tokens": tally.tokens // repeats,
        "tokens_per_s": round(tally.tokens / sum(tally.wall_s), 1),
        "tokens_per_step": round(tally.tokens / tally.steps, 3),
        "identical": num_prompts - len(tally.differing),
        "identical_share": round(1 - len(tally.differing) / num_prompts, 4),
        "largest_gap": max(gaps, default=None),
        "divergences": divergences,
    }


def load_prompts(paths: Sequence[Path], engine: Engine, max_tokens: int, limit: int | None) -> tuple[list[Prompt], int]:
    """The records that fit, in the order of the files, at most ``limit``; and how many did not fit.

    Raises:
        PromptFileError: a workload cannot be read, or two records have one id.
    """
    tokenizer, too_long = engine.tokenizer, 0
    assert tokenizer is not None
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for record in (record for path in paths for record in read_prompts(path)):
        if len(prompts) == limit:
            break
        if record.id in seen:
            raise PromptFileError(f"two records have the id {record.id!r}: give each its own")
        seen.add(record.id)
        ids = prompt_ids(record, tokenizer)
        if fits(len(ids), max_tokens, engine.info.max_model_len):
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
    options = EngineOptions(max_running=args.batch_size, max_waiting=args.batch_size)
    engines = [Engine.load(model_options, options, SpeculationOptions(name)) for name in args.strategies.split(",")]
    info = engines[0].info
    stock = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype), attn_implementation="sdpa")
    stock = stock.to(info.device).eval()
    prompts, too_long = load_prompts(args.workloads, engines[0], args.max_tokens, args.limit)
    if not prompts:
        raise PromptFileError(f"no record fits the context of {info.max_model_len} tokens with --max-tokens {args.max_tokens}")
    baseline = StockGenerate(stock, args.max_tokens, info.eos_token_ids)
    lookup = StockPromptLookup(stock, args.max_tokens, info.eos_token_ids)
    ours = [EngineContestant(engine, args.max_tokens) for engine in engines]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
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
    return results, info.device


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
