"""Prompt files: JSON lines with ``prompt`` and optional ``id``, ``references``, ``workload`` and ``output``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


class PromptFileError(ValueError):
    """Prompt file that cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One line of a prompt file."""

    id: str
    workload: str
    prompt: str
    references: tuple[str, ...]  # documents or earlier outputs that the answer may repeat
    output: str | None = None  # known output of a target model, for replays


def read_prompts(path: Path) -> list[PromptRecord]:
    """Return the records of a file in order. ``id`` and ``workload`` default to ``FILE/LINE`` and the file's name.

    Raises PromptFileError: the file is missing or empty, a line is no JSON object, or a record has no string ``prompt``.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: a text may hold other line separators
    except UnicodeDecodeError:
        raise PromptFileError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise PromptFileError(f"{path} could not be read: {error.strerror}") from None
    records = [_record(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not records:
        raise PromptFileError(f"{path} holds no record")
    return records


def _record(path: Path, number: int, line: str) -> PromptRecord:
    where = f"{path}:{number}"
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptFileError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise PromptFileError(f"{where}: a record must be an object with a string `prompt`")
    references = entry.get("references") or []
    if not isinstance(references, list) or not all(isinstance(text, str) for text in references):
        raise PromptFileError(f"{where}: `references` must be a list of strings")
    output = entry.get("output")
    if output is not None and not isinstance(output, str):
        raise PromptFileError(f"{where}: `output` must be a string")
    record_id, workload = str(entry.get("id", f"{path.stem}/{number}")), str(entry.get("workload", path.stem))
    return PromptRecord(record_id, workload, entry["prompt"], tuple(references), output)
