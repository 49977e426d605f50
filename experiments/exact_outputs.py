"""How many outputs are plain decoding's, token for token, with ``engine.exact`` as rounding and as strict, and what it costs.

python -m experiments.exact_outputs --workloads DIR --records 2 --dtypes bfloat16 float32 --strategies llma trie auto

Each record of each workload is asked greedily and with a draw. Every answer is given alone, one request at a time, and once more
in a crowd, several at a time in steps of few rows, so that a row's company, its place and the cuts of its prompt all change. All
are compared with plain decoding alone in the same setting. Requests that are alone go to the engines in turns,
and the cost of strict is the ratio of the seconds that plain decoding takes for a request, with its spread over the requests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

from cluster.prompt_file import PromptFileError
from configs.schema import find_model
from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from decoding.drafters import LOSSLESS, WITH_DRAFT_MODEL
from decoding.request import PLAIN, Request, SamplingParams
from engine.engine import Engine
from engine.errors import ModelLoadError
from experiments.record import write_record
from experiments.run_options import DTYPES, parsed, refused, run_parser
from experiments.workloads import fits, prompt_ids, read_workloads, run_engine

Exact = Literal["rounding", "strict"]
_CROWD, _CROWD_ROWS = 4, 96  # requests at a time, and rows of a step
_DRAWS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 7})
_ids = count()


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of every engine."""

    record: str
    prompt: Sequence[int]
    references: Sequence[Sequence[int]]
    draw: int  # index of ``_DRAWS``

    def request(self, max_tokens: int) -> Request:
        """A new one."""
        params = SamplingParams(max_tokens=max_tokens, **_DRAWS[self.draw])
        return Request(f"{self.record}-{next(_ids)}", self.prompt, params, self.references)


@dataclass(slots=True)
class Answers:
    """Of one strategy in one setting."""

    alone: list[list[int]]
    crowd: list[list[int]]
    seconds: list[float]  # of each ask, alone
    steps: int = 0  # alone
    drafted: int = 0
    accepted: int = 0


def answers_of(engines: Mapping[str, tuple[Engine, Engine]], asks: Sequence[Ask], max_tokens: int) -> dict[str, Answers]:
    """The answers of pairs of engines, the first for requests alone, in turns, and the second for the crowd."""
    found = {name: Answers([], [], []) for name in engines}
    for done, ask in enumerate(asks):
        for name, (engine, _) in engines.items():
            request, answers = ask.request(max_tokens), found[name]
            started = time.perf_counter()
            run_engine(engine, [request])
            answers.seconds.append(time.perf_counter() - started)
            answers.alone.append(request.output_ids.tolist())
            answers.steps += request.stats.steps
            answers.drafted += request.stats.drafted
            answers.accepted += request.stats.accepted
        if done % 10 == 9:
            print(f"{done + 1} of {len(asks)} asked", file=sys.stderr, flush=True)
    for name, (_, engine) in engines.items():
        requests = [ask.request(max_tokens) for ask in asks]
        run_engine(engine, requests)
        found[name].crowd = [request.output_ids.tolist() for request in requests]
    return found


def load_pair(args: argparse.Namespace, dtype: str, exact: Exact, strategy: str) -> tuple[Engine, Engine]:
    """An engine for requests alone and one for a crowd."""
    model = ModelOptions(find_model(args.model), dtype=dtype, device=args.device, threads=args.threads)  # type: ignore[arg-type]
    speculation = SpeculationOptions(strategy, max_draft_tokens=args.max_draft_tokens)
    alone, crowd = (
        Engine.load(model, EngineOptions(running, rows, args.most, exact=exact, prefix_caching=running > 1), speculation)
        for running, rows in ((1, 512), (_CROWD, _CROWD_ROWS))
    )
    return alone, crowd


def figures(answers: Mapping[str, Answers]) -> list[dict[str, Any]]:
    """Each strategy's answers against plain decoding's alone."""
    plain = answers[PLAIN].alone
    rows = []
    for name, own in answers.items():
        differing = [at for at, pair in enumerate(zip(own.alone, plain, strict=True)) if pair[0] != pair[1]]
        tokens = sum(map(len, own.alone))
        rows.append(
            {
                "strategy": name,
                "outputs": len(plain),
                "identical_alone": len(plain) - len(differing),
                "identical_crowd": sum(one == other for one, other in zip(own.crowd, plain, strict=True)),
                "first_parted": [_parted(own.alone[at], plain[at]) for at in differing],
                "tokens": tokens,
                "tokens_per_step": tokens / own.steps,
                "accepted": own.accepted,
                "drafted": own.drafted,
                "seconds": own.seconds,
            }
        )
    return rows


