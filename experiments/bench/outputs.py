"""Count the outputs of a real model that equal plain decoding's at one request, and measure what exactness costs.

  outrider bench outputs --model smollm2-135m-instruct --workloads DIR
  outrider bench outputs --model 110m --workloads DIR --records 1    # random weights, more near-ties
  outrider bench outputs --workloads DIR --against CHECKOUT    # only speeds, compared with another revision

The first records of each workload are asked greedily and sampled, in the model's chat template: first one at a time without
drafts, then with other strategies, in batches whose prompts are cut into chunks, with preemption, as a second turn whose prompt
contains the first answer (with and without its KV), and on two ranks that share each step. transformers is compared with itself,
and so is vLLM, if --vllm names a Python that has it. Outputs are kept in --kept, so that an interrupted run continues; a run with
other settings needs another file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from outrider.actors.offline_group import OfflineGroup, OfflinePrompt
from outrider.actors.ranks import GroupError
from outrider.cluster.cli.generate.prompt_file import PromptRecord
from outrider.cluster.observe.replay_check import difference
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.decoding.drafters.registry import LOSSLESS, WITH_DRAFT_MODEL
from outrider.decoding.request import PLAIN, Request, SamplingParams
from outrider.engine.engine import Engine, load_runner
from outrider.engine.text.chat import render_chat
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.engines.models import model_folder
from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.record import ROOT, Kept, git_state
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.bench.workloads import first_that_fit, read_workloads, run_engine
from outrider.experiments.peers.contestants import Field, Setting, end_tokens
from outrider.experiments.peers.environments import Environments, MissingPeerError
from outrider.experiments.peers.revisions import compare

DRAWS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 7})
DRAFTING = sorted(LOSSLESS - set(WITH_DRAFT_MODEL) - {PLAIN})
CROWDS = (1, 8, 32)  # requests in a step
NEXT_TURN = "Say that again in one sentence."
_ids = count()
_PROMPT_TOKENS = 1800  # longer prompts are skipped
_TIMED, _ROUNDS = 22, 3  # greedy prompts and rounds of a comparison of revisions
_PEER_TURN = 16  # asks per job of another system, whose answers are kept after each job
Say = Callable[[str], None]
Keep = Callable[[str, Sequence[int]], None]  # key of the ask, output


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt to answer."""

    key: str
    record: PromptRecord
    prompt: Sequence[int]
    references: Sequence[Sequence[int]]
    draw: int  # index of ``DRAWS``

    def request(self, max_tokens: int, prompt: Sequence[int] | None = None, priority: int = 0) -> Request:
        """Return a new request, for another prompt if one is given."""
        params = SamplingParams(max_tokens=max_tokens, **DRAWS[self.draw])
        own = self.prompt if prompt is None else prompt
        return Request(f"{self.key}-{next(_ids)}", own, params, self.references, tenant="local", priority=priority)


@dataclass(frozen=True)
class Case:
    """A way to answer all asks, or those of the first record of each workload."""

    name: str
    strategy: str
    running: int  # requests in a step
    rows: int = 512  # per step
    every: bool = False  # all asks
    policy: str = "fcfs"
    turn: str = ""  # second turn of a conversation: ``cold`` or ``warm`` KV
    ranks: int = 1


def cases() -> list[Case]:
    """Return all cases; the first, plain decoding at one request, is the reference."""
    alone = [Case("plain at 1", PLAIN, 1, every=True), Case("plain, second turn", PLAIN, 1, turn="cold")]
    crowds = [Case(f"plain at {crowd}", PLAIN, crowd, every=True) for crowd in CROWDS[1:]]
    return alone + crowds + [case for name in DRAFTING for case in _cases_of(name)]


