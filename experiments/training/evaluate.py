"""Does the demo model copy, does it loop, and what is its held-out loss?

    python -m experiments.training.evaluate --model demo_model --corpus ../shared/corpus --workloads ../shared/workloads/open

Copying: greedy answers to the corpus' validation records, and the share of their 4-grams that stand in the prompt. Loops: greedy
outputs to prompts of the workloads, and how many of their 4-grams are distinct. A table is printed and a record written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from decoding.request import FinishReason, Request, SamplingParams
from engine.engine import Engine
from experiments.bench.progress import Progress
from experiments.bench.run import Bench, Results, Run, run
from experiments.bench.workloads import PromptRecord, fitting_records, interleaved, read_workloads, run_engine
from experiments.training.data import read_records
from experiments.training.train import held_out

COPY_KINDS = ("quote", "code_edit", "qa_extractive")
COPY_GOAL, NO_LOOP_GOAL = 0.5, 0.7
DISTINCT_RATIO = 0.5  # an output at or below it loops
_HEADING = "### Answer\n"


@dataclass(frozen=True, slots=True)
class CopyCase:
    """A validation record: the text up to its first answer, and that answer."""

    kind: str
    prompt_ids: list[int]
    answer_ids: list[int]


def four_grams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """All runs of four tokens, repeated ones repeatedly; none for fewer than four tokens."""
    return [tuple(ids[start : start + 4]) for start in range(len(ids) - 3)]


def copied(output_ids: Sequence[int], prompt_ids: Sequence[int]) -> tuple[int, int]:
    """How many 4-grams of an output stand in the prompt, and how many it has.

    Example: 1 2 3 4 5 against the prompt 9 1 2 3 4 has the 4-grams 1234, which stands there, and 2345, which does not: (1, 2).
    """
    known, own = set(four_grams(prompt_ids)), four_grams(output_ids)
    return sum(gram in known for gram in own), len(own)


def distinct_ratio(output_ids: Sequence[int]) -> float | None:
    """Distinct 4-grams over all 4-grams: 1.0 without repetition, near 0 in a loop; None for fewer than four tokens.

    Example: 1 2 1 2 1 2 has the 4-grams 1212, 2121, 1212: 2 / 3.
    """
    grams = four_grams(output_ids)
    return len(set(grams)) / len(grams) if grams else None


def text_ids(request: Request) -> list[int]:
    """The output without the token that ended it."""
    ids: list[int] = request.output_ids.tolist()
    return ids[:-1] if request.finish_reason == FinishReason.STOP else ids


def copy_cases(records: Sequence[dict[str, str]], engine: Engine) -> list[CopyCase]:
    """The records of ``COPY_KINDS``; a prompt is the raw text up to and including the heading of the first answer."""
    assert engine.tokenizer is not None
    cases = []
    for record in records:
        if record["kind"] in COPY_KINDS:
            head, heading, rest = record["text"].partition(_HEADING)
            answer = rest.partition("\n\n### Question\n")[0].rstrip()
            cases.append(CopyCase(record["kind"], engine.tokenizer.encode(head + heading), engine.tokenizer.encode(answer)))
    return cases


def generate(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, title: str, progress: Progress) -> list[Request]:
    """Greedy outputs, in order; a prompt that leaves less room than ``max_tokens`` gets what there is."""
    requests = []
    for index, ids in enumerate(prompts):
        room = min(max_tokens, engine.info.max_model_len - len(ids))
        requests.append(Request(str(index), ids, SamplingParams(max_tokens=room), tenant="local"))
    run_engine(engine, requests, lambda request: progress.note(f"{title}: request {request.request_id} of {len(prompts)}"))
    return requests


def copying_results(cases: Sequence[CopyCase], requests: Sequence[Request]) -> dict[str, Any]:
    """Per kind and overall; ``reference_share`` is what the corpus' own answers reach, the mean over their 4-grams."""
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
        "ended_by_itself": sum(request.finish_reason == FinishReason.STOP for _, request in pairs),
        "looping": sum(ratio is not None and ratio <= DISTINCT_RATIO for ratio in map(distinct_ratio, outputs)),
        "mean_output_tokens": round(statistics.fmean(map(len, outputs)), 1),
        "mean_reference_tokens": round(statistics.fmean(len(case.answer_ids) for case, _ in pairs), 1),
    }


