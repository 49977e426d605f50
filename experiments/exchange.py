"""What one step's exchange between the ranks of a group costs, by transport: processes of Ray actors on one machine.

python -m experiments.exchange

A step is a command of 1,000 bytes to each rank and an answer of 300 bytes from each. The transports:

* tcp: a connection from the leader to each rank, authenticated, with TCP_NODELAY: what ``actors.lookahead.link`` does;
* unix: the same over Unix sockets;
* calls: calls of the ranks' actors, gathered;
* gloo: torch.distributed, a broadcast and an all-gather;
* graph: a compiled graph of Ray's;
* group: the whole thing, a ``LookaheadParallelExecutor`` and its ranks with a tiny model, dealing and merging included.

They take turns, round by round. Steps without compute tell the bare exchange. Steps in which every rank multiplies matrices on
one thread for about ``--compute-ms`` tell what it is beside work: the step less the slowest rank's compute. While the leader
pauses, the ranks' processes are asked for their processor time: a transport that waits by spinning takes cores from the compute.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table

from actors.placement.own_ray import own_ray
from decoding.request import Request, RequestState, SamplingParams
from decoding.tree import DraftTree
from engine.executor import LocalExecutor
from engine.forward.batch import Work
from experiments.competition import progress_bar
from experiments.guided_ranks import FollowerGroup, RankModel, leader_over
from experiments.record import RESULTS, write_record
from experiments.scaling_figures import exchange_bars
from experiments.transport_actors import TRANSPORTS, Case, Ranks
from experiments.transports import ANSWER_BYTES, COMMAND_BYTES, Step

_VOCAB, _PROMPT = 2048, 64  # of the group's tiny model, and of its request
_GROUP_ROWS, _UNTIMED = 32, 5  # drafted rows of each rank; steps that warm up


class GroupSteps:
    """The whole thing: a ``LookaheadParallelExecutor`` in this process, and ranks in others, over a tiny model."""

    def __init__(self, most: int, steps: int) -> None:
        """
        Args:
            most: ranks of the largest group.
            steps: that will be taken at once.
        """
        model = RankModel("tiny", _VOCAB, _PROMPT + (steps + _UNTIMED) * 2, _GROUP_ROWS * most, "float32", 0)
        self._group = FollowerGroup(model, None, most)
        torch.set_num_threads(1)
        self._executor = leader_over(LocalExecutor(model.runner(model.load())))

    def measure(self, world: int, steps: int) -> list[Step]:
        """Steps of one request, each with a tree of ``_GROUP_ROWS`` drafted rows for each rank."""
        self._group.lead(self._executor, world)
        generator = np.random.default_rng(world)
        prompt = generator.integers(0, _VOCAB, _PROMPT).astype(np.int32)
        request = Request("exchange", prompt, SamplingParams((steps + _UNTIMED) * 2))
        request.slot, request.state = 0, RequestState.RUNNING
        rows = 1 + _GROUP_ROWS * world
        parents = np.minimum(np.arange(-1, rows - 1, dtype=np.int32), 0)
        for step in range(steps + _UNTIMED):
            if step == _UNTIMED:
                self._executor.times.clear()
            tokens = generator.permutation(_VOCAB)[:rows].astype(np.int32)
            tokens[0] = request.root
            tree = DraftTree(tokens, parents, np.zeros(rows, np.int8), rows)
            work = Work(request, request.num_computed, request.num_tokens, tree, frozenset())
            (outcome,) = self._executor.execute([work])
            assert outcome is not None
            accepted = list(outcome.acceptance.rows)
            request.commit([*outcome.tree.tokens[accepted].tolist(), outcome.acceptance.next_token])
            request.num_computed = work.end + len(accepted)
        self._executor.end(request)
        return [(times.exchange_s + max(times.rank_s), max(times.rank_s)) for times in self._executor.times]

    def close(self) -> None:
        """Ends the ranks."""
        self._group.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement, writes the record and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="ranks of a group, the leader among them")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="of each round, without compute")
    parser.add_argument("--compute-steps", type=int, default=60, help="of each round, with compute")
    parser.add_argument("--compute-ms", type=float, default=9.0, help="of each rank in a step")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args(argv)
    if min(args.worlds) < 2:
        parser.error(f"--worlds must be at least 2, got {min(args.worlds)}")
    started = datetime.now(UTC)
    with own_ray():
        results = run(args)
    Console(width=None if sys.stdout.isatty() else 120).print(table(results))
    path = write_record("exchange", vars(args), results, None, started, "cpu", args.out)
    exchange_bars(results, path.with_suffix(".svg"))
    print(f"record: {path.name}, figure: {path.stem}.svg", file=sys.stderr)
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All cases in turns, round by round; the first round warms up.

    Returns:
        ``message_bytes``, ``products`` of a step with compute, and ``cases``: see ``figures``.
    """
    worlds = sorted(set(args.worlds))
    cases = []
    for world in worlds:
        cases += [Case(world, *case) for case in itertools.product(("none", "unpinned", "pinned"), args.transports)]
        cases.append(Case(world, "model", "group"))
    times: dict[Case, list[list[Step]]] = {case: [] for case in cases}
    busy: dict[Case, list[float]] = {case: [] for case in cases}
    ranks = Ranks(worlds, args.transports)
    products = ranks.products_for(args.compute_ms / 1e3)
    group = GroupSteps(max(worlds), args.compute_steps)
    with progress_bar() as progress:
        task = progress.add_task("in turns", total=(args.rounds + 1) * len(cases))
        for number in range(args.rounds + 1):
            for case in cases:
                steps = (args.steps if case.work == "none" else args.compute_steps) if number else _UNTIMED
                if case.transport == "group":
                    taken, cores = group.measure(case.world, steps), None
                else:
                    taken, cores = ranks.measure(case, products, steps)
                if number:
                    times[case].append(taken)
                    busy[case].extend([] if cores is None else [cores])
                progress.advance(task)
    group.close()
    rows = [dataclasses.asdict(case) | figures(times[case], busy[case]) for case in cases]
    return {"message_bytes": {"to_rank": COMMAND_BYTES, "from_rank": ANSWER_BYTES}, "products": products, "cases": rows}


