"""What ``outrider simulate`` predicts for the GPUs of papers, beside what they published: agreement and disagreement.

python -m experiments.simulation.papers.run
python -m experiments.simulation.papers.run --tokenizer DIR --retrieval llma_rag.jsonl --code mbpp_human.jsonl

The simulation is told one number of each paper's software, the speed of plain decoding of one model, which says how long its
launches take (transformers launches every kernel from Python). All else is predicted: the speed of other sizes, what wider steps
cost, tensor and pipeline parallelism, and with --retrieval and --code what strategies bring on texts. LLMA's own retrieval set is
open; the trie's (AntRAG) and ClassEval with Lookahead Decoding are not, and other texts stand in for them.

A row agrees where the prediction is within --tolerance of what was published, or of the nearer end of a range.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.bench.run import Bench, Results, Run, run
from experiments.simulation.papers.checks import baselines, needed_steps, shared_steps, wide_steps, without_launches
from experiments.simulation.papers.paper_texts import Texts, code, retrieval


def compare(args: argparse.Namespace, given: Run) -> Results:
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


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json, with --retrieval and --code")
    parser.add_argument("--retrieval", type=Path, help="LLMA's retrieval set with outputs")
    parser.add_argument("--code", type=Path, help="code with outputs")
    parser.add_argument("--records", type=int, default=60, help="of each file")
    parser.add_argument("--tolerance", type=float, default=0.15)


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the process with code 2 where texts have no tokenizer."""
    if (args.retrieval or args.code) and args.tokenizer is None:
        parser.error("--retrieval and --code need --tokenizer")


BENCH = Bench("simulate-papers", __doc__ or "", compare, options, check=check)

if __name__ == "__main__":
    sys.exit(run(BENCH))
