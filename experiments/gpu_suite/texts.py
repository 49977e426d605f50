"""Prompts with known outputs, as tokens of a model's vocabulary, for models with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from cluster.cli.generate.prompt_file import PromptFileError
from experiments.bench.engines.contestants import Prompt
from experiments.bench.workloads import interleaved
from experiments.gpu_suite.models import SEED, SIZES, Bench
from experiments.gpu_suite.worker import Report, Setting

_NAMES = ("specbench_rag.jsonl", "llma_rag.jsonl")  # read from a folder of workloads that has them: retrieval-augmented answers
_RECORDS, _MADE_UP = 12, 4  # of all workloads together; without workloads
_LIMIT = 40  # records of a file that are looked at


class ByteTokenizer(TextTokenizer):
    """Tokenizer with one token per byte, if none is given: the same drafts, with four times as many tokens."""

    def __init__(self) -> None:
        self.end_token_id, self.vocab_size = 256, 257

    def encode(self, texts: Sequence[str], special_tokens: bool = False) -> list[list[int]]:
        """See ``TextTokenizer``; there are no special tokens."""
        return [list(text.encode()) for text in texts]


def prompts_for(bench: Bench, report: Report) -> list[Prompt]:
    """Return the prompts of a part's model; see ``read_texts``."""
    return read_texts(bench.setting, bench.loaded.vocab_size, SIZES[bench.size].context, report)


def read_texts(setting: Setting, vocab_size: int, context: int, report: Report) -> list[Prompt]:
    """Return records of each workload in turns, or made-up ones, and describe them in the report.

    Token ids are renumbered to fit the vocabulary; equal ids stay equal. Records with more than ``context`` tokens of prompt and
    output are left out. Raises ``PromptFileError`` if a file cannot be read, or no record fits.
    """
    if not setting.workloads:
        report.found["texts"] = {"source": "made up: no --workloads", "records": _MADE_UP}
        return made_up(_MADE_UP, vocab_size, min(context // 4, 600), setting.max_tokens)
    tokenizer = ByteTokenizer() if setting.tokenizer is None else TextTokenizer(setting.tokenizer)
    files = [file for path in setting.workloads for file in (_files_of(path) if path.is_dir() else [path])]
    lists = []
    for file in files:
        texts = read_known_texts(file, tokenizer, setting.max_tokens, _LIMIT)
        lists.append([Prompt.of(text) for text in texts if len(text.prompt_ids) + len(text.output_ids) < context])
    prompts = list(interleaved(lists))[:_RECORDS]
    if not prompts:
        raise PromptFileError(f"no record of {', '.join(path.name for path in files) or 'no file'} fits {context} tokens")
    report.found["texts"] = {
        "source": [path.name for path in files],
        "tokens": "bytes: no --tokenizer" if setting.tokenizer is None else setting.tokenizer.name,
        "records": len(prompts),
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
        "output_tokens": sum(len(prompt.known or ()) for prompt in prompts),
    }
    return renumbered(prompts, vocab_size)


def _files_of(folder: Path) -> list[Path]:
    return [folder / name for name in _NAMES if (folder / name).is_file()] or sorted(folder.glob("*.jsonl"))


def renumbered(prompts: Sequence[Prompt], vocab_size: int) -> list[Prompt]:
    """Return the texts with ids 0, 1, 2, ... in the order of their first use, up to the text that exceeds the vocabulary."""
    ids: dict[int, int] = {}

    def number(tokens: Sequence[int]) -> list[int]:
        return [ids.setdefault(token, len(ids)) for token in tokens]

    made: list[Prompt] = []
    for prompt in prompts:
        references = [number(reference) for reference in prompt.references]
        made.append(Prompt(prompt.id, number(prompt.ids), references, number(prompt.known or ())))
        if len(ids) > vocab_size:
            return made[:-1]
    return made


def made_up(records: int, vocab_size: int, num_prompt: int, num_output: int) -> list[Prompt]:
    """Return random prompts whose outputs are spans of them between random tokens. Gains on them do not hold for real text."""
    draw = np.random.default_rng(SEED)
    prompts = []
    for number in range(records):
        ids = draw.integers(0, vocab_size, num_prompt).tolist()
        output: list[int] = []
        while len(output) < num_output:
            start, length = int(draw.integers(0, num_prompt)), int(draw.integers(4, 16))
            output += [*ids[start : start + length], *draw.integers(0, vocab_size, int(draw.integers(1, 6))).tolist()]
        prompts.append(Prompt(f"made-up/{number}", ids, [], output[:num_output]))
    return prompts


def nearly(outputs: Sequence[Sequence[int]], vocab_size: int) -> list[list[int]]:
    """Return outputs with a tenth of the tokens changed, so that drafts are refused in places."""
    draw = np.random.default_rng(SEED)
    return [[(token + 1) % vocab_size if draw.random() < 0.1 else token for token in output] for output in outputs]