def figures(rounds: Sequence[Sequence[Step]], busy: Sequence[float]) -> dict[str, Any]:
    """What the steps of all rounds say.

    Args:
        rounds: the steps of each.
        busy: cores of a waiting rank, round by round.

    Returns:
        ``exchange_ms``, the step less the compute of its slowest rank: p50, p90 and p99 over all steps; ``p50_of_rounds_ms``, the
        lowest and the highest; ``step_ms`` and ``compute_ms``, each p50; ``waiting_cores``, the median, where it was read.
    """
    every = np.array([step for steps in rounds for step in steps])  # [steps, 2]
    exchange = every[:, 0] - every[:, 1]
    medians = [statistics.median(wall - compute for wall, compute in steps) for steps in rounds]
    return {
        "exchange_ms": {f"p{q}": round(1e3 * float(np.percentile(exchange, q)), 4) for q in (50, 90, 99)},
        "p50_of_rounds_ms": [round(1e3 * value, 4) for value in (min(medians), max(medians))],
        "step_ms": round(1e3 * float(np.median(every[:, 0])), 4),
        "compute_ms": round(1e3 * float(np.median(every[:, 1])), 4),
        "waiting_cores": round(statistics.median(busy), 3) if busy else None,
    }


def table(results: dict[str, Any]) -> Table:
    """A row a case."""
    titles = ("ranks", "compute", "transport", "exchange p50 ms", "of rounds", "p90", "p99", "step p50", "waiting cores")
    shown = Table(*(Column(title, justify="right") for title in titles))
    for row in results["cases"]:
        exchange, (low, high) = row["exchange_ms"], row["p50_of_rounds_ms"]
        cores = "" if row["waiting_cores"] is None else f"{row['waiting_cores']:.2f}"
        shown.add_row(
            str(row["world"]), row["work"], row["transport"], f"{exchange['p50']:.3f}", f"{low:.3f}-{high:.3f}",
            f"{exchange['p90']:.3f}", f"{exchange['p99']:.3f}", f"{row['step_ms']:.2f}", cores,
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    sys.exit(main())
