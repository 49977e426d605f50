"""Workload files (JSON lines of prompts with references), and a loop that runs an engine over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from outrider.cluster.cli.generate.prompt_file import PromptFileError, PromptRecord, read_prompts
from outrider.decoding.request import Request
from outrider.engine.text.chat import render_chat

if TYPE_CHECKING:  # the simulation uses this module without loading transformers
    from transformers import PreTrainedTokenizerBase

    from outrider.engine.engine import Engine

T = TypeVar("T")


def read_workloads(folder: Path) -> list[list[PromptRecord]]:
    """Read the workloads of a folder, one list per file in the order of their names.

    Raises:
        PromptFileError: the folder holds no ``*.jsonl``, or one cannot be read.
    """
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise PromptFileError(f"{folder} holds no .jsonl file: give the folder of the workload files")
    return [read_prompts(path) for path in paths]


def interleaved(lists: Sequence[Sequence[T]]) -> Iterator[T]:
    """Yield the first item of each list, then the second of each: ``[[1, 2, 3], [4]]`` gives 1 4 2 3."""
    for index in range(max(map(len, lists), default=0)):
        for items in lists:
            if index < len(items):
                yield items[index]


def prompt_ids(record: PromptRecord, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize the prompt as one user message in the chat template of the model."""
    return render_chat(tokenizer, [{"role": "user", "content": record.prompt}])


def fitting_records(
    records: Iterable[PromptRecord], tokenizer: PreTrainedTokenizerBase, most_tokens: int
) -> Iterator[tuple[PromptRecord, list[int]]]:
    """Yield the records whose prompts have at most ``most_tokens`` tokens, with their token ids."""
    pairs = ((record, prompt_ids(record, tokenizer)) for record in records)
    return ((record, ids) for record, ids in pairs if len(ids) <= most_tokens)


def first_that_fit(
    folder: Path, tokenizer: PreTrainedTokenizerBase, count: int, most_tokens: int
) -> list[tuple[PromptRecord, list[int]]]:
    """Return the first ``count`` records of each workload with at most ``most_tokens`` tokens, interleaved, with their token ids.

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
    """Run requests to their end on an engine without other work; each then holds its output and counters.

    ``engine.max_waiting`` must allow all of them to wait. The callbacks get each request at its first token and at its end.
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
