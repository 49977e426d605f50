"""The model, the prompts and the options that the measurements of groups have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from cluster.known_texts import TextTokenizer
from configs.schema import find_model
from configs.slices import Dtype, ModelOptions
from engine.loading import LoadedModel, load_model, load_tokenizer
from experiments.bench_models import Workload, chat_workload, fitting, known_workload
from experiments.contestants import Prompt
from experiments.guided import SIZES
from experiments.guided_ranks import RankModel
from experiments.record import RESULTS

_MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts to find budgets with, and others to measure on."""

    sweep: list[Workload]
    measured: list[Workload]

    def prompts(self) -> list[Prompt]:
        """All of them."""
        return [prompt for workload in (*self.sweep, *self.measured) for prompt in workload.prompts]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that ``load_setting`` needs, and what else the measurements have in common."""
    parser.add_argument("--random-model", choices=tuple(SIZES), help="a Llama of random weights that follows known outputs")
    parser.add_argument("--model", help="folder of a real model, or its name on the hub; without --random-model")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer, with --random-model")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines with id, prompt and output")
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; several times; auto when absent")
    parser.add_argument("--ranks", type=int, nargs="+", help="group sizes")
    parser.add_argument("--budgets", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="drafted rows of a rank")
    parser.add_argument("--records", type=int, help="of each file")
    parser.add_argument("--max-tokens", type=int, default=_MAX_TOKENS, help="of an output")
    parser.add_argument("--max-prompt", type=int, help="records with a longer prompt are left out; it is the prefill's time")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--dtype", choices=tuple(kind for kind in get_args(Dtype) if kind != "auto"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the figure")


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the process with code 2 where the options of ``add_options`` do not go together."""
    if (args.random_model is None) == (args.model is None):
        parser.error("give --random-model or --model")
    if args.random_model and args.tokenizer is None:
        parser.error("--random-model needs --tokenizer")
    args.strategy = args.strategy or ["auto"]


def load_setting(args: argparse.Namespace) -> tuple[LoadedModel, Texts, RankModel]:
    """What to run on, from the options of ``add_options``.

    Raises:
        ValueError, ModelLoadError: a file or a model that cannot be used.
    """
    draft_rows = max(args.ranks) * max(args.budgets)
    if args.random_model:
        cutter = TextTokenizer(args.tokenizer)
        texts = _texts(args, [known_workload(path, cutter, args.max_tokens, None) for path in args.prompts])
        context = max(len(prompt.ids) + len(prompt.known or ()) for prompt in texts.prompts())
        model = RankModel(args.random_model, cutter.vocab_size, context, draft_rows, args.dtype, args.seed)
        loaded = LoadedModel(model.load(), load_tokenizer(str(args.tokenizer)), f"random-{args.random_model}", context, ())
        return loaded, texts, model
    path = find_model(args.model)
    loaded = load_model(ModelOptions(path, dtype=args.dtype, device="cpu", threads=1))
    vocab_size = loaded.model.config.get_text_config().vocab_size
    model = RankModel(path, vocab_size, loaded.max_model_len, draft_rows, args.dtype, args.seed)
    workloads = [chat_workload(file, loaded.tokenizer, None) for file in args.prompts]
    return loaded, _texts(args, [fitting(workload, args.max_tokens, model.context) for workload in workloads]), model


def _texts(args: argparse.Namespace, workloads: Sequence[Workload]) -> Texts:
    """Raises ``ValueError`` when a file has too few prompts, or two of them have one id."""
    sweep, measured = [], []
    for workload in workloads:
        fit = [prompt for prompt in workload.prompts if args.max_prompt is None or len(prompt.ids) <= args.max_prompt]
        needed = args.sweep_records + args.records
        if len(fit) < needed:
            raise ValueError(f"{workload.name} has {len(fit)} prompts that fit, but {needed} are needed: lower --records")
        sweep.append(Workload(workload.name, fit[: args.sweep_records], workload.too_long))
        measured.append(Workload(workload.name, fit[args.sweep_records : needed], workload.too_long))
    texts = Texts(sweep, measured)
    if len({prompt.id for prompt in texts.prompts()}) < len(texts.prompts()):
        raise ValueError("two records have one id: give each its own")
    return texts
