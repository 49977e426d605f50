"""Documents out of files, and the requests that carry them to the public corpus."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

KINDS = (".txt", ".md", ".jsonl")
PART_CHARACTERS = 1 << 18  # longer documents travel in parts; JSON writes a character in 6 bytes at most


class DocumentFileError(ValueError):
    """A file that documents cannot be read from; the message names it, and the line."""


def documents(files: Sequence[Path], advance: Callable[[int], object]) -> Iterator[str]:
    """The documents of text files (one each) and of JSON lines (``text`` or else ``output`` of each record), without blank ones.

    Args:
        files: names end in ``.txt``, ``.md`` or ``.jsonl``.
        advance: called with the number of bytes that were read.

    Raises:
        DocumentFileError: a file cannot be read, is not UTF-8, or has a line that is no such record.
    """
    for file in files:
        try:
            with file.open("rb") as source:
                pieces = source if file.suffix == ".jsonl" else [source.read()]
                for number, piece in enumerate(pieces, start=1):
                    text = _record(piece, f"{file}:{number}") if file.suffix == ".jsonl" else _decoded(piece, str(file))
                    if text.strip():
                        yield text
                    advance(len(piece))
        except OSError as error:
            raise DocumentFileError(f"{file} could not be read: {error.strerror}") from None


def batches(texts: Iterable[str], limit: int) -> Iterator[bytes]:
    """Bodies ``{"documents": [...]}`` of ``limit`` bytes at most, unless a single part of a document is longer."""
    waiting: list[bytes] = []
    size = 0
    for text in texts:
        for part in _parts(text):
            item = json.dumps(part, ensure_ascii=False).encode()
            if waiting and size + len(item) > limit:
                yield _body(waiting)
                waiting, size = [], 0
            waiting.append(item)
            size += len(item) + 2
    if waiting:
        yield _body(waiting)


def _body(items: list[bytes]) -> bytes:
    return b'{"documents": [' + b", ".join(items) + b"]}"


def _parts(text: str) -> Iterator[str]:
    """A text in order, in parts that end with a line where there is one."""
    start = 0
    while len(text) - start > PART_CHARACTERS:
        end = text.rfind("\n", start, start + PART_CHARACTERS) + 1 or start + PART_CHARACTERS
        yield text[start:end]
        start = end
    if text[start:]:
        yield text[start:]


def _record(line: bytes, where: str) -> str:
    text = _decoded(line, where)
    if not text.strip():
        return ""
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise DocumentFileError(f"{where}: not JSON: {error}") from None
    document = (entry["text"] if "text" in entry else entry.get("output")) if isinstance(entry, dict) else None
    if not isinstance(document, str):
        raise DocumentFileError(f"{where}: a record must be an object with a string `text` or `output`")
    try:
        document.encode()
    except UnicodeEncodeError:
        raise DocumentFileError(f"{where}: the text holds half of a surrogate pair") from None
    return document


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DocumentFileError(f"{where}: not UTF-8 text") from None
