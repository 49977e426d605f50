"""Text of a document in a file: plain text and Markdown unchanged, HTML as Markdown, PDF page by page.

HTML and PDF are read in a separate process with low priority and bounded time and memory.

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
_MAX_CHARS = 1 << 22
_MAX_BYTES = 4 * _MAX_CHARS  # of the text in UTF-8
_MAX_SAID = 4096  # bytes of an error message
_TOO_LONG = f"more than {_MAX_CHARS:,} characters of text: split it"
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME")  # environment variables of the reading process
_PR_SET_PDEATHSIG = 1
_UNSEEN = ("head", "script", "style", "noscript", "template", "svg")  # parts of an HTML page that are not shown


class UnreadableFileError(ValueError):
    """File without usable text; the message gives the reason and the remedy."""


class FileReader:
    """Reader of one file. Another thread may call ``stop`` at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_late = self._is_stopped = False

    def read(self, content: bytes) -> str:
        """Return the visible text of a file, whose first bytes determine its kind. Raises ``UnreadableFileError``."""
        if len(content) > MAX_FILE_BYTES:
            raise UnreadableFileError(f"it has {len(content):,} bytes, the maximum is {MAX_FILE_BYTES:,}: split it")
        text = self._in_a_process(content) if needs_process(content) else _plain(content)
        if not text.strip():
            raise UnreadableFileError("there is no text in it (a scan holds pictures only: run it through OCR first)")
        if len(text) > _MAX_CHARS:
            raise UnreadableFileError(_TOO_LONG)
        return text.strip()

    def stop(self) -> None:
        """Kill the reading process, if any, and start no other."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def _in_a_process(self, content: bytes) -> str:
        with self._lock:
            # Under the lock, so that ``stop`` prevents the start or finds the process.
            if self._is_stopped:
                raise UnreadableFileError("reading was cancelled")
            # By its path, because -m would find a package of this name in the user's folder.
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
        # The process reads all of its input before it writes: neither side blocks the other.
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # the process has ended: see its exit code
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
    """Return whether a file is read in a separate process, as all but plain text are."""
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
        raise UnreadableFileError("it is not PDF, HTML or UTF-8 text: convert it to one of these")
    return text


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}  # no secrets
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
    """Read a document from stdin and write its text to stdout in UTF-8, within bounds of time and memory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the server, even if it is killed
    with contextlib.suppress(ImportError, ValueError, OSError):  # the system has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_TIMEOUT_S, _TIMEOUT_S))
        os.nice(10)
    logging.disable()  # libraries log much about broken files
    warnings.simplefilter("ignore")
    content = sys.stdin.buffer.read()
    try:
        text = _text_of_pdf(content) if _is_pdf(content) else _text_of_html(content)
    except Exception as error:  # noqa: BLE001  # libraries raise any error on a broken file
        sys.exit(f"{type(error).__name__}: {error}"[:_MAX_SAID])
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
