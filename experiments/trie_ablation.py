"""The ablation of Alipay's Lookahead (arXiv 2312.12728, Tables 5 and 6) on known outputs, replayed without a model.

    python -m experiments.trie_ablation FILE.jsonl... --domain rag A.jsonl B.jsonl --warm rag TRAIN.jsonl --tokenizer DIR

Two tries are measured on the same workloads: the explicit one as published (``experiments.explicit_trie``), whose parts are taken
out one at a time, and the compiled one of the strategy ``trie``, where a part can be taken out:

* ``without prompt branches``, ``without output branches``: the compiled trie goes by the other frequency alone.
* ``without pruning``: not of the compiled trie, which prunes nothing here at its default capacity: that is its ``full``.
* ``without elimination``: not of the compiled trie, which keeps each prompt in a log of its own that leaves with its request.
* ``capacity N``: nodes that outputs may add to each first token's tree, in multiples of the decoding length. The compiled trie
  has one capacity in tokens for everything, and keeps the latest: it gets as many as the explicit one had nodes left at the end,
  branch by branch (see ``tokens_for``).

The outputs of the first part of each file, and those of ``--warm``, are in the tries before, as the paper warms its trie with a
training split; references are left out, as the published method has none. The paper measures tokens per second on a GPU; here it
is tokens per step and, apart from it, the processor time of the trie itself. Both tries are told no end token, as in
``outrider replay``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from cluster.cli.generate.prompt_file import PromptFileError
from decoding.drafters.base import Drafter
from decoding.drafters.trie import TrieDrafter
from decoding.replay import KnownText, ReplayCounts, replay_workload
from experiments.explicit_trie import ExplicitTrieDrafter, TrieParts, count_nodes, trie_bytes
from experiments.plots import trie_capacity
from experiments.record import RESULTS, write_record
from experiments.run_options import refused
from experiments.trie_ablation_tables import FULL, PAPER_CAPACITIES, add_ratios, mean_ratios, published, tables
from experiments.trie_timing import quiet

BRANCH_LENGTH = 12
DECODING_LENGTH = 64
# What is there of the explicit trie, and the compiled trie's options; None where it has no such switch.
PARTS: dict[str, tuple[TrieParts, dict[str, Any] | None]] = {
    FULL: (TrieParts(), {}),
    "without prompt branches": (TrieParts(prompts=False), {"frequencies": "output"}),
    "without output branches": (TrieParts(outputs=False), {"frequencies": "input"}),
    "without pruning": (TrieParts(pruning=False), None),
    "without elimination": (TrieParts(elimination=False), None),
}
_LEAST_TOKENS = 128  # of the compiled trie: two of its blocks

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts to measure, and those that came before."""

    name: str
    before: list[KnownText]
    texts: list[KnownText]
    vocab_size: int

    def counts(self) -> dict[str, int]:
        """How much there is; tokens are of outputs."""
        return {
            "records": len(self.texts),
            "tokens": sum(len(text.output_ids) for text in self.texts),
            "prompt_tokens": sum(len(text.prompt_ids) for text in self.texts),
            "warm_records": len(self.before),
            "warm_tokens": sum(len(text.output_ids) for text in self.before),
        }

    def replay(self, drafter: Drafter, texts: Sequence[KnownText], id_prefix: str = "") -> ReplayCounts:
        """Drives texts through a drafter that may have seen others, of another prefix."""
        clock = time.thread_time  # of the processor: what else runs on the machine does not count
        return replay_workload(texts, lambda: drafter, DECODING_LENGTH - 1, self.vocab_size, clock, id_prefix=id_prefix)


