"""Models and prompts of a run, and the contestants of ``outrider bench strategies``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from outrider.cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from outrider.cluster.cli.generate.prompt_file import PromptFileError, read_prompts
from outrider.cluster.cli.generate.strategy_option import StrategyChoice
from outrider.configs.schema import find_model
from outrider.configs.slices import EngineOptions, ModelOptions
from outrider.engine.loading.model import LoadedModel, load_model, load_weights
from outrider.engine.loading.model_files import find_files
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.engines.contestants import Contestant, Prompt, SharedModel
from outrider.experiments.bench.engines.guided import random_model, stock_twin
from outrider.experiments.bench.engines.stock_generate import StockGenerate, StockPromptLookup
from outrider.experiments.bench.options import SIZES
from outrider.experiments.bench.workloads import prompt_ids

MAX_TOKENS = 128  # default of an output


def calm(threads: int) -> None:
    """Set the number of torch threads, and silence transformers' progress bars and warnings."""
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


@contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[str]:
    """Yield the folder of ``args.model``; a random model of ``SIZES`` is written to a temporary folder."""
    if args.model not in SIZES:
        yield find_files(find_model(args.model))
        return
    with TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(find_model(args.tokenizer))
        random_model(args.model, len(tokenizer), args.context, torch.bfloat16, seed=0).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield folder


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of a file."""

    name: str
    prompts: list[Prompt]
    too_long: int  # records that do not fit the context


def known_workload(path: Path, tokenizer: TextTokenizer, max_tokens: int | None, limit: int | None) -> Workload:
    """Read a workload whose outputs are followed, without a chat template, as in a replay. Raises ``PromptFileError``."""
    return Workload(path.stem, [Prompt.of(text) for text in read_known_texts(path, tokenizer, max_tokens, limit)], 0)


def chat_workload(path: Path, tokenizer: PreTrainedTokenizerFast, limit: int | None) -> Workload:
    """Read a workload of user messages in the model's chat template. Raises ``PromptFileError``."""
    prompts = [
        Prompt(
            record.id,
            prompt_ids(record, tokenizer),
            [tokenizer.encode(text, add_special_tokens=False) for text in record.references],
            answer=record.output,
        )
        for record in read_prompts(path)[:limit]
    ]
    return Workload(path.stem, prompts, 0)


def fitting(workload: Workload, max_tokens: int, context: int) -> Workload:
    """Drop the records that are too long for a context.

    Raises:
        PromptFileError: none fits, or two have one id.
    """
    prompts = [
        prompt
        for prompt in workload.prompts
        if len(prompt.ids) + (max_tokens if prompt.known is None else len(prompt.known)) <= context
    ]
    if not prompts:
        raise PromptFileError(f"no record of {workload.name} fits the context of {context} tokens: lower --max-tokens")
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise PromptFileError(f"two records of {workload.name} have one id: give each its own")
    return Workload(workload.name, prompts, len(workload.prompts) - len(prompts))


@dataclass(frozen=True, slots=True)
class Setting:
    """A model as this engine and as transformers run it, and its workloads."""

    loaded: LoadedModel
    stock: PreTrainedModel
    workloads: list[Workload]


def load_setting(args: argparse.Namespace, guided: bool = False) -> Setting:
    """Read the prompts, and load or make the model; ``guided`` runs follow known outputs, with ``--random-model`` too.

    Raises:
        PromptFileError, ModelLoadError: an unusable file or model.
    """
    if guided and args.random_model is not None:
        return _random_setting(args)
    options = ModelOptions(find_model(args.model), dtype=args.dtype, device=args.device, threads=args.threads)
    loaded = load_model(options)
    if guided:
        cutter = TextTokenizer(args.tokenizer or Path(options.path))
        if cutter.vocab_size > loaded.model.config.get_text_config().vocab_size:
            raise PromptFileError(f"the tokenizer has more tokens ({cutter.vocab_size}) than the model: give the model's own")
        workloads = [known_workload(path, cutter, args.max_tokens, args.records) for path in args.prompts]
    else:
        workloads = [chat_workload(path, loaded.tokenizer, args.records) for path in args.prompts]
    max_tokens = args.max_tokens or MAX_TOKENS
    workloads = [fitting(workload, max_tokens, loaded.max_model_len) for workload in workloads]
    stock = load_weights(options.path, loaded.model.dtype, "sdpa", loaded.model.device)
    return Setting(loaded, stock.eval(), workloads)


def _random_setting(args: argparse.Namespace) -> Setting:
    cutter = TextTokenizer(args.tokenizer)
    workloads = [known_workload(path, cutter, args.max_tokens, args.records) for path in args.prompts]
    context = max(len(prompt.ids) + len(prompt.known or ()) for workload in workloads for prompt in workload.prompts)
    model = random_model(args.random_model, cutter.vocab_size, context, getattr(torch, args.dtype), args.seed)
    device = "cuda" if args.device == "auto" and torch.cuda.is_available() else args.device
    model = model.to("cpu" if device == "auto" else device)
    loaded = LoadedModel(model, load_tokenizer(str(args.tokenizer)), f"random-{args.random_model}", context, ())
    return Setting(loaded, stock_twin(model), [fitting(workload, 0, context) for workload in workloads])


def contestants(setting: Setting, choices: Sequence[StrategyChoice], args: argparse.Namespace) -> list[Contestant]:
    """Return greedy ``generate``, transformers' prompt lookup and this engine's strategies."""
    loaded, max_tokens = setting.loaded, args.max_tokens or MAX_TOKENS
    shared = SharedModel(loaded, EngineOptions(max_running=1, prefix_caching=False), args.budget)
    return [
        StockGenerate(setting.stock, max_tokens, loaded.eos_token_ids),
        StockPromptLookup(setting.stock, max_tokens, loaded.eos_token_ids),
        *(shared.contestant(choice, max_tokens) for choice in choices),
        *(shared.contestant(choice, max_tokens, paying=True) for choice in choices if args.paying),
    ]