def _parted(one: Sequence[int], other: Sequence[int]) -> int:
    """The place of the first token that is another."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def cost(rounding: Sequence[float], strict: Sequence[float]) -> dict[str, float]:
    """How many times as long strict took: quartiles over the asks."""
    ratios = [one / other for one, other in zip(strict, rounding, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": middle, "quartile_1": low, "quartile_3": high}


def read_asks(args: argparse.Namespace, engine: Engine) -> list[Ask]:
    """The first records of each workload that fit the context.

    Raises:
        PromptFileError: the folder cannot be read, or nothing in it fits.
    """
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    asks = []
    for workload in read_workloads(args.workloads):
        pairs = [(record, prompt_ids(record, tokenizer)[-args.prompt_tokens :]) for record in workload]
        fitting = [pair for pair in pairs if fits(len(pair[1]), args.max_tokens, engine.info.max_model_len)]
        for record, ids in fitting[: args.records]:
            references = [tokenizer.encode(text, add_special_tokens=False) for text in record.references]
            asks += [Ask(record.id, ids, references, draw) for draw in range(len(_DRAWS))]
    if not asks:
        raise PromptFileError(f"no record of {args.workloads} fits the context of {engine.info.max_model_len} tokens")
    return asks


def print_table(results: Mapping[str, Any]) -> None:
    """A line for each type, setting and strategy."""
    print(f"{'type':<9} {'engine.exact':<12} {'strategy':<15} {'identical alone':>15} {'in a crowd':>12} {'tok/step':>9}")
    for case in results["cases"]:
        for row in case["strategies"]:
            alone, crowd = (f"{row[key]}/{row['outputs']}" for key in ("identical_alone", "identical_crowd"))
            name = f"{case['dtype']:<9} {case['exact']:<12} {row['strategy']:<15}"
            print(f"{name} {alone:>15} {crowd:>12} {row['tokens_per_step']:>9.2f}")
    for dtype, price in results["cost_of_strict"].items():
        quartiles = f"{price['quartile_1']:.2f} to {price['quartile_3']:.2f}"
        print(f"{dtype}: plain decoding takes {price['median']:.2f} x as long with strict (quartiles {quartiles})")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All types and settings; both settings of a type in turns."""
    cases, prices = [], {}
    asks: list[Ask] = []
    for dtype in args.dtypes:
        engines = {
            (exact, strategy): load_pair(args, dtype, exact, strategy)
            for exact in get_args(Exact)
            for strategy in (PLAIN, *args.strategies)
        }
        asks = asks or read_asks(args, engines["rounding", PLAIN][0])
        print(f"{dtype}: {len(asks)} requests of each of {len(engines)} engines", file=sys.stderr, flush=True)
        found = answers_of({" ".join(key): pair for key, pair in engines.items()}, asks, args.max_tokens)
        for exact in get_args(Exact):
            own = {strategy: found[f"{exact} {strategy}"] for strategy in (PLAIN, *args.strategies)}
            cases.append({"dtype": dtype, "exact": exact, "strategies": figures(own)})
        prices[dtype] = cost(found[f"rounding {PLAIN}"].seconds, found[f"strict {PLAIN}"].seconds)
    return {"cases": cases, "cost_of_strict": prices, "record_ids": list(dict.fromkeys(ask.record for ask in asks))}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table and writes the record; the exit code is 1 where strict has an output that differs."""
    parser = run_parser(__doc__, dtype="bfloat16")
    parser.add_argument("--workloads", type=Path, required=True, help="folder of JSON-lines files")
    parser.add_argument("--records", type=int, default=2, help="of each file, the first that fit")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of a prompt: its end")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES[:2], default=None, help="instead of --dtype, several")
    drafting = sorted(LOSSLESS - set(WITH_DRAFT_MODEL) - {PLAIN})
    parser.add_argument("--strategies", nargs="+", choices=drafting, default=["llma", "trie", "auto"])
    parser.add_argument("--max-draft-tokens", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--device", default="auto")
    args = parsed(parser, argv, records=1, prompt_tokens=1, max_tokens=1, max_draft_tokens=0, threads=1)
    args.dtypes, args.most = args.dtypes or [args.dtype], 1 << 20  # requests that may wait: all
    started = datetime.now(UTC)
    try:
        results = measure(args)
    except (PromptFileError, ModelLoadError) as error:
        return refused(error)
    print_table(results)
    config = {key: value for key, value in vars(args).items() if key not in ("most", "dtype")}
    path = write_record("exact-outputs", config, results, _DRAWS[1]["seed"], started, args.device, args.out)
    print(f"record: {path.name}")
    strict = [row for case in results["cases"] if case["exact"] == "strict" for row in case["strategies"]]
    return int(any(row["outputs"] != min(row["identical_alone"], row["identical_crowd"]) for row in strict))


if __name__ == "__main__":
    sys.exit(main())