def read_workload(
    name: str, files: Sequence[Path], warm: Sequence[Path], share: float, records: int | None, cutter: TextTokenizer
) -> Workload:
    """The texts of a workload's files; in each, the first ``share`` of at most ``records`` come before the others.

    Raises:
        PromptFileError: a file cannot be read, or it holds one text to measure with an output of one token.
    """
    before = [text for path in warm for text in read_known_texts(path, cutter, None)]
    measured: list[KnownText] = []
    for path in files:
        texts = read_known_texts(path, cutter, None, records)
        cut = int(len(texts) * share)
        before.extend(texts[:cut])
        measured.extend(texts[cut:])
    if max((len(text.output_ids) for text in measured), default=0) < 3:
        raise PromptFileError(f"workload {name}: no output is long enough to draft for: give more records")
    bare = [[replace(text, references=()) for text in texts] for texts in (before, measured)]
    return Workload(name, bare[0], bare[1], cutter.vocab_size)


def figures(counts: ReplayCounts) -> Row:
    """What a replay reached, and what the trie took: retrieval in ``propose``, updates in ``observe`` and ``finish``."""
    update = sum(counts.observe_s) + sum(counts.finish_s)
    spent = sum(counts.propose_s) + update
    retrieval, observe = np.asarray(counts.propose_s) * 1e6, np.asarray(counts.observe_s) * 1e6
    return {
        "tokens_per_step": round(counts.tokens_per_step, 4),
        "drafted_per_step": round(counts.drafted_per_step, 2),
        "steps": counts.steps,
        "retrieval_p50_us": round(float(np.median(retrieval)), 2),
        "retrieval_p99_us": round(float(np.percentile(retrieval, 99)), 2),
        "update_p50_us": round(float(np.median(observe)), 2),
        "us_per_step": round(spent / counts.steps * 1e6, 2),
        "update_share": round(update / spent, 3),
    }


def run_explicit(workload: Workload, parts: TrieParts) -> tuple[Row, list[int]]:
    """The published trie with some parts. Beside the row: nodes made by outputs in each first token's tree, at the end."""
    drafter = ExplicitTrieDrafter(parts, DECODING_LENGTH, BRANCH_LENGTH)
    drafter.warm([text.output_ids for text in workload.before])
    row = figures(workload.replay(drafter, workload.texts))
    nodes, made_by_outputs = count_nodes(drafter.trie)
    row |= {"nodes": nodes, "output_nodes": made_by_outputs, "mib": round(trie_bytes(drafter.trie) / 2**20, 1)}
    return row, [drafter.trie.size(first)[1] for first in drafter.trie.firsts()]


def run_compiled(workload: Workload, options: dict[str, Any]) -> Row:
    """The strategy ``trie``. It inserts while it proposes, so its retrieval times hold both."""
    drafter = TrieDrafter(decoding_length=DECODING_LENGTH, branch_length=BRANCH_LENGTH, **options)
    workload.replay(drafter, workload.before, "before-")
    row = figures(workload.replay(drafter, workload.texts))
    return row | {"update_p50_us": None, "update_share": None, "mib": round(drafter.nbytes / 2**20, 2)}


def tokens_for(output_nodes: int) -> int:
    """The compiled trie's capacity that corresponds to nodes of the explicit one: a power of two, as its log is allocated.

    Example: 400,000 nodes are 30,769 branches of 13 tokens, one of which starts at each token of a text: 32,768 tokens.
    """
    tokens = max(1, output_nodes / (BRANCH_LENGTH + 1))
    return max(_LEAST_TOKENS, 1 << round(float(np.log2(tokens))))


