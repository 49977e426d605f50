"""Machines of network namespaces: separate ports, connections between them, and loss at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.experiments.faults.machines import Machines, MachinesError, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
LISTEN = """
import socket, sys, time
open(sys.argv[2] + "/seen", "x")
client, _ = socket.create_server(("0.0.0.0", 8000)).accept()
client.sendall(sys.argv[1].encode())
time.sleep(60)
"""


def listed(kind: str) -> str:
    return subprocess.run(["ip", kind], capture_output=True, text=True, check=True).stdout


def test_machines_have_separate_ports_and_lose_all_processes(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    with Machines(["one", "two"], private) as machines:
        for name, machine in machines.by_name.items():
            machine.start([sys.executable, "-c", LISTEN, name, str(private)], os.environ, tmp_path / "log")
        for name, machine in machines.by_name.items():
            with connected(machine.address) as link:
                assert link.recv(8) == name.encode()
                assert len(machine.pids()) == 1
                machine.kill()
                assert machine.pids() == []
                assert link.recv(8) == b""
        assert machines._tag in listed("netns")
    assert list(private.iterdir()) == []
    assert machines._tag not in listed("netns") + listed("link")


def test_nothing_is_left_of_machines_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    before = listed("netns")
    monkeypatch.setattr("outrider.experiments.faults.machines._SUBNETS", (300,))  # makes invalid addresses
    with pytest.raises(MachinesError, match="ip addr add"):
        Machines(["one"])
    assert listed("netns") == before


def connected(address: str) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, 8000), timeout=20)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
