"""What models of random weights are driven along: prompts with known outputs, as tokens of a model's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from outrider.cluster.cli.generate.prompt_file import PromptFileError
from outrider.experiments.bench.engines.contestants import Prompt
from outrider.experiments.bench.workloads import interleaved
from outrider.experiments.gpu_suite.report import Report, Setting

NAMES = ("specbench_rag.jsonl", "llma_rag.jsonl")  # in a folder of workloads: retrieval-augmented answers
_MADE_UP = 4  # records, where no workloads are given
_LIMIT = 40  # records of a file that are looked at


class ByteTokenizer(TextTokenizer):
    """A token a byte, where no tokenizer is given: drafts of the same text, but four times as many tokens."""

    def __init__(self) -> None:
        self.end_token_id, self.vocab_size = 256, 257

    def encode(self, texts: Sequence[str], special_tokens: bool = False) -> list[list[int]]:
        """See ``TextTokenizer``; there are no special tokens."""
        return [list(text.encode()) for text in texts]


def workload_files(paths: Sequence[Path]) -> list[Path]:
    """The files among ``paths``; of a folder those of ``NAMES``, or else all its workloads.

    Raises:
        PromptFileError: there is no such file, or a folder holds none.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            if not path.is_file():
                raise PromptFileError(f"--workloads {path}: there is no such file or folder")
            files.append(path)
            continue
        named = [path / name for name in NAMES if (path / name).is_file()] or sorted(path.glob("*.jsonl"))
        if not named:
            raise PromptFileError(f"--workloads {path} holds no .jsonl file")
        files += named
    return files


def read_texts(setting: Setting, vocab_size: int, context: int, report: Report) -> list[Prompt]:
    """Return records in turns from each workload, or made-up ones, and describe them in the report.

    Token ids are renumbered to fit any vocabulary; equal ids stay equal. Records longer than ``context`` tokens of prompt and
    output are left out.

    Raises:
        PromptFileError: a file cannot be read, or no record fits.
    """
    if not setting.workloads:
        report.found["texts"] = {"source": "made up: no --workloads", "records": _MADE_UP}
        return made_up(_MADE_UP, vocab_size, min(context // 4, 600), setting.max_tokens, setting.seed)
    tokenizer = ByteTokenizer() if setting.tokenizer is None else TextTokenizer(setting.tokenizer)
    files = workload_files(setting.workloads)
    lists = [_fitting(path, tokenizer, setting.max_tokens, context) for path in files]
    prompts = [prompt for _, prompt in zip(range(setting.records), interleaved(lists), strict=False)]
    if not prompts:
        raise PromptFileError(f"no record of {', '.join(path.name for path in files)} fits {context} tokens")
    report.found["texts"] = {
        "source": [path.name for path in files],
        "tokens": "bytes: no --tokenizer" if setting.tokenizer is None else setting.tokenizer.name,
        "records": len(prompts),
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
        "output_tokens": sum(len(prompt.known or ()) for prompt in prompts),
    }
    return renumbered(prompts, vocab_size)


def _fitting(path: Path, tokenizer: TextTokenizer, max_tokens: int, context: int) -> list[Prompt]:
    texts = read_known_texts(path, tokenizer, max_tokens, _LIMIT)
    return [Prompt.of(text) for text in texts if len(text.prompt_ids) + len(text.output_ids) < context]


def renumbered(prompts: Sequence[Prompt], vocab_size: int) -> list[Prompt]:
    """The same texts with the ids 0, 1, 2, ... in the order in which they come, at most as many as there are in the vocabulary.

    Texts behind the first that needs more are left out.
    """
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


def made_up(records: int, vocab_size: int, num_prompt: int, num_output: int, seed: int) -> list[Prompt]:
    """Random prompts whose outputs are spans of them between random tokens: what copying gains says nothing of real text."""
    draw = np.random.default_rng(seed)
    prompts = []
    for number in range(records):
        ids = draw.integers(0, vocab_size, num_prompt).tolist()
        output: list[int] = []
        while len(output) < num_output:
            start, length = int(draw.integers(0, num_prompt)), int(draw.integers(4, 16))
            output += [*ids[start : start + length], *draw.integers(0, vocab_size, int(draw.integers(1, 6))).tolist()]
        prompts.append(Prompt(f"made-up/{number}", ids, [], output[:num_output]))
    return prompts


def known_of(prompt: Prompt) -> list[int]:
    """The output that is followed."""
    known: Any = prompt.known
    assert known, prompt.id
    return list(known)
