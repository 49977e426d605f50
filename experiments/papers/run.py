"""Runs the tables of a paper and writes what they are beside the paper's: see ``experiments.papers.options``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from engine.errors import ModelLoadError
from experiments.bench_models import calm
from experiments.bench_run import conclude, metered, show
from experiments.papers import jacobi, llma, ngrammys, trie
from experiments.papers.beside import Found, beside, shown
from experiments.papers.figures import draw
from experiments.papers.options import GUIDED, PAPERS
from experiments.papers.stage import ALL, BEST, Measures, Stage, load_stage, ran
from experiments.record import write_record
from experiments.run_options import refused
from experiments.strategies import EXACT_DTYPES

RUNS: dict[str, Callable[[Stage, argparse.Namespace], Found]] = {
    "llma": llma.measure,
    "trie": trie.measure,
    "ngrammys": ngrammys.measure,
    "jacobi": jacobi.measure,
}


def run(args: argparse.Namespace) -> int:
    """Runs what the options ask for.

    Returns:
        The exit code: 1 where an output is not that of plain decoding though it must be, 2 for a file or a model that cannot be
        used. What the paper says and this run does not is no failure.
    """
    started, paper = datetime.now(UTC), PAPERS[args.paper]
    calm(args.threads)
    try:
        stage = load_stage(args, args.paper in GUIDED)
        device = str(stage.loaded.model.device)
        with metered(device) as (_, energy):
            found = RUNS[args.paper](stage, args)
    except (ValueError, ModelLoadError) as error:
        return refused(error)
    results = beside(paper, found, ran(stage, args.prompts))
    seed = args.seed if args.random_model else None
    path = write_record(f"bench-paper-{args.paper}", vars(args), results, seed, started, device, args.out, energy)
    picture = draw(found.figures, path.with_suffix(".svg"))
    lines = [f"{results['agree']} of {results['told']} statements hold here", *found.notes]
    show(args.json, results, shown(results), lines)
    exact = stage.guided or stage.loaded.model.dtype in EXACT_DTYPES
    if not exact and (parted := unfaithful(found.measures)):
        print(f"rounding of {results['ran']['dtype']} parted: {', '.join(parted)}", file=sys.stderr)
    return conclude(path, [picture], unfaithful(found.measures) if exact else [])


def unfaithful(measures: Measures) -> list[str]:
    """What gave another output than plain decoding."""
    found = []
    for name, labels in measures.items():
        for label, row in labels.items():
            if name != ALL and label != BEST and "differing" in row and row["differing"].mean:
                found.append(f"{label} on {name}")
    return found