def loop_results(records: Sequence[PromptRecord], requests: Sequence[Request], texts: Sequence[str]) -> dict[str, Any]:
    """Outputs that do not loop. One of fewer than four tokens counts among them only if it ended by itself and has a text."""
    ratios = [distinct_ratio(text_ids(request)) for request in requests]
    ended = [request.finish_reason == FinishReason.STOP for request in requests]
    short = [index for index, ratio in enumerate(ratios) if ratio is None]
    short_good = [index for index in short if ended[index] and texts[index].strip()]
    known = [ratio for ratio in ratios if ratio is not None]
    above = sum(ratio > DISTINCT_RATIO for ratio in known)
    share = _share(above + len(short_good), len(requests))
    return {
        "goal": NO_LOOP_GOAL,
        "reached": share >= NO_LOOP_GOAL,
        "outputs": len(requests),
        "share_not_looping": share,
        "above_ratio": above,
        "without_4gram": len(short),
        "without_4gram_counted": len(short_good),
        "empty": sum(not text.strip() for text in texts),
        "ended_by_itself": sum(ended),
        "mean_output_tokens": round(statistics.fmean(len(text_ids(request)) for request in requests), 1) if requests else 0.0,
        "mean_distinct_ratio": round(statistics.fmean(known), 4) if known else 0.0,
        "order": "files by name, one record of each in turn, those that do not fit left out",
        "per_output": [
            {"id": record.id, "tokens": len(text_ids(request)), "distinct_ratio": None if ratio is None else round(ratio, 4)}
            for record, request, ratio in zip(records, requests, ratios, strict=True)
        ],
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def held_out_results(model: str, records: list[dict[str, str]], engine: Engine) -> dict[str, Any]:
    """Loss in nats per token over whole records and over answers, and the share of answer tokens predicted, as in training."""
    assert engine.tokenizer is not None
    stock = AutoModelForCausalLM.from_pretrained(model, dtype="auto", attn_implementation="sdpa").to(engine.info.device).eval()
    losses = held_out(stock, records, engine.tokenizer.backend_tokenizer)
    return {"records": len(records)} | {name: round(float(value), 4) for name, value in losses.items()}


def evaluate(args: argparse.Namespace, engine: Engine, progress: Progress) -> dict[str, Any]:
    """All three measurements."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    valid = list(read_records([args.corpus / "valid.jsonl.gz"]))
    cases = [case for case in copy_cases(valid, engine) if len(case.prompt_ids) < engine.info.max_model_len]
    copies = generate(engine, [case.prompt_ids for case in cases], args.copy_tokens, "copying", progress)
    in_turns = interleaved(read_workloads(args.workloads))
    chosen = list(islice(fitting_records(in_turns, tokenizer, engine.info.max_model_len - args.loop_tokens), args.prompts))
    loops = generate(engine, [ids for _, ids in chosen], args.loop_tokens, "loops", progress)
    texts = [tokenizer.decode(text_ids(request)) for request in loops]
    progress.say("held-out loss")
    losses = held_out_results(args.model, valid, engine)
    return {
        "copying": copying_results(cases, copies),
        "loops": loop_results([record for record, _ in chosen], loops, texts),
        "held_out": losses,
    }


def measure(args: argparse.Namespace, run: Run) -> Results:
    """All three measurements of the model."""
    options = EngineOptions(max_running=args.batch_size, max_waiting=10_000)
    engine = Engine.load(ModelOptions(path=args.model, threads=args.threads), options, SpeculationOptions("llma"))
    with torch.inference_mode():
        results = evaluate(args, engine, run.progress)
    return results | {"parameters": engine.info.num_parameters, "dtype": engine.info.dtype}


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("--model", default="demo_model", help="folder of the model")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with valid.jsonl.gz")
    parser.add_argument("--workloads", type=Path, required=True, help="folder with *.jsonl")
    parser.add_argument("--prompts", type=int, default=100, help="prompts of the workloads")
    parser.add_argument("--loop-tokens", type=int, default=200, help="most tokens of their outputs")
    parser.add_argument("--copy-tokens", type=int, default=512, help="most tokens of an answer to a validation record")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, help="torch threads; all cores when absent")


def missed(results: Results, args: argparse.Namespace) -> list[str]:
    """The goals that were not reached."""
    return [f"{part}: the goal was {results[part]['goal']}" for part in ("copying", "loops") if not results[part]["reached"]]


BENCH = Bench("evaluate-demo-model", __doc__ or "", measure, options, wrong=missed)

if __name__ == "__main__":
    sys.exit(run(BENCH))
