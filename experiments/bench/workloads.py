"""Workload files: prompts with their references, as JSON lines, and how an engine is run over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cluster.cli.generate.prompt_file import PromptFileError, PromptRecord, read_prompts
from decoding.request import Request
from engine.text.chat import render_chat

if TYPE_CHECKING:  # a simulation, which uses the rest, loads no library of models
    from transformers import PreTrainedTokenizerBase

    from engine.engine import Engine

T = TypeVar("T")


def read_workloads(folder: Path) -> list[list[PromptRecord]]:
    """The workloads of a folder, one list a file, files in the order of their names.

    Raises:
        PromptFileError: the folder holds no ``*.jsonl``, or one cannot be read.
    """
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise PromptFileError(f"{folder} holds no .jsonl file: give the folder of the workload files")
    return [read_prompts(path) for path in paths]


def interleaved(lists: Sequence[Sequence[T]]) -> Iterator[T]:
    """The first item of each list, then the second of each, and so on: ``[[1, 2, 3], [4]]`` gives 1 4 2 3."""
    for index in range(max(map(len, lists), default=0)):
        for items in lists:
            if index < len(items):
                yield items[index]


def prompt_ids(record: PromptRecord, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The prompt as one user message in the chat template of the model."""
    return render_chat(tokenizer, [{"role": "user", "content": record.prompt}])


def fitting_records(
    records: Iterable[PromptRecord], tokenizer: PreTrainedTokenizerBase, most_tokens: int
) -> Iterator[tuple[PromptRecord, list[int]]]:
    """The records whose prompts have at most so many tokens, with the ids of those."""
    pairs = ((record, prompt_ids(record, tokenizer)) for record in records)
    return ((record, ids) for record, ids in pairs if len(ids) <= most_tokens)


def first_that_fit(
    folder: Path, tokenizer: PreTrainedTokenizerBase, count: int, most_tokens: int
) -> list[tuple[PromptRecord, list[int]]]:
    """The first records of each workload whose prompts are not too long, with their token ids; the first of all workloads first.

    Args:
        folder: see ``read_workloads``.
        tokenizer: of the model.
        count: of each workload.
        most_tokens: of a prompt.

    Raises:
        PromptFileError: the folder cannot be read, or nothing in it fits.
    """
    lists = [list(islice(fitting_records(records, tokenizer, most_tokens), count)) for records in read_workloads(folder)]
    found = list(interleaved(lists))
    if not found:
        raise PromptFileError(f"no record of {folder} fits --prompt-tokens {most_tokens}")
    return found


def run_engine(
    engine: Engine,
    requests: Sequence[Request],
    on_finish: Callable[[Request], None] = lambda request: None,
    on_first: Callable[[Request], None] = lambda request: None,
) -> None:
    """Runs requests to their end; each holds its output and counters then.

    Args:
        engine: without other work, and with room for all requests to wait (``engine.max_waiting``).
        requests: with ids of their own.
        on_finish: called with each request as it ends.
        on_first: called with each request as it has its first token.
    """
    by_id = {request.request_id: request for request in requests}
    waiting = set(by_id)  # for their first token
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            if output.request_id in waiting:
                waiting.remove(output.request_id)
                on_first(by_id[output.request_id])
            if output.finish_reason is not None:
                on_finish(by_id[output.request_id])
