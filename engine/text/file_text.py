"""The text of a document in a file: plain text and Markdown as they are, HTML as Markdown, PDF page by page.

HTML and PDF are read in a process of their own, below others and with bounded time and memory, as files come from anywhere.

    python -P engine/text/file_text.py < report.pdf
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from io import BytesIO

MAX_FILE_BYTES = 8 << 20
_TIMEOUT_S = 20
_MEMORY_BYTES = 1 << 30
_MAX_CHARS = 1 << 22  # of the text
_MAX_BYTES = 4 * _MAX_CHARS  # of the text in UTF-8
_MAX_SAID = 4096  # bytes of an error
_TOO_LONG = f"more than {_MAX_CHARS:,} characters of text: split it"
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME")  # of the environment, that a reading process gets
_PR_SET_PDEATHSIG = 1
_UNSEEN = ("head", "script", "style", "noscript", "template", "svg")  # parts of an HTML page that nobody reads


class UnreadableFileError(ValueError):
    """A file holds no text that can be had; the message says why and what to do."""


class FileReader:
    """Reads one file. ``stop`` may be called by another thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_late = self._is_stopped = False

    def read(self, content: bytes) -> str:
        """Return the text that a reader of the file sees. The kind is told by how the file begins.

        Raises:
            UnreadableFileError: it is no text, HTML or PDF, holds no text, is too large, took too long, or ``stop`` was called.
        """
        if len(content) > MAX_FILE_BYTES:
            raise UnreadableFileError(f"{len(content):,} bytes, and at most {MAX_FILE_BYTES:,} are read: split it")
        text = self._in_a_process(content) if needs_process(content) else _plain(content)
        if not text.strip():
            raise UnreadableFileError("there is no text in it (a scan holds pictures only: run it through OCR first)")
        if len(text) > _MAX_CHARS:
            raise UnreadableFileError(_TOO_LONG)
        return text.strip()

    def stop(self) -> None:
        """Kill the process that reads, if there is one, and start none any more."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def _in_a_process(self, content: bytes) -> str:
        with self._lock:
            if self._is_stopped:
                raise UnreadableFileError("nobody waits for its text any more")
            # By its path: -m would look for a package of this name, which the user's folder may have, too.
            command = [sys.executable, "-P", os.path.abspath(__file__)]
            pipe = subprocess.PIPE
            process = self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, env=_environment(), start_new_session=True
            )
        timer = threading.Timer(_TIMEOUT_S, self._give_up)
        timer.start()
        with process:  # closes the pipes, and reaps the process
            try:
                return self._talk(process, content)
            finally:
                timer.cancel()
                self.stop()

    def _talk(self, process: subprocess.Popen[bytes], content: bytes) -> str:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it has ended: its exit code says why
            stdin.write(content)
        read = process.stdout.read(_MAX_BYTES + 1)
        if len(read) > _MAX_BYTES:
            raise UnreadableFileError(_TOO_LONG)
        said = process.stderr.read(_MAX_SAID).decode(errors="replace").strip().rpartition("\n")[2][:200]
        code = process.wait()
        if self._is_late:
            raise UnreadableFileError(f"it took more than {_TIMEOUT_S} s to read: split it, or send its text")
        if code:
            raise UnreadableFileError(f"it cannot be read ({said or f'exit code {code}'}): send its text")
        return read.decode()

    def _give_up(self) -> None:
        self._is_late = True
        self.stop()


def text_of_file(content: bytes) -> str:
    """Return the text of a file; see ``FileReader.read``."""
    return FileReader().read(content)


def needs_process(content: bytes) -> bool:
    """Tell whether a file is read in a process of its own: all but plain text are."""
    return _is_pdf(content) or _is_html(content)


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


def _environment() -> dict[str, str]:
    """Return the environment of the reading process: without secrets and addresses of the server."""
    kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    folders = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(each)]  # not the current one
    return kept | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})


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
    """Read stdin, write stdout in UTF-8, within bounds of time and memory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # this process ends with its server, however that ends
    with contextlib.suppress(ImportError, ValueError, OSError):  # where the system has no such bounds
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_TIMEOUT_S, _TIMEOUT_S))
        os.nice(10)
    logging.disable()  # libraries say much of a broken file
    warnings.simplefilter("ignore")
    content = sys.stdin.buffer.read()
    try:
        text = _text_of_pdf(content) if _is_pdf(content) else _text_of_html(content)
    except Exception as error:  # noqa: BLE001  # whatever a library makes of a broken file, in one line
        sys.exit(f"{type(error).__name__}: {error}"[:_MAX_SAID])
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
