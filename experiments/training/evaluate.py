"""Measure copying, loops and held-out loss of the demo model.

    python -m experiments.training.evaluate --model demo_model --corpus CORPUS --workloads WORKLOADS

Copying: greedy answers to the corpus' validation records, and the share of their 4-grams that the prompt contains. Loops: greedy
outputs to prompts of the workloads, and the share of their 4-grams that are distinct. A table is printed and a record written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import FinishReason, Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.run import Bench, Results, Run, run
from outrider.experiments.bench.workloads import PromptRecord, fitting_records, interleaved, read_workloads, run_engine
from outrider.experiments.training.data import read_records
from outrider.experiments.training.train import held_out

COPY_KINDS = ("quote", "code_edit", "qa_extractive")
COPY_GOAL, NO_LOOP_GOAL = 0.5, 0.7
DISTINCT_RATIO = 0.5  # outputs with this ratio or a lower one loop
LOOP_PROMPTS, LOOP_TOKENS, COPY_TOKENS = 100, 200, 512  # prompts of the workloads, and maximum tokens of outputs
_HEADING = "### Answer\n"


@dataclass(frozen=True, slots=True)
class CopyCase:
    """A validation record: the text up to its first answer, and that answer."""

    kind: str
    prompt_ids: list[int]
    answer_ids: list[int]


def four_grams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all runs of four tokens, with repetitions."""
    return [tuple(ids[start : start + 4]) for start in range(len(ids) - 3)]


def copied(output_ids: Sequence[int], prompt_ids: Sequence[int]) -> tuple[int, int]:
    """Return how many 4-grams of an output the prompt contains, and how many the output has.

    Example: 1 2 3 4 5 with the prompt 9 1 2 3 4 has the 4-grams 1234, which it contains, and 2345, which it does not: (1, 2).
    """
    known, own = set(four_grams(prompt_ids)), four_grams(output_ids)
    return sum(gram in known for gram in own), len(own)


def distinct_ratio(output_ids: Sequence[int]) -> float | None:
    """Return distinct 4-grams over all 4-grams: 1.0 without repetition, near 0 in a loop; None for fewer than four tokens.

    Example: 1 2 1 2 1 2 has the 4-grams 1212, 2121, 1212: 2 / 3.
    """
    grams = four_grams(output_ids)
    return len(set(grams)) / len(grams) if grams else None


def text_ids(request: Request) -> list[int]:
    """Return the output without the token that ended it."""
    ids: list[int] = request.output_ids.tolist()
    return ids[:-1] if request.finish_reason == FinishReason.STOP else ids


def copy_cases(records: Sequence[dict[str, str]], engine: Engine) -> list[CopyCase]:
    """Return the records of ``COPY_KINDS`` that fit; a prompt is the text up to and including the heading of the first answer."""
    assert engine.tokenizer is not None
    cases = []
    for record in records:
        if record["kind"] in COPY_KINDS:
            head, heading, rest = record["text"].partition(_HEADING)
            answer = rest.partition("\n\n### Question\n")[0].rstrip()
            cases.append(CopyCase(record["kind"], engine.tokenizer.encode(head + heading), engine.tokenizer.encode(answer)))
    return [case for case in cases if len(case.prompt_ids) < engine.info.max_model_len]


def generate(engine: Engine, prompts: Iterable[Sequence[int]], max_tokens: int, title: str, progress: Progress) -> list[Request]:
    """Return greedy outputs, in order; long prompts have shorter outputs."""
    requests = []
    for index, ids in enumerate(prompts):
        room = min(max_tokens, engine.info.max_model_len - len(ids))
        requests.append(Request(str(index), ids, SamplingParams(max_tokens=room), tenant="local"))
    run_engine(engine, requests, lambda request: progress.note(f"{title}: request {request.request_id} of {len(requests)}"))
    return requests


def copying_results(cases: Sequence[CopyCase], requests: Sequence[Request]) -> dict[str, Any]:
    """Summarize copying by kind and overall; ``reference_share`` is the share in the corpus' own answers."""
    pairs = list(zip(cases, requests, strict=True))
    groups = {kind: [pair for pair in pairs if pair[0].kind == kind] for kind in COPY_KINDS} | {"overall": pairs}
    results = {name: _copying_of(group) for name, group in groups.items() if group}
    lower = min(results["overall"]["share_of_4grams"], results["overall"]["mean_share_of_records"]) if pairs else 0.0
    return {"goal": COPY_GOAL, "reached": lower >= COPY_GOAL, **results}


