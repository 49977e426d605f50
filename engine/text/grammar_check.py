"""Checks of grammars in killable processes, because the library's compiler can neither be interrupted nor limited.

Each grammar is tried in a fork of a small process with bounded processor time (``CPU_S``) and memory. Serving processes compile
only grammars that passed.

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

INSTALLED = importlib.util.find_spec("llguidance") is not None  # benchmark machines may lack it
if INSTALLED:
    from llguidance import LLMatcher, LLTokenizer

# ``{"multipleOf": 9999991}`` compiles for 200 s and takes 4.7 GB, and 20 patterns in an ``allOf`` are compared for 34 s.
CPU_S = 2.0  # per check. Schemas of real services take up to 0.1 s, a ``multipleOf`` of five digits up to 1 s
MEMORY_BYTES = 128 << 20  # per check
# The library compiles recursively: a long chain of rules would overflow the stack of an ordinary thread and crash the process.
# This is enough for the longest chain in 100,000 characters; unused stack takes no memory.
STACK_BYTES = 256 << 20
TOO_COSTLY = (
    f"takes more than {CPU_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB of memory to compile: make it simpler "
    "(a smaller multipleOf, shorter counted repetitions, fewer patterns and alternatives)"
)
NO_VOCABULARY = "structured output is not possible with this model's tokenizer"
_KEPT_VERDICTS = 4096
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME")  # environment variables of the process
_ANSWERED = b"="  # precedes each answer, so that no answer means that the process ended


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens that grammars are compiled for."""

    tokenizer: str  # contents of tokenizer.json
    size: int
    end_tokens: tuple[int, ...]


class GrammarChecker:
    """Thread-safe grammar checker. Its process starts with the first check and is replaced if lost."""

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        """Create a checker. Without a vocabulary grammars are only parsed; with one their first masks are computed, too."""
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    def fault(self, grammar: str) -> str:
        """Return the error of a grammar (the library's message or ``TOO_COSTLY``); empty if it is valid."""
        key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
            connection = None if verdict is not None else self._connect()
        if connection is None:
            assert verdict is not None
            return verdict
        # Outside of the lock: several grammars may be checked at once.
        with connection:
            connection.sendall(grammar.encode())
            connection.shutdown(socket.SHUT_WR)
            answer = _read(connection)
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

    def _connect(self) -> socket.socket:
        """Return a connection to a fork of the process."""
        ours, theirs = socket.socketpair()
        with theirs:
            for _ in range(2):  # the system may have killed it for lack of memory
                control = self._control or self._start()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    socket.send_fds(control, [b"?"], [theirs.fileno()])
                    return ours
                self._stop()
        ours.close()
        raise RuntimeError("the process that checks grammars did not start")

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
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the process ended: the first question fails
            self._control.sendall(len(text).to_bytes(8) + text)
        return self._control


def deeply(call: Callable[[], Any]) -> Any:
    """Return the result of a library call in a thread with a deep stack. Raises ``ValueError`` if the library panics."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001  # raised below; a panic of the library is a BaseException
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


_STACK_LOCK = threading.Lock()  # the stack size applies to all threads that start meanwhile


def _read(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def main() -> None:
    """Fork for each grammar to check, until the other side closes its socket."""
    os.nice(10)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are reaped by the system
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=int(sys.argv[1]))
    size = int.from_bytes(_exactly(control, 8))
    vocabulary = _vocabulary(*json.loads(_exactly(control, size))) if size else None
    while True:
        received, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not received:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                try:
                    _answer(connection, vocabulary)
                finally:
                    os._exit(0)


def _vocabulary(text: str, size: int, end_tokens: list[int]) -> LLTokenizer | str:
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
    with contextlib.suppress(OSError), open("/proc/self/status") as status:  # Linux only
        data = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
        # The deep stack counts as data even where it is not used.
        resource.setrlimit(resource.RLIMIT_DATA, (data + STACK_BYTES + MEMORY_BYTES,) * 2)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF ends the process
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