def _cases_of(strategy: str) -> list[Case]:
    """Return the cases of a strategy: ``auto`` with the default rows, others with fewer, so that prompts are cut into chunks."""
    default = strategy == "auto"
    rows = dict.fromkeys(CROWDS, Case.rows) if default else {1: 96, 8: 96, 32: 192}
    return [
        *(Case(f"{strategy} at {crowd}", strategy, crowd, rows[crowd], every=default) for crowd in CROWDS),
        Case(f"{strategy}, preempted", strategy, 3, policy="priority"),
        Case(f"{strategy}, second turn over KV of the first", strategy, 4, turn="warm"),
        Case(f"{strategy}, two ranks", strategy, 8, ranks=2),
    ]


def answers(kept: Kept, case: str) -> dict[str, list[int]]:
    """Return the outputs of a case so far, by ask."""
    return {ask: tokens for name, ask, tokens in kept.found if name == case}


def answer(case: Case, asks: Sequence[Ask], args: argparse.Namespace, kept: Kept, say: Say) -> None:
    """Answer the missing asks of a case."""
    missing, done = [ask for ask in asks if not kept.has((case.name, ask.key))], count(1)
    if not missing:
        return

    def keep(key: str, tokens: Sequence[int]) -> None:
        kept.add([case.name, key, list(tokens)])
        number = next(done)
        if number % 10 == 0 or number == len(missing):
            say(f"{case.name}: {number} of {len(missing)}")

    if case.ranks > 1:
        _answer_by_ranks(case, missing, args, keep)
        return
    engine = load_engine(args, case)
    if case.turn:
        first = answers(kept, "plain at 1")
        for ask in missing:
            prompt = second_turn(engine, ask, first[ask.key])
            if case.turn == "warm":  # the first turn by the same engine leaves its KV
                run_engine(engine, [ask.request(args.max_tokens)])
            request = ask.request(args.max_tokens, prompt)
            run_engine(engine, [request])
            keep(ask.key, request.output_ids.tolist())
        if case.turn == "warm":
            assert engine.counts().prefix_hits > 0
        return
    requests = {}
    for number, ask in enumerate(missing):
        priority = -number if case.policy == "priority" else 0  # later requests go first and preempt others
        requests[ask.request(args.max_tokens, priority=priority)] = ask.key
    _run_arriving(engine, list(requests), lambda request: keep(requests[request], request.output_ids.tolist()), case)
    if case.policy == "priority":
        assert engine.counts().preemptions > 0


def _run_arriving(engine: Engine, requests: Sequence[Request], keep: Callable[[Request], None], case: Case) -> None:
    """Run all requests as one batch, or with priorities one after another, every few steps."""
    if case.policy != "priority":
        run_engine(engine, requests, keep)
        return
    waiting, live, steps = list(requests), dict[str, Request](), 0
    while waiting or engine.has_work:
        if waiting and steps % 5 == 0:
            request = waiting.pop(0)
            live[request.request_id] = request
            engine.add(request)
        steps += 1
        for output in engine.step():
            if output.finish_reason is not None:
                keep(live.pop(output.request_id))


