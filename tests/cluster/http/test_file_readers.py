"""Documents over HTTP: whose file is read next, and what becomes of the process that reads it. No clock is read."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from outrider.cache_service.namespace import hash_key
from outrider.cluster.http.api import Service
from outrider.configs.slices import TenancyOptions, TenantOptions
from outrider.engine.text import file_text
from tests.cluster.circle import TOKENIZER, LocalEngine, bearer, served
from tests.helpers.waiting import eventually

KEYS = ("outrider-a", "outrider-b", "outrider-c")
TENANTS = TenancyOptions(tenants={
    "acme": TenantOptions(keys=(hash_key(KEYS[0]), hash_key(KEYS[1]))), "umbrella": TenantOptions(keys=(hash_key(KEYS[2]),)),
})  # fmt: skip
PATH = "/v1/documents/text"
# Stands in for Python: a slow file is never read.
READER = """#!{python}
import os, sys, time
content = sys.stdin.buffer.read()
if b"slow" in content:
    open("{folder}/" + str(os.getpid()), "w").close()
    time.sleep(3600)
sys.stdout.write("read")
"""


@dataclass(frozen=True)
class Desk:
    """A server, and its processes that do not end."""

    url: str
    folder: Path

    def pids(self) -> set[int]:
        return {int(path.name) for path in self.folder.iterdir()}

    def post(self, content: bytes, key: str) -> httpx.Response:
        return httpx.post(self.url + PATH, content=content, headers=bearer(key), timeout=60)

    @contextlib.contextmanager
    def slow(self, key: str) -> Iterator[socket.socket]:
        """A client whose file is being read, or waits."""
        where, body = urlsplit(self.url), b"<html>slow"
        with socket.create_connection((where.hostname, where.port), timeout=60) as client:
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            yield client


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(file_text, "_TIMEOUT_S", 3600)
    folder = tmp_path / "reading"
    folder.mkdir()
    command = tmp_path / "python"
    command.write_text(READER.format(python=sys.executable, folder=folder))
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    with served(Service(LocalEngine(), TOKENIZER, TENANTS)) as url:
        yield Desk(url, folder)


def test_a_reading_process_ends_with_its_client(desk: Desk) -> None:
    with desk.slow(KEYS[0]):
        eventually(lambda: len(desk.pids()) == 1)
        (reading,) = desk.pids()
        assert psutil.pid_exists(reading)
    eventually(lambda: not psutil.pid_exists(reading))  # and nothing of it is left for its parent
    assert desk.post(b"<html>", KEYS[0]).json() == {"text": "read"}  # its place is free again


def test_slow_files_of_a_key_leave_places_to_other_keys(desk: Desk) -> None:
    with contextlib.ExitStack() as clients:
        for _ in range(100):
            clients.enter_context(desk.slow(KEYS[0]))
        eventually(lambda: len(desk.pids()) == 1)
        assert desk.post(b"<html>", KEYS[1]).json() == {"text": "read"}
        assert desk.post(b"<html>", KEYS[2]).json() == {"text": "read"}
        assert len(desk.pids()) == 1  # 99 wait for their turn
        clients.enter_context(desk.slow(KEYS[1]))
        eventually(lambda: len(desk.pids()) == 2)
        assert desk.post(b"<html>", KEYS[2]).json() == {"text": "read"}  # another tenant's
    eventually(lambda: not any(map(psutil.pid_exists, desk.pids())))
    assert len(desk.pids()) <= 100


def test_plain_text_waits_for_no_reading_process(desk: Desk) -> None:
    with contextlib.ExitStack() as clients:
        for key in KEYS:
            clients.enter_context(desk.slow(key))
        eventually(lambda: len(desk.pids()) == 3)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(desk.post, b"<html>", KEYS[2])
            for key in KEYS:
                assert desk.post("Füchse".encode(), key).json() == {"text": "Füchse"}
            assert not other.done()
            clients.close()
            assert other.result().json() == {"text": "read"}