def ablate(workload: Workload, report: Callable[[str, Row], None]) -> Row:
    """All conditions on one workload."""
    parts: dict[str, dict[str, Row]] = {"explicit": {}, "compiled": {}}
    capacities: dict[str, dict[str, Row]] = {"explicit": {}, "compiled": {}}
    sizes: list[int] = []
    for label, (there, options) in PARTS.items():
        parts["explicit"][label], grown = run_explicit(workload, there)
        report(f"explicit, {label}", parts["explicit"][label])
        sizes = sizes if there.pruning else grown
        if options is not None:
            parts["compiled"][label] = run_compiled(workload, options)
            report(f"compiled, {label}", parts["compiled"][label])
    for capacity in PAPER_CAPACITIES:
        key, outgrown = str(capacity), [size for size in sizes if size > capacity * DECODING_LENGTH]
        same = capacity == TrieParts().capacity
        row = parts["explicit"][FULL] if same else run_explicit(workload, TrieParts(capacity=capacity))[0]
        tokens = tokens_for(row["output_nodes"])
        capacities["explicit"][key] = row | {"trees_outgrown": len(outgrown), "nodes_of_these": sum(outgrown)}
        capacities["compiled"][key] = run_compiled(workload, {"capacity": tokens}) | {"capacity_tokens": tokens}
        for trie, rows in capacities.items():
            report(f"{trie}, capacity {capacity}x", rows[key])
    for trie, rows in parts.items():
        add_ratios([*rows.values(), *capacities[trie].values()], rows[FULL])
    unpruned = {"trees": len(sizes), "output_nodes": sum(sizes), "largest_tree": max(sizes)}
    return workload.counts() | {"unpruned": unpruned, "parts": parts, "capacity": capacities}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named: dict[str, Any] = {"action": "append", "nargs": "+", "default": [], "metavar": ("NAME", "FILE")}
    parser.add_argument("files", type=Path, nargs="*", help="JSON lines with prompt and output, each a workload of its own")
    parser.add_argument("--domain", **named, help="files that are one workload")
    parser.add_argument("--warm", **named, help="files whose outputs come before a workload")
    parser.add_argument("--warm-share", type=float, default=0.5, help="of each file: records whose outputs come before")
    parser.add_argument("--records", type=int, help="at most so many of each file; those of --warm are all read")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--output-dir", type=Path, default=RESULTS, help="folder of the record and the figure")
    args = parser.parse_args(argv)
    if not 0 <= args.warm_share < 1:
        parser.error("--warm-share must be at least 0 and below 1")
    if args.records is not None and args.records < 1:
        parser.error("--records must be at least 1")
    if not args.files and not args.domain:
        parser.error("give workloads: FILE, or --domain NAME FILE...")
    known = sorted({path.stem for path in args.files} | {name for name, *_ in args.domain})
    for name, *_ in args.warm:
        if name not in known:
            parser.error(f"--warm {name}: no such workload; there are {', '.join(known)}")
    return args


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    """The workloads that the command line names; raises as ``read_workload`` does."""
    files = {path.stem: [path] for path in args.files} | {name: list(map(Path, paths)) for name, *paths in args.domain}
    warm = {name: list(map(Path, paths)) for name, *paths in args.warm}
    cutter = TextTokenizer(args.tokenizer)
    return [
        read_workload(name, paths, warm.get(name, []), args.warm_share, args.records, cutter) for name, paths in files.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes the record and the figure, prints tables for each workload; 2 for a file that cannot be used."""
    args, started = arguments(argv), datetime.now(UTC)
    try:
        workloads = workloads_of(args)
    except PromptFileError as error:
        return refused(error)
    some = replace(workloads[0], before=workloads[0].texts[:16], texts=workloads[0].texts[:16])
    run_compiled(some, {"capacity": _LEAST_TOKENS})  # compiles insertion, eviction and retrieval
    clock, found = time.perf_counter(), {}
    for workload in workloads:

        def report(condition: str, row: Row, name: str = workload.name) -> None:
            print(f"{time.perf_counter() - clock:5.0f} s  {name}, {condition}: {row['tokens_per_step']:.3f}", file=sys.stderr)

        with quiet():
            found[workload.name] = ablate(workload, report)
    results = {"paper": published(), "mean_ratio": mean_ratios(found), "workloads": found}
    config = vars(args) | {"decoding_length": DECODING_LENGTH, "branch_length": BRANCH_LENGTH}
    record = write_record("trie-ablation", config, results, None, started, folder=args.output_dir)
    trie_capacity(results, record.with_suffix(".svg"))
    console = Console(width=None if sys.stdout.isatty() else 160)
    for name, result in found.items():
        console.print(*tables(name, result, results["paper"]), sep="\n")
    print(f"record: {record.name}, figure: {record.stem}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
