"""Machines of network namespaces have ports of their own, reach each other, and are gone at once when they are lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.faults.machines import Machines, MachinesError, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
LISTEN = """
import socket, time
open("{1}/seen", "x")
client, _ = socket.create_server(("0.0.0.0", 8000)).accept()
client.sendall(b"{0}")
time.sleep(60)
"""


def test_machines_have_ports_of_their_own_and_are_lost_with_all_they_run(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    with Machines(["one", "two"], private) as machines:
        for name, machine in machines.by_name.items():
            machine.start(
                [sys.executable, "-c", LISTEN.replace("{0}", name).replace("{1}", str(private))], os.environ, tmp_path / "log"
            )
        for name, machine in machines.by_name.items():
            with connected(machine.address) as link:
                assert link.recv(8) == name.encode()
                assert len(machine.pids()) == 1
                machine.kill()
                assert machine.pids() == []
                assert link.recv(8) == b""
        spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        tag = machines._tag
        assert tag in spaces
    assert list(private.iterdir()) == []
    assert tag not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert tag not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


def test_nothing_is_left_of_machines_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    before = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    monkeypatch.setattr("experiments.faults.machines._SUBNETS", (300,))  # no address has it
    with pytest.raises(MachinesError, match="ip addr add"):
        Machines(["one"])
    assert subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout == before


def connected(address: str) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, 8000), timeout=20)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
