"""Workload files: prompts with their references, as JSON lines, and how an engine is run over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from decoding.request import Request
from engine.chat import render_chat
from engine.engine import Engine

T = TypeVar("T")


class WorkloadError(ValueError):
    """A workload that cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class WorkloadRecord:
    """One prompt of a workload."""

    id: str
    workload: str
    prompt: str  # the whole text of the user's message
    references: tuple[str, ...]  # documents or earlier outputs that the answer may repeat


def read_workload(path: Path) -> list[WorkloadRecord]:
    """The records of a file, in its order. ``id`` and ``workload`` default to ``FILE/LINE`` and the name of the file.

    Raises:
        WorkloadError: no such file, a line that is no JSON object, or one without a string ``prompt``.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: a text may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} could not be read: {error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise WorkloadError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise WorkloadError(f"{path}:{number}: a record must be an object with a string `prompt`")
        references = entry.get("references") or []
        if not isinstance(references, list) or not all(isinstance(text, str) for text in references):
            raise WorkloadError(f"{path}:{number}: `references` must be a list of strings")
        record_id, workload = str(entry.get("id", f"{path.stem}/{number}")), str(entry.get("workload", path.stem))
        records.append(WorkloadRecord(record_id, workload, entry["prompt"], tuple(references)))
    return records


def read_workloads(folder: Path) -> list[list[WorkloadRecord]]:
    """The workloads of a folder, one list a file, files in the order of their names.

    Raises:
        WorkloadError: the folder holds no ``*.jsonl``, or one cannot be read.
    """
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise WorkloadError(f"{folder} holds no .jsonl file: give the folder of the workload files")
    return [read_workload(path) for path in paths]


def interleaved(lists: Sequence[Sequence[T]]) -> Iterator[T]:
    """The first item of each list, then the second of each, and so on: ``[[1, 2, 3], [4]]`` gives 1 4 2 3."""
    for index in range(max(map(len, lists), default=0)):
        for items in lists:
            if index < len(items):
                yield items[index]


def prompt_ids(record: WorkloadRecord, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The prompt as one user message in the chat template of the model."""
    return render_chat(tokenizer, [{"role": "user", "content": record.prompt}])


def fits(num_prompt: int, max_tokens: int, context: int) -> bool:
    """Whether a prompt of so many tokens leaves room for ``max_tokens`` of output."""
    return num_prompt + max_tokens <= context


def run_engine(engine: Engine, requests: Sequence[Request], on_finish: Callable[[Request], None] = lambda request: None) -> None:
    """Runs requests to their end; each holds its output and counters then.

    Args:
        engine: without other work, and with room for all requests to wait (``engine.max_waiting``).
        requests: with ids of their own.
        on_finish: called with each request as it ends.
    """
    by_id = {request.request_id: request for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                on_finish(by_id[output.request_id])
