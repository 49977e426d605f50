"""What ``outrider simulate`` predicts for the GPUs of papers, beside what they published: agreement and disagreement.

python -m experiments.simulate_papers
python -m experiments.simulate_papers --tokenizer DIR --retrieval llma_rag.jsonl --code mbpp_human.jsonl

The simulation is told one number of each paper's software, the speed of plain decoding of one model, which says how long its
launches take (transformers launches every kernel from Python). All else is predicted: the speed of other sizes, what wider steps
cost, tensor and pipeline parallelism, and with --retrieval and --code what strategies bring on texts. LLMA's own retrieval set is
open; the trie's (AntRAG) and ClassEval with Lookahead Decoding are not, and other texts stand in for them.

A row agrees where the prediction is within --tolerance of what was published, or of the nearer end of a range.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from experiments.record import RESULTS, write_record
from experiments.run_options import refused
from experiments.simulation.checks import baselines, needed_steps, shared_steps, wide_steps, without_launches
from experiments.simulation.paper_texts import Texts, code, retrieval


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All comparisons. Raises ``ValueError`` for a file that cannot be used."""
    rows = [*baselines(args.tolerance), *wide_steps(args.tolerance), *shared_steps(args.tolerance)]
    if args.retrieval is not None:
        rows += retrieval(Texts(args.tokenizer, args.retrieval, args.records), args.tolerance)
    if args.code is not None:
        rows += code(Texts(args.tokenizer, args.code, args.records), args.tolerance)
    told = [each["agree"] for each in rows if "agree" in each]
    return {
        "prediction": True,
        "agree": sum(told),
        "told": len(told),
        "comparisons": rows,
        "needed": needed_steps(),
        "without_launches": without_launches(),
    }


def tables(results: dict[str, Any]) -> list[Table]:
    """The comparisons; what speed-ups need; and what launches hide."""
    titles = ("published", "predicted", "error", "agrees")
    shown = Table("source", Column("what", overflow="fold"), *titles, Column("because", overflow="fold"))
    for each in results["comparisons"]:
        published = each.get("published", "")
        text = "-".join(f"{end:g}" for end in published) if isinstance(published, list) else f"{published}"
        agrees = "" if "agree" not in each else "yes" if each["agree"] else "no"
        error = f"{100 * each['error']:+.0f} %" if "error" in each else ""
        because = each.get("why", each.get("told", ""))
        shown.add_row(each["source"], each["what"], text, f"{each['predicted']:.2f}", error, agrees, because)
    needed = Table("published speed-up", "of", "tokens per step that it needs")
    for each in results["needed"]:
        needed.add_row(f"{each['speedup']:g}", each["what"], f"{each['tokens_per_step']:g}")
    ideal = Table("without launches from Python", "predicted, against one GPU")
    for each in results["without_launches"]:
        ideal.add_row(each["what"], f"{each['predicted']:.2f}")
    return [shown, needed, ideal]


def main(argv: Sequence[str] | None = None) -> int:
    """Compares and writes the record; 2 for a file that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json, with --retrieval and --code")
    parser.add_argument("--retrieval", type=Path, help="LLMA's retrieval set with outputs")
    parser.add_argument("--code", type=Path, help="code with outputs")
    parser.add_argument("--records", type=int, default=60, help="of each file")
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args(argv)
    if (args.retrieval or args.code) and args.tokenizer is None:
        parser.error("--retrieval and --code need --tokenizer")
    started = datetime.now(UTC)
    try:
        results = compare(args)
    except ValueError as error:
        return refused(error)
    Console(width=None if sys.stdout.isatty() else 200).print(*tables(results), sep="\n")
    print(f"{results['agree']} of {results['told']} agree")
    print(write_record("simulate-papers", vars(args), results, None, started, "cpu", args.out).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
