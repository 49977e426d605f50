"""Check grammars in processes that can be ended: the library's compiler cannot be interrupted, and no limit of its own bounds it.

``{"multipleOf": 9999991}`` compiles for 200 s and takes 4.7 GB, and 20 patterns in an ``allOf`` are compared for 34 s, whatever
fuel the library is given. So each grammar is tried in a fork of a small process that has nothing but the library and the
vocabulary, with bounded processor time and memory. The longest compile in a process that serves is that of a grammar which
passed here: ``CPU_S`` of a thread that does not hold the interpreter, but for the parsing of its text.

    python -P engine/text/grammar_check.py DESCRIPTOR
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INSTALLED = importlib.util.find_spec("llguidance") is not None  # engines are measured on machines that have not
if INSTALLED:
    from llguidance import LLMatcher, LLTokenizer

CPU_S = 2.0  # of a check. Schemas of real services take up to 0.1 s, a ``multipleOf`` of five digits up to 1 s
MEMORY_BYTES = 128 << 20  # that a check may take
# The library compiles recursively: rules that refer to one another in a long row would overflow the stack of an ordinary thread,
# which ends the process. This much is enough for a row as long as 100,000 characters allow; what is not used takes no memory.
STACK_BYTES = 256 << 20
TOO_COSTLY = (
    f"takes more than {CPU_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB of memory to compile: make it simpler "
    "(a smaller multipleOf, shorter counted repetitions, fewer patterns and alternatives)"
)
NO_VOCABULARY = "structured output is not possible with this model's tokenizer"
_KEPT_VERDICTS = 4096
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME")  # of the environment, that the process gets
_ANSWERED = b"="  # before what is wrong with a grammar, so that no answer means an ended process


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that grammars are compiled for."""

    tokenizer: str  # tokenizer.json
    size: int
    end_tokens: tuple[int, ...]


class GrammarChecker:
    """Checks grammars from any thread, several at a time. Its process starts with the first of them, and is replaced if lost."""

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        """Without a vocabulary grammars are parsed only; with one their first masks are computed, too."""
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    def fault(self, grammar: str) -> str:
        """Return what is wrong with a grammar, in the words of the library or ``TOO_COSTLY``; empty: nothing."""
        key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
            asked = None if verdict is not None else self._ask()
        if asked is None:
            assert verdict is not None
            return verdict
        with asked:
            asked.sendall(grammar.encode())
            asked.shutdown(socket.SHUT_WR)
            answer = _read(asked)
        verdict = answer[1:].decode() if answer.startswith(_ANSWERED) else TOO_COSTLY
        with self._lock:
            self._verdicts[key] = verdict
            if len(self._verdicts) > _KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def close(self) -> None:
        """End the process. The next check starts another one."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def _ask(self) -> socket.socket:
        """Return a connection to a fork of the process."""
        ours, theirs = socket.socketpair()
        with theirs:
            for _ in range(2):  # it may have been ended, by the system for lack of memory
                control = self._control or self._start()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    socket.send_fds(control, [b"?"], [theirs.fileno()])
                    return ours
                self._stop()
        ours.close()
        raise RuntimeError("the process that checks grammars does not start")

    def _start(self) -> socket.socket:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", os.path.abspath(__file__), str(theirs.fileno())]
            environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        known = self._vocabulary
        text = b"" if known is None else json.dumps([known.tokenizer, known.size, known.end_tokens]).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: the first question says so
            self._control.sendall(len(text).to_bytes(8) + text)
        return self._control


def deeply(call: Callable[[], Any]) -> Any:
    """Call the library in a thread with a deep stack, and return its result. Raises ``ValueError`` where it panics."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001  # raised below; a panic of the library is no Exception
            failed.append(error)

    with _STACK_LOCK:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name="grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    for error in failed:
        if isinstance(error, Exception):
            raise error
        raise ValueError(f"the grammar's compiler failed: {error}") from error
    return found[0]


_STACK_LOCK = threading.Lock()  # the size is that of all threads which start meanwhile


def _read(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def main() -> None:
    """Fork for each grammar that is asked about, until the other side is gone."""
    os.nice(10)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=int(sys.argv[1]))
    size = int.from_bytes(_exactly(control, 8))
    vocabulary = _vocabulary(*json.loads(_exactly(control, size))) if size else None
    while True:
        asked, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not asked:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                try:
                    _answer(connection, vocabulary)
                finally:
                    os._exit(0)


def _vocabulary(text: str, size: int, end_tokens: list[int]) -> LLTokenizer | str:
    """Return the vocabulary as the library has it, or why it has none."""
    try:
        return LLTokenizer(text, n_vocab=size, eos_token=end_tokens)
    except ValueError as error:
        return f"{NO_VOCABULARY}: {error}"


def _exactly(control: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = control.recv(size - len(parts))
        if not part:
            sys.exit()
        parts += part
    return bytes(parts)


def _answer(connection: socket.socket, vocabulary: LLTokenizer | str | None) -> None:
    grammar = _read(connection).decode()
    with contextlib.suppress(OSError), open("/proc/self/status") as status:  # where the system tells it
        data = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (data + STACK_BYTES + MEMORY_BYTES,) * 2)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # whose signal ends the process
    try:
        fault = str(deeply(lambda: _fault(grammar, vocabulary)))
    except ValueError as error:
        fault = str(error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    connection.sendall(_ANSWERED + fault.encode())


def _fault(grammar: str, vocabulary: LLTokenizer | str | None) -> str:
    if isinstance(vocabulary, str):
        return vocabulary
    if vocabulary is None:
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        return str(messages[0]) if failed else ""
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        reason = str(matcher.get_error())
        return "no text is allowed by it" if reason.startswith("NoExtension") else reason
    return "" if any(mask) or matcher.is_accepting() else "no token of the model can begin a text that it allows"


if __name__ == "__main__":
    main()
