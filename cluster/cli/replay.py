"""``outrider replay``: tokens per step of strategies on known outputs, without a model."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from outrider.cluster.cli.generate.strategy_option import AS_PUBLISHED_HELP, StrategyChoice, chosen_strategies
from outrider.cluster.cli.terminal import fail_input, print_table, progress

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from outrider.decoding.replay import KnownText, ReplayCounts


def replay(
    workloads: Annotated[
        list[Path],
        typer.Argument(metavar="WORKLOAD...", help="JSON lines file with `prompt`, `output` and optionally `references`."),
    ],
    tokenizer: Annotated[Path, typer.Option(help="Folder with a tokenizer.json, or .gguf file, for all texts.")],
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:option=value,option=value; repeatable. Default: all that can be replayed."),
    ] = None,
    budget: Annotated[int, typer.Option(min=0, help="Maximum draft tokens per step and rank.")] = 64,
    as_published: Annotated[bool, typer.Option("--as-published", help=f"{AS_PUBLISHED_HELP} Raises --budget to 512.")] = False,
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks that share each step.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Truncate outputs to this many tokens.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N records of each file.")] = None,
    keep_history: Annotated[
        bool, typer.Option("--keep-history/--cold", help="Keep one drafter for a whole file, or start a new one for each record.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Replay known outputs through strategies and report tokens per step, without a model. Each file is a workload.

    A drafted token counts as accepted if it is the next token of the known output (LLMA, arXiv 2304.04487, section 3.2). Tokens
    per step are (output tokens + 1 for the end) / steps over a workload; the prefill counts as a step.
    """
    budget = max(budget, 512) if as_published else budget
    try:
        choices = chosen_strategies(strategy)
        cutter = TextTokenizer(tokenizer)
        texts = {path: read_known_texts(path, cutter, max_tokens, limit) for path in workloads}
    except ValueError as error:
        fail_input(str(error))
    replayable, skipped = _replayable(choices)
    for choice in skipped:
        print(f"{choice.label} is skipped: {_needs_logits(choice)}", file=sys.stderr)
    for choice in replayable:
        wanted = choice.build().published_rows
        if wanted > budget:
            print(
                f"{choice.label}: {wanted} rows a step wanted, at most {budget} drafted: --budget is the limit", file=sys.stderr
            )
    rows: list[dict[str, Any]] = []
    with progress() as bars:
        for choice in replayable:  # warm-up run, not counted, for compilation
            _replay(choice, workloads[0], texts[workloads[0]][:1], budget, world_size, cutter.vocab_size, keep_history, bars)
        for path in workloads:
            for choice in replayable:
                counts = _replay(choice, path, texts[path], budget, world_size, cutter.vocab_size, keep_history, bars)
                rows.append({"strategy": choice.label, "workload": path.stem} | figures(counts))
    means = {
        choice.label: statistics.fmean(row["tokens_per_step"] for row in rows if row["strategy"] == choice.label)
        for choice in replayable
    }
    if as_json:
        settings = {"budget": budget, "world_size": world_size, "max_tokens": max_tokens, "keep_history": keep_history}
        mean = {label: round(value, 4) for label, value in means.items()}
        result = settings | {"skipped": [choice.label for choice in skipped], "results": rows, "mean_tokens_per_step": mean}
        print(json.dumps(result, indent=1))
    else:
        print_table(_table(rows, means, len(workloads) > 1))


def figures(counts: ReplayCounts) -> dict[str, Any]:
    """Return a replay as JSON values; times are microseconds per call."""
    return {
        "records": counts.records,
        "tokens": counts.tokens,
        "steps": counts.steps,
        "tokens_per_step": round(counts.tokens_per_step, 4),
        "drafted_per_step": round(counts.drafted_per_step, 3),
        "accepted": counts.accepted,
        "accepted_by_source": dict(sorted(counts.accepted_by_source.items())),
        "propose_us": _microseconds(counts.propose_s),
        "observe_us": _microseconds(counts.observe_s),
        "finish_us": _microseconds(counts.finish_s),
    }


def _microseconds(seconds: list[float]) -> dict[str, float] | None:
    """Return median and 99th percentile; None without calls."""
    import numpy as np

    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1)}


def _replayable(choices: list[StrategyChoice]) -> tuple[list[StrategyChoice], list[StrategyChoice]]:
    """Split strategies into those that can be replayed and those that need logits; end the command if none can."""
    skipped = [choice for choice in choices if choice.build().needs_logits]
    replayable = [choice for choice in choices if choice not in skipped]
    if not replayable:
        fail_input(f"{', '.join(choice.label for choice in skipped)} cannot be replayed: {_needs_logits(skipped[0])}")
    return replayable, skipped


def _needs_logits(choice: StrategyChoice) -> str:
    return f"{choice.name} drafts from the target's logits, which known outputs do not have"


def _replay(
    choice: StrategyChoice,
    path: Path,
    texts: list[KnownText],
    budget: int,
    world_size: int,
    vocab_size: int,
    keep_history: bool,
    bars: Progress,
) -> ReplayCounts:
    from outrider.decoding.replay import replay_workload

    task = bars.add_task(f"{path.stem} {choice.label}", total=len(texts))
    counts = replay_workload(
        texts, choice.build, budget, vocab_size, time.perf_counter, keep_history, lambda: bars.advance(task), ranks=world_size
    )
    bars.remove_task(task)
    return counts


def _table(rows: list[dict[str, Any]], means: dict[str, float], with_means: bool) -> Table:
    from rich.table import Column, Table

    def times(row: dict[str, Any], name: str) -> str:
        return f"{row[name]['p50']:.0f} / {row[name]['p99']:.0f}" if row[name] else ""

    names = (Column("workload", no_wrap=True), Column("strategy", overflow="fold"))
    titles = ("tokens per step", "drafted per step", "propose us p50 / p99", "observe us")
    right = [Column(name, justify="right") for name in titles]
    table = Table(*names, *right, Column("accepted by source", overflow="fold"))
    for index, row in enumerate(rows):
        accepted = ", ".join(f"{source} {count}" for source, count in row["accepted_by_source"].items())
        last = index + 1 == len(rows) or rows[index + 1]["workload"] != row["workload"]
        table.add_row(
            row["workload"], row["strategy"], f"{row['tokens_per_step']:.3f}", f"{row['drafted_per_step']:.1f}",
            times(row, "propose_us"), times(row, "observe_us"), accepted, end_section=last,
        )  # fmt: skip
    if with_means:
        for label, mean in means.items():
            table.add_row("mean", label, f"{mean:.3f}")
    return table
