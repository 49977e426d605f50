"""Documents and their passages: of folders of text, Markdown, HTML and PDF, and of workload files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from langchain_text_splitters import RecursiveCharacterTextSplitter

from cluster.cli.generate.prompt_file import read_prompts
from engine.text.file_text import UnreadableFileError, text_of_file

SUFFIXES = (".txt", ".md", ".html", ".pdf")
_PASSAGE_CHARS = 900  # about as much as the embedding model reads of a text
_SPLITTER = RecursiveCharacterTextSplitter(chunk_size=_PASSAGE_CHARS, chunk_overlap=0)  # overlaps would go into prompts twice


def documents(path: Path, left_out: Callable[[str], None]) -> Iterator[tuple[str, list[str]]]:
    """Names of documents and the passages of each, in a fixed order.

    Args:
        path: a folder, with all that is in its folders; a file; or a workload file (``.jsonl``), whose ``references`` are the
            documents.
        left_out: told of each file that cannot be read, and why.

    Raises:
        ValueError: there is no document, or none can be read; the message says what was looked for.
        OSError: a file cannot be opened.
    """
    found = 0
    for name, text in _texts(path, left_out):
        found += 1
        yield name, _SPLITTER.split_text(text)
    if not found:
        raise ValueError(
            f"no document in {path}: give a folder with {', '.join(SUFFIXES)} files, or a .jsonl file of records with references"
        )


def _texts(path: Path, left_out: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    if path.suffix == ".jsonl":
        references = dict.fromkeys(text for record in read_prompts(path) for text in record.references)
        yield from ((f"{path.stem}/{number}", text) for number, text in enumerate(references, 1))
        return
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES)
    for file in files:
        name = file.name if file == path else file.relative_to(path).as_posix()
        try:
            yield name, text_of_file(file.read_bytes())
        except UnreadableFileError as error:
            left_out(f"{name}: {error}")
