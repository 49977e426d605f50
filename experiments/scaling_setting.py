"""The model and the prompts that the measurements of groups have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.cli.generate.known_texts import TextTokenizer
from configs.schema import find_model
from engine.errors import ModelLoadError
from engine.loading.model import load_config, load_tokenizer
from experiments.bench_models import Workload, chat_workload, fitting, known_workload
from experiments.contestants import Prompt
from experiments.guided_ranks import RankModel


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts to find budgets with, and others to measure on."""

    sweep: list[Workload]
    measured: list[Workload]

    def prompts(self) -> list[Prompt]:
        """All of them."""
        return [prompt for workload in (*self.sweep, *self.measured) for prompt in workload.prompts]

    def known(self) -> dict[str, list[int]] | None:
        """Outputs by id, where they are known."""
        return {prompt.id: prompt.known for prompt in self.prompts() if prompt.known is not None} or None


def read_setting(args: argparse.Namespace, sweep_records: int, draft_rows: int) -> tuple[Texts, RankModel]:
    """What to run on; the weights are not read yet.

    Args:
        args: with ``random_model``, ``tokenizer``, ``model``, ``prompts``, ``records``, ``max_tokens``, ``max_prompt``, ``dtype``
            and ``seed``.
        sweep_records: of each file, to find budgets with.
        draft_rows: of the widest tree.

    Raises:
        ValueError, ModelLoadError: a file or a model that cannot be used.
    """
    if args.random_model:
        cutter = TextTokenizer(args.tokenizer)
        workloads = [known_workload(path, cutter, args.max_tokens, None) for path in args.prompts]
        name, vocab_size, tokenizer = args.random_model, cutter.vocab_size, str(args.tokenizer)
    else:
        name, tokenizer = find_model(args.model), ""
        chat = load_tokenizer(name)
        vocab_size, own = _sizes(name)
        workloads = [fitting(chat_workload(path, chat, None), args.max_tokens, own) for path in args.prompts]
    texts = _texts(args, workloads, sweep_records)
    context = max(len(prompt.ids) + len(prompt.known or range(args.max_tokens)) for prompt in texts.prompts())
    return texts, RankModel(name, vocab_size, context, draft_rows, args.dtype, args.seed, tokenizer)


def _sizes(name: str) -> tuple[int, int]:
    """Vocabulary and context of a model, by its configuration."""
    try:
        config = load_config(name).get_text_config()
        return int(config.vocab_size), int(config.max_position_embeddings)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"the configuration of {name!r} cannot be used: {str(error).splitlines()[0]}") from error


def _texts(args: argparse.Namespace, workloads: Sequence[Workload], sweep_records: int) -> Texts:
    """Raises ``ValueError`` when a file has too few prompts, or two of them have one id."""
    sweep, measured = [], []
    for workload in workloads:
        fit = [prompt for prompt in workload.prompts if args.max_prompt is None or len(prompt.ids) <= args.max_prompt]
        needed = sweep_records + args.records
        if len(fit) < needed:
            raise ValueError(f"{workload.name} has {len(fit)} prompts that fit, but {needed} are needed: lower --records")
        sweep.append(Workload(workload.name, fit[:sweep_records], workload.too_long))
        measured.append(Workload(workload.name, fit[sweep_records:needed], workload.too_long))
    texts = Texts(sweep, measured)
    if len({prompt.id for prompt in texts.prompts()}) < len(texts.prompts()):
        raise ValueError("two records have one id: give each its own")
    return texts