def _answer_by_ranks(case: Case, asks: Sequence[Ask], args: argparse.Namespace, keep: Keep) -> None:
    """Answer with ranks in processes, each with a part of the threads."""
    model = ModelOptions(args.path, dtype=args.dtype, device="cpu", threads=max(1, args.threads // case.ranks))
    options = EngineOptions(case.running, max_waiting=len(asks))
    shared = ParallelismOptions("lookahead", case.ranks, adaptive=False)
    with closing(OfflineGroup(model, options, SpeculationOptions(case.strategy), shared)) as group:
        for draw, params in enumerate(DRAWS):
            own = [ask for ask in asks if ask.draw == draw]
            prompts = [OfflinePrompt(ask.key, ask.record.prompt, tuple(ask.record.references)) for ask in own]
            tokens: dict[str, list[int]] = {ask.key: [] for ask in own}
            group.submit(prompts, SamplingParams(max_tokens=args.max_tokens, **params), chat=True)
            for outputs in group.outputs():
                for output in outputs:
                    tokens[output.request_id] += output.token_ids
            for key, found in tokens.items():
                keep(key, found)
        counts = group.group_counts()
        assert counts is not None and counts.mean_width > 1 and not counts.divergences, counts


def second_turn(engine: Engine, ask: Ask, answered: Sequence[int]) -> list[int]:
    """Return the prompt of a second turn: the first one and its output as tokens, then the next message in the chat template."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    ends = engine.info.eos_token_ids
    body = [token for token in answered if token not in ends]
    return [*ask.prompt, *body, *render_chat(tokenizer, [{"role": "user", "content": NEXT_TURN}])]


def load_engine(args: argparse.Namespace, case: Case) -> Engine:
    """Load an engine with the options of a case."""
    model = ModelOptions(args.path, dtype=args.dtype, device="cpu", threads=args.threads, max_model_len=args.context)
    options = EngineOptions(case.running, case.rows, max_waiting=1 << 20, scheduling_policy=case.policy)  # type: ignore[arg-type]
    return Engine.load(model, options, SpeculationOptions(case.strategy))


def read_asks(args: argparse.Namespace) -> list[Ask]:
    """Return the first records of each workload whose prompts are not too long, greedy and sampled, interleaved.

    Raises:
        PromptFileError: the folder cannot be read, or nothing in it fits.
        ModelLoadError: the model has no tokenizer that can be used.
    """
    tokenizer = load_tokenizer(args.path)
    asks = []
    for record, ids in first_that_fit(args.workloads, tokenizer, args.records, _PROMPT_TOKENS):
        references = [tokenizer.encode(text, add_special_tokens=False) for text in record.references]
        asks += [Ask(f"{record.id}/{draw}", record, ids, references, draw) for draw in range(len(DRAWS))]
    return asks


def compared(kept: Kept, case: str, with_case: str) -> dict[str, Any]:
    """Count the outputs of a case that equal those of another."""
    own, others = answers(kept, case), answers(kept, with_case)
    found = {ask: difference(tokens, others[ask]) for ask, tokens in own.items()}
    differing = {ask: one.position for ask, one in found.items() if one is not None}
    return {
        "case": case, "with": with_case, "answers": len(own), "equal": len(own) - len(differing),
        "tokens": sum(map(len, own.values())), "first_parted": differing,
    }  # fmt: skip


PEERS = {  # by case: the system of ``experiments.peers``, its mode, requests at once; the first of a system is its reference
    "transformers": ("transformers", "greedy", 1),
    "transformers, prompt lookup": ("transformers", "lookup", 1),
    "transformers at 8": ("transformers", "greedy", 8),
    "vLLM": ("vllm", "vllm", 1),
    "vLLM at 8": ("vllm", "vllm", 8),
    "vLLM, ngram": ("vllm ngram", "vllm", 1),
}


def peer_answers(asks: Sequence[Ask], args: argparse.Namespace, kept: Kept, say: Say) -> list[dict[str, Any]]:
    """Compare transformers, and vLLM if available, each with itself: greedy, with drafts, and in a batch of eight.

    Raises:
        MissingPeerError: a system cannot run here.
    """
    greedy = [ask for ask in asks if ask.draw == 0][: args.peer_asks]
    made = Environments(args.kept.parent, {"vllm": args.vllm}, False, say)
    longest = _PROMPT_TOKENS + args.max_tokens
    setting = Setting(args.path, args.dtype, args.threads, args.context, longest, 8, end_tokens(args.path))
    rows, references = [], dict[str, str]()
    with Field(setting, made, gguf=Path, log=Path(tempfile.gettempdir()) / "outrider-peers") as field:
        for name, (system, mode, running) in PEERS.items():
            of = system.split()[0]
            if of == "vllm" and args.vllm is None:
                continue
            missing = [ask for ask in greedy if not kept.has((name, ask.key))]
            for first in range(0, len(missing), _PEER_TURN):
                group = missing[first : first + _PEER_TURN]
                told = [[ask.key, list(ask.prompt), []] for ask in group]
                job = {"mode": mode, "running": running, "max_tokens": args.max_tokens, "asks": told, "fresh": name}
                for ask, tokens in zip(group, field.ask(system, job)["tokens"], strict=True):
                    kept.add([name, ask.key, tokens])
                say(f"{name}: {first + len(group)} of {len(missing)}")
            reference = references.setdefault(of, name)
            if name != reference:
                rows.append(compared(kept, name, reference))
    return rows


def time_check(args: argparse.Namespace) -> list[float]:
    """Return the seconds of the check at start, five times."""
    from outrider.engine.forward import exactness  # as ``load_weights`` above

    model = ModelOptions(args.path, dtype=args.dtype, device="cpu", threads=args.threads, max_model_len=args.context)
    _, runner = load_runner(model, EngineOptions(2), SpeculationOptions(PLAIN), 1)
    found = []
    for _ in range(5):
        started = time.perf_counter()
        fault = exactness.check(runner)
        found.append(time.perf_counter() - started)
        assert fault is None, fault
    return found


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Measure the cases, or the speeds of two revisions."""
    with model_folder(args) as path:
        return _measure(argparse.Namespace(**vars(args) | {"path": path}), run.progress.say)


def _measure(args: argparse.Namespace, say: Say) -> Results:
    asks = read_asks(args)
    if args.against is not None:
        setting = {name: getattr(args, name) for name in ("path", "dtype", "threads", "context", "max_tokens")}
        greedy = [(ask.prompt, ask.references) for ask in asks if ask.draw == 0][:_TIMED]
        return {"against": compare(args.against, setting, greedy, _ROUNDS, say)}
    setting = {key: getattr(args, key) for key in ("model", "dtype", "max_tokens", "context")}
    kept = Kept(args.kept, setting | {"git": git_state(ROOT)}, lambda line: (line[0], line[1]))
    first = {ask.record.id for ask in asks[: len(DRAWS) * len(read_workloads(args.workloads))]}
    wanted = [case for case in cases() if not args.cases or case.name in args.cases]
    for case in wanted:
        answer(case, asks if case.every else [ask for ask in asks if ask.record.id in first], args, kept, say)
    rows = []
    for case in wanted:
        reference = "plain, second turn" if case.turn else "plain at 1"
        rows.append(compared(kept, case.name, reference))
    check_s = time_check(args)
    peers = peer_answers(asks, args, kept, say) if args.peer_asks else []
    return {
        "model": args.model,
        "asks": len(asks),
        "records": len(asks) // len(DRAWS),
        "check_s": check_s,
        "cases": rows,
        "peers": peers,
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "bfloat16", ("bfloat16", "float16", "float32"), "smollm2-135m-instruct")
    parser.add_argument("--workloads", type=Path, required=True, help="folder of JSON-lines files")
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct", help="tokenizer for random weights (--model 110m)")
    parser.add_argument("--records", type=int, default=5, help="records of each file, the first that fit")
    parser.add_argument("--max-tokens", type=int, default=256, help="maximum output tokens")
    parser.add_argument("--context", type=int, default=4096, help="maximum tokens of prompt and output together")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in cases()], default=[], help="default: all")
    parser.add_argument("--threads", type=int, default=2, help="number of torch threads")
    parser.add_argument("--peer-asks", type=int, default=22, help="greedy prompts for transformers and vLLM; 0: none")
    parser.add_argument("--vllm", type=Path, help="Python interpreter that has vLLM")
    parser.add_argument("--against", type=Path, help="checkout of another revision: compare only the speeds, in turns")
    parser.add_argument("--kept", type=Path, default=Path("exact-outputs.kept.jsonl"), help="file of the outputs so far")
    parser.set_defaults(seed=DRAWS[1]["seed"])


def other(results: Results, args: argparse.Namespace) -> list[str]:
    """Return the cases with differing outputs."""
    rows = results.get("cases", [])
    return [
        f"{row['case']}: {row['equal']} of {row['answers']} as {row['with']}" for row in rows if row["answers"] != row["equal"]
    ]


BENCH = Bench(
    "exact-outputs", __doc__ or "", measure, options,
    dict.fromkeys(("records", "max_tokens", "threads"), 1) | {"peer_asks": 0},
    wrong=other, refuses=(GroupError, MissingPeerError),
)  # fmt: skip
