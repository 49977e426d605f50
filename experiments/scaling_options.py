"""The options of ``outrider bench scaling`` and the forms that it compares, read before anything heavy is imported."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

DESCRIPTION = """Strong scaling: the same prompts and outputs, one request at a time, on one worker and on several.

A worker is a GPU, or on a CPU a process with --threads threads. The forms that compete, each with a process of its own:
  one         one worker
  threads     one worker with as many threads as N workers have (CPUs alone)
  lookahead   LP, lookahead parallelism: N copies of the model share each step's draft tree
  tensor      TP by DeepSpeed: each of N workers has a slice of every layer
  pipeline    PP: each of N workers has some of the layers
Each runs plain decoding, one token a step, and every --strategy. Forms take turns on every prompt, repeat by repeat, so that a
drift of the machine hits all alike. With several --budgets each pair of a form and a strategy first looks for its own best one,
on other records (--sweep-records). A form that cannot run here is left out by name, with the reason.

Ratios are of tokens a second after the first token (the prefill, which no form drafts in, is in tokens/s); they are the mean over
the workloads, with the lowest and the highest of the repeats. A step's time is split into drafting, compute, exchange (messages,
sums and waiting for the slower), recompute (tokens whose KV another rank has) and the engine's other work. Every output is
compared with that of plain decoding on one worker. With --random-model and --tokenizer forwards are real and the committed tokens
are the known outputs of the files (LLMA, arXiv 2304.04487, section 3.2): a strategy that drafts from the target's own guesses,
such as jacobi, then has no more than chance.

Threads and sums that wait in a loop take many times as long beside other work: let nothing else run.

example, some minutes with the demo model on two cores:
  outrider bench scaling --prompts chat.jsonl code.jsonl
a quick look:
  outrider bench scaling --prompts chat.jsonl --records 1 --max-tokens 32 --repeats 1 --strategy jacobi --form one --form tensor
"""
PLAIN = "autoregressive"
KINDS = ("one", "threads", "lookahead", "tensor", "pipeline")
_NAMES = {"one": "", "threads": "", "lookahead": "LP ", "tensor": "TP ", "pipeline": "PP "}
PARTS = ("propose", "compute", "recompute", "exchange", "rest")  # of a step
SIZES = ("110m", "280m", "tiny")  # of experiments.guided


@dataclass(frozen=True, slots=True)
class Form:
    """A way to put workers to one request."""

    kind: str  # of ``KINDS``
    workers: int  # that it has; threads of one rank count as workers, too
    threads: int  # of each worker

    @property
    def ranks(self) -> int:
        """Processes that compute."""
        return 1 if self.kind in ("one", "threads") else self.workers

    @property
    def rank_threads(self) -> int:
        """Torch threads of each."""
        return self.threads * self.workers // self.ranks

    @property
    def label(self) -> str:
        """For tables: ``LP 2 x 1`` has two ranks with a thread each."""
        return f"{_NAMES[self.kind]}{self.ranks} x {self.rank_threads}"


def called(strategy: str) -> str:
    """A strategy in tables: plain decoding is called so."""
    return "plain" if strategy == PLAIN else strategy


def forms_of(kinds: Sequence[str], workers: Sequence[int], threads: int, gpus: int | None) -> tuple[list[Form], dict[str, str]]:
    """The forms that can be tried, one worker first, and by label why the others cannot.

    Args:
        kinds: of ``KINDS``.
        workers: numbers of them, from 2 on.
        threads: of each.
        gpus: of this machine, to compute on; None to compute on its processor.
    """
    wanted = [Form(kind, count, threads) for count, kind in itertools.product(workers, KINDS[1:]) if kind in kinds]
    found, skipped = [Form("one", 1, threads)], {}
    for form in wanted:
        reason = _missing(form, gpus)
        if reason is None:
            found.append(form)
        else:
            skipped[form.label] = reason
    return found, skipped


def _missing(form: Form, gpus: int | None) -> str | None:
    """What a form needs and does not find."""
    if form.kind == "threads" and gpus is not None:
        return "a GPU has no threads of ours"
    if gpus is not None and gpus < form.workers:
        return f"this machine has {gpus} GPU{'s' * (gpus != 1)}"
    if form.kind not in ("tensor", "pipeline"):
        return None
    from torch import distributed  # here: the options are read without it

    if not distributed.is_available():
        return "torch was built without torch.distributed"
    if form.kind == "tensor" and find_spec("deepspeed") is None:
        return "DeepSpeed is not installed: pip install 'outrider[baselines]'"
    return None


def add_options(
    parser: argparse.ArgumentParser,
    common: Callable[[argparse.ArgumentParser], None],
    numbers: Callable[[Callable[[str], float], float, str], tuple[float, ...]],
) -> None:
    """The options of the command.

    Args:
        parser: of the command.
        common: adds those of all runs.
        numbers: reads some numbers of a kind, from a least one on.
    """
    common(parser)
    counts, rows = partial(numbers, int, 2), partial(numbers, int, 1)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines with id and prompt; or known output")
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; several times; all when absent")
    parser.add_argument("--form", action="append", choices=KINDS, help="several times; all when absent, `one` always")
    parser.add_argument("--workers", type=counts, default=(2,), help="numbers of workers beside one: 2,4,8")
    parser.add_argument("--budgets", type=rows, default=(8,), help="most drafted rows of a rank: 4,16 looks for the best of two")
    parser.add_argument("--sweep-records", type=int, default=1, help="of each file, to look for the best budget")
    parser.add_argument("--max-prompt", type=int, help="records with a longer prompt are left out; it is the prefill's time")
    parser.add_argument("--pin", action="store_true", help="each rank stays on a core of its own")
    parser.add_argument("--random-model", choices=SIZES, help="a Llama of random weights along known outputs; with --tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer, with --random-model")
    parser.set_defaults(dtype="float32", max_tokens=48, records=1)


def check_options(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the process with code 2 where options do not go together."""
    for name in ("sweep_records", "max_prompt"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("workers", "budgets"):
        if not getattr(args, name) or len(set(getattr(args, name))) < len(getattr(args, name)):
            parser.error(f"--{name} must name at least one number, and none twice")
    if (args.random_model is None) != (args.tokenizer is None):
        parser.error("--random-model and --tokenizer go together")
    if args.dtype == "auto":
        parser.error("--dtype must be named: outputs are compared, and types round differently")
    if args.device not in ("auto", "cpu", "cuda"):
        parser.error(f"--device must be auto, cpu or cuda, got {args.device}: workers are the GPUs from the first on")
    if find_spec("matplotlib") is None:
        parser.error("the figures need matplotlib: install outrider with the extra `dev`")
    args.form = tuple(args.form or KINDS)
