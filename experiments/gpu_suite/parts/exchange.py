"""The exchange of a step between processes of this host: a leader sends every rank a command, and each answers.

Nothing but Python's own library, so that a rank starts at once: python -m experiments.gpu_suite.parts.exchange PORT is one.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

COMMAND_BYTES, ANSWER_BYTES = 1000, 300  # 32 rows with tokens and parents; a walk with the argmax below each row
_START_S = 30.0
_ROOT = Path(__file__).resolve().parents[3]


def exchange_s(ranks: int, turns: int, warm: int = 50) -> list[float]:
    """Seconds of each exchange of a leader with ``ranks - 1`` other processes, over TCP on the loopback interface.

    Raises:
        OSError: a rank did not start, or went away.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_START_S)
        port = server.getsockname()[1]
        command = [sys.executable, "-m", "experiments.gpu_suite.parts.exchange", str(port)]
        processes = [subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL) for _ in range(ranks - 1)]
        links: list[socket.socket] = []
        try:
            for _ in processes:
                link, _ = server.accept()
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                links.append(link)
            return [_turn(links) for _ in range(warm + turns)][warm:]
        finally:
            for link in links:
                link.close()
            for process in processes:
                _end(process)


def _turn(links: Sequence[socket.socket]) -> float:
    command = bytes(COMMAND_BYTES)
    began = time.perf_counter()
    for link in links:
        link.sendall(command)
    for link in links:
        if not receive(link, ANSWER_BYTES):
            raise OSError("a rank of the exchange went away")
    return time.perf_counter() - began


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def receive(link: socket.socket, size: int) -> bytes:
    """So many bytes; none when the other side has closed."""
    parts = []
    while size:
        part = link.recv(size)
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def answer(port: int) -> None:
    """A rank: answers commands until the leader closes."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reply = bytes(ANSWER_BYTES)
        while receive(link, COMMAND_BYTES):
            link.sendall(reply)


if __name__ == "__main__":
    answer(int(sys.argv[1]))
