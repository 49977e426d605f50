"""What lookahead parallelism would gain with a device for each rank: predicted from shares timed in turn on one.

python -m experiments.share_timing --random-model 110m --tokenizer DIR --prompts FILE.jsonl... --exchange RECORD.json

All ranks of a group run in this process, with the same weights and KV of their own, and compute one after another, each as if it
were alone. So the steps, their trees, their shares and what is computed again are those of a real group. The predicted time of a
step is the leader's drafting, the slowest rank's share and the exchange.

What the prediction assumes:

* every rank has a device as fast as this one and shares nothing with the others: no contention for memory, caches or power;
* the exchange is what ``experiments.exchange`` measured for a whole group, on a straight line through its group sizes;
* drafting grows with the tree as it does here, and is not overlapped with anything;
* the curve of time by rows is this device's. A GPU's is flat for longer, so that other budgets would be best there.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table

from cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies
from configs.slices import Dtype, EngineOptions
from engine.engine import Engine
from engine.errors import ModelLoadError
from engine.loading.model import LoadedModel
from engine.target import LocalTarget
from experiments.competition import progress_bar
from experiments.contestants import Prompt
from experiments.guided import SIZES
from experiments.record import RESULTS, write_record
from experiments.run_options import refused
from experiments.scaling_figures import prediction_lines
from experiments.scaling_setting import read_setting
from experiments.turns import Prediction, TurnGroup, follow


def exchange_line(record: Path) -> Callable[[int], float]:
    """Seconds of a group's exchange by its ranks: a straight line through what ``experiments.exchange`` measured.

    Raises:
        ValueError: the file holds no such record, or fewer than two group sizes.
    """
    try:
        cases = json.loads(record.read_text(encoding="utf-8"))["results"]["cases"]
        points = {row["world"]: row["exchange_ms"]["p50"] / 1e3 for row in cases if row["transport"] == "group"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--exchange {record}: no record of experiments.exchange: {error}") from error
    if len(points) < 2:
        raise ValueError(f"--exchange {record}: the whole group was measured with {len(points)} sizes, but a line needs two")
    slope, start = np.polyfit(list(points), list(points.values()), 1)
    return lambda world: max(0.0, float(start + slope * world)) if world > 1 else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement, writes the record and the figure; 2 for a file or a strategy that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_options(parser)
    args = parser.parse_args(argv)
    started = datetime.now(UTC)
    try:
        results = run(args, chosen_strategies(args.strategy or ["auto"]), exchange_line(args.exchange))
    except (ValueError, ModelLoadError) as error:
        return refused(error)
    path = write_record("share-timing", vars(args), results, args.seed, started, "cpu", args.out)
    prediction_lines(results, path.with_suffix(".svg"))
    Console(width=None if sys.stdout.isatty() else 160).print(table(results))
    print(f"record: {path.name}, figure: {path.stem}.svg", file=sys.stderr)
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    dtypes = [kind for kind in get_args(Dtype) if kind != "auto"]
    parser.add_argument("--random-model", choices=tuple(SIZES), required=True, help="a Llama of random weights")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer of the known outputs")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines with id, prompt and output")
    parser.add_argument("--exchange", type=Path, required=True, help="record of experiments.exchange")
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; several times; auto when absent")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="group sizes")
    parser.add_argument("--budgets", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="drafted rows of a rank")
    parser.add_argument("--records", type=int, default=3, help="of each file")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an output")
    parser.add_argument("--max-prompt", type=int, help="records with a longer prompt are left out; it is the prefill's time")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the figure")


def run(args: argparse.Namespace, choices: Sequence[StrategyChoice], exchange: Callable[[int], float]) -> dict[str, Any]:
    """All group sizes and budgets in turns, request by request.

    Returns:
        ``prediction``: true; ``exchange_ms`` by ranks; ``strategies``: by name and ranks the figures with the best budget, its
        predicted ``ratio`` to one rank at that one's best budget, repeat by repeat, and the tokens per second of each budget.

    Raises:
        ValueError, ModelLoadError: a file that cannot be used.
    """
    torch.set_num_threads(1)
    texts, model = read_setting(args, 0, max(args.ranks) * max(args.budgets))
    loaded = model.loaded()
    prompts = texts.prompts()
    known = texts.known() or {}
    worlds = sorted({1, *args.ranks})
    group = TurnGroup(model, loaded.model, known, max(worlds))
    target = LocalTarget(group.ranks[0].runner, loaded.info("", True), loaded.tokenizer)
    cells = list(itertools.product(choices, worlds, args.budgets))
    done: dict[tuple[str, int, int], list[Prediction]] = {}
    with progress_bar() as progress:
        task = progress.add_task("in turns", total=(args.repeats * len(prompts) + 1) * len(cells))
        for choice, world, budget in cells:  # warms up
            _turn(group, loaded, target, choice, world, budget, prompts[:1], exchange(world))
            progress.advance(task)
        for _, (choice, world, budget) in itertools.product(range(args.repeats), cells):
            totals = done.setdefault((choice.label, world, budget), [])
            totals.append(_turn(group, loaded, target, choice, world, budget, prompts, exchange(world)))
            progress.advance(task, len(prompts))
    group.close()
    strategies = {choice.label: _by_ranks(choice.label, worlds, args.budgets, done) for choice in choices}
    line = {world: round(1e3 * exchange(world), 4) for world in worlds}
    return {"prediction": True, "exchange_ms": line, "num_parameters": loaded.model.num_parameters(), "strategies": strategies}


def _turn(
    group: TurnGroup,
    loaded: LoadedModel,
    target: LocalTarget,
    choice: StrategyChoice,
    world: int,
    budget: int,
    prompts: Sequence[Prompt],
    exchange_s: float,
) -> Prediction:
    """All prompts with a new drafter."""
    group.lead(world)
    drafter = choice.build()
    drafter.prepare(target)
    executor = group.ranks[0] if world == 1 else group.leader
    engine = Engine(executor, drafter, EngineOptions(max_running=1), budget, loaded.info(choice.label, True))
    total = Prediction()
    for prompt in prompts:
        one = follow(group, engine, drafter, world, prompt, exchange_s)
        total = Prediction(*(a + b for a, b in zip(dataclasses.astuple(total), dataclasses.astuple(one), strict=True)))
    return total


def _by_ranks(
    label: str, worlds: Sequence[int], budgets: Sequence[int], done: Mapping[tuple[str, int, int], Sequence[Prediction]]
) -> dict[int, Any]:
    """The figures of a strategy by ranks, each with its best budget."""
    rates = {
        world: {budget: statistics.median(one.rate for one in done[label, world, budget]) for budget in budgets}
        for world in worlds
    }
    best = {world: max(of, key=of.__getitem__) for world, of in rates.items()}
    base = done[label, 1, best[1]]
    rows: dict[int, Any] = {}
    for world in worlds:
        own = done[label, world, best[world]]
        rows[world] = own[0].figures() | {
            "budget": best[world],
            "ratio": [round(a.rate / b.rate, 3) for a, b in zip(own, base, strict=True)],
            "by_budget": {budget: round(rate, 2) for budget, rate in rates[world].items()},
        }
    return rows


def table(results: Mapping[str, Any]) -> Table:
    """A row a group size."""
    titles = (
        "ranks",
        "budget",
        "x one rank",
        "spread",
        "tok/step",
        "ms: around + slowest share + exchange",
        "mean share",
    )
    shown = Table("strategy", *(Column(title, justify="right") for title in titles), caption="a prediction: see --help")
    for label, rows in results["strategies"].items():
        for world, row in rows.items():
            parts = f"{row['around_ms']:.1f} + {row['compute_ms']:.1f} + {row['exchange_ms']:.2f}"
            shown.add_row(
                label, str(world), str(row["budget"]), f"{statistics.median(row['ratio']):.2f}",
                f"{min(row['ratio']):.2f}-{max(row['ratio']):.2f}", f"{row['tokens_per_step']:.2f}", parts,
                f"{row['mean_share_ms']:.1f}",
            )  # fmt: skip
    return shown


if __name__ == "__main__":
    sys.exit(main())
