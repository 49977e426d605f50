"""The text of a document in a file: plain text and Markdown as they are, HTML as Markdown, PDF page by page.

HTML and PDF are read in a process of their own, below others and with bounded time and memory, as files come from anywhere.

    python -m engine.text.file_text < report.pdf
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from io import BytesIO

MAX_FILE_BYTES = 8 << 20
_TIMEOUT_S = 20
_MEMORY_BYTES = 1 << 30
_MAX_CHARS = 1 << 22  # of the text
_UNSEEN = ("head", "script", "style", "noscript", "template", "svg")  # parts of an HTML page that nobody reads


class UnreadableFileError(ValueError):
    """A file holds no text that can be had; the message says why and what to do."""


def text_of_file(content: bytes) -> str:
    """What a reader of the file sees as text. The kind is told by how it begins.

    Raises:
        UnreadableFileError: it is no text, HTML or PDF, holds no text, is too large, or took too long.
    """
    if len(content) > MAX_FILE_BYTES:
        raise UnreadableFileError(f"{len(content):,} bytes, and at most {MAX_FILE_BYTES:,} are read: split it")
    text = _in_a_process(content) if _is_pdf(content) or _is_html(content) else _plain(content)
    if not text.strip():
        raise UnreadableFileError("there is no text in it (a scan holds pictures only: run it through OCR first)")
    if len(text) > _MAX_CHARS:
        raise UnreadableFileError(f"more than {_MAX_CHARS:,} characters of text: split it")
    return text.strip()


def _is_pdf(content: bytes) -> bool:
    return b"%PDF-" in content[:1024]


def _is_html(content: bytes) -> bool:
    begin = content[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return begin.startswith((b"<!doctype html", b"<html")) or (begin.startswith(b"<?xml") and b"<html" in begin)


def _plain(content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UnreadableFileError("it is no PDF, no HTML and no text in UTF-8: convert it to one of these")
    return text


def _in_a_process(content: bytes) -> str:
    command = [sys.executable, "-m", "engine.text.file_text"]
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UnreadableFileError(f"it took more than {_TIMEOUT_S} s to read: split it, or send its text") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        raise UnreadableFileError(f"it cannot be read ({said or f'exit code {done.returncode}'}): send its text") from None
    return done.stdout.decode()


def _text_of_pdf(content: bytes) -> str:
    from pypdf import PdfReader

    return "\n\n".join(page.extract_text() for page in PdfReader(BytesIO(content)).pages)


def _text_of_html(content: bytes) -> str:
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    page = BeautifulSoup(content, "html.parser")
    for part in page(_UNSEEN):
        part.decompose()
    text: str = MarkdownConverter(heading_style="ATX", strip=["a", "img"]).convert_soup(page)
    return text


def main() -> None:
    """Reads stdin, writes stdout in UTF-8, within bounds of time and memory."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # where the system has no such bounds
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_TIMEOUT_S, _TIMEOUT_S))
        os.nice(10)
    content = sys.stdin.buffer.read()
    text = _text_of_pdf(content) if _is_pdf(content) else _text_of_html(content)
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