def _copying_of(pairs: Sequence[tuple[CopyCase, Request]]) -> dict[str, Any]:
    outputs = [text_ids(request) for _, request in pairs]
    counts = [copied(output, case.prompt_ids) for output, (case, _) in zip(outputs, pairs, strict=True)]
    references = [copied(case.answer_ids, case.prompt_ids) for case, _ in pairs]
    shares = [hits / total for hits, total in counts if total]
    return {
        "records": len(pairs),
        "without_4gram": len(pairs) - len(shares),  # not in the means
        "share_of_4grams": _share(sum(hits for hits, _ in counts), sum(total for _, total in counts)),
        "mean_share_of_records": round(statistics.fmean(shares), 4) if shares else 0.0,
        "reference_share": _share(sum(hits for hits, _ in references), sum(total for _, total in references)),
        "equal_to_reference": sum(output == case.answer_ids for output, (case, _) in zip(outputs, pairs, strict=True)),
        "looping": sum(ratio is not None and ratio <= DISTINCT_RATIO for ratio in map(distinct_ratio, outputs)),
        "mean_output_tokens": round(statistics.fmean(map(len, outputs)), 1),
    }


def loop_results(records: Sequence[PromptRecord], requests: Sequence[Request], texts: Sequence[str]) -> dict[str, Any]:
    """Count outputs that do not loop; those of fewer than four tokens count only with a text and an end of their own."""
    ratios = [distinct_ratio(text_ids(request)) for request in requests]
    ended = [request.finish_reason == FinishReason.STOP for request in requests]
    short = [index for index, ratio in enumerate(ratios) if ratio is None]
    short_good = sum(ended[index] and bool(texts[index].strip()) for index in short)
    share = _share(sum(ratio is not None and ratio > DISTINCT_RATIO for ratio in ratios) + short_good, len(requests))
    return {
        "goal": NO_LOOP_GOAL,
        "reached": share >= NO_LOOP_GOAL,
        "outputs": len(requests),
        "share_not_looping": share,
        "without_4gram": len(short),
        "without_4gram_counted": short_good,
        "empty": sum(not text.strip() for text in texts),
        "mean_output_tokens": round(statistics.fmean(len(text_ids(request)) for request in requests), 1) if requests else 0.0,
        "per_output": [
            {"id": record.id, "tokens": len(text_ids(request)), "distinct_ratio": None if ratio is None else round(ratio, 4)}
            for record, request, ratio in zip(records, requests, ratios, strict=True)
        ],
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def evaluate(args: argparse.Namespace, engine: Engine, progress: Progress) -> dict[str, Any]:
    """Return all three measurements; loops are measured on the first prompts that fit, one of each workload in turn."""
    tokenizer, longest = engine.tokenizer, engine.info.max_model_len
    assert tokenizer is not None
    valid = list(read_records([args.corpus / "valid.jsonl.gz"]))
    cases = copy_cases(valid, engine)
    copies = generate(engine, [case.prompt_ids for case in cases], COPY_TOKENS, "copying", progress)
    in_turns = interleaved(read_workloads(args.workloads))
    chosen = list(islice(fitting_records(in_turns, tokenizer, longest - LOOP_TOKENS), LOOP_PROMPTS))
    loops = generate(engine, [ids for _, ids in chosen], LOOP_TOKENS, "loops", progress)
    texts = [tokenizer.decode(text_ids(request)) for request in loops]
    progress.say("held-out loss")
    stock = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto", attn_implementation="sdpa").to(engine.info.device)
    losses = held_out(stock.eval(), valid, tokenizer.backend_tokenizer)
    return {
        "copying": copying_results(cases, copies),
        "loops": loop_results([record for record, _ in chosen], loops, texts),
        "held_out": {"records": len(valid)} | {name: round(float(value), 4) for name, value in losses.items()},
    }


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Load the model and run all three measurements."""
    options = EngineOptions(max_running=8, max_waiting=10_000)
    engine = Engine.load(ModelOptions(path=args.model, threads=args.threads), options, SpeculationOptions("llma"))
    with torch.inference_mode():
        results = evaluate(args, engine, run.progress)
    return results | {"parameters": engine.info.num_parameters, "dtype": engine.info.dtype}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", default="demo_model", help="folder of the model")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with valid.jsonl.gz")
    parser.add_argument("--workloads", type=Path, required=True, help="folder with *.jsonl")
    parser.add_argument("--threads", type=int, help="number of torch threads; default: all cores")


def missed(results: Results, args: argparse.Namespace) -> list[str]:
    """Return the goals that were not reached."""
    return [f"{part}: the goal was {results[part]['goal']}" for part in ("copying", "loops") if not results[part]["reached"]]


BENCH = Bench("evaluate-demo-model", __doc__ or "", measure, options, wrong=missed)

if __name__ == "__main__":
    sys.exit(run(BENCH))
