"""Machines made of network namespaces, each with its own address, ports and private folder, that can be lost.

They need root, ``ip`` and ``unshare`` (Debian: iproute2, util-linux). Nothing outside this machine reaches them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_SUBNETS = range(1, 255)
_ENDED_S = 20.0


class MachinesError(RuntimeError):
    """Machines cannot be made, or a cluster of them does not get into the expected state."""


def why_not() -> str | None:
    """Return why this process cannot make machines; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(command) is None:
            return f"there is no command {command}: apt-get install {package}"
    return None


class Machine:
    """A machine, at first without a process."""

    def __init__(self, namespace: str, address: str, private: Path | None, cable: str) -> None:
        self.address, self._namespace, self._private, self._cable = address, namespace, private, cable
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process whose output is appended to ``log``."""
        within = ["ip", "netns", "exec", self._namespace]
        if self._private is not None:
            within += ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(self._private)]
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*within, *command],
                env=dict(environment), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return process

    @property
    def ended(self) -> bool:
        """Whether a started process has ended by itself."""
        return any(process.poll() is not None for process in self._started)

    def pids(self) -> list[int]:
        """Return the ids of all processes of the machine."""
        return [int(pid) for pid in _ip(f"netns pids {self._namespace}").split()]

    def cut(self) -> None:
        """Cut the network: processes go on, and no connection is closed."""
        _ip(f"link set {self._cable} down")

    def mend(self) -> None:
        """Connect the network again."""
        _ip(f"link set {self._cable} up")

    def kill(self) -> None:
        """Send SIGKILL to all processes of the machine, and return when they have ended."""
        deadline = time.monotonic() + _ENDED_S
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise MachinesError(f"{self._namespace}: processes {pids} do not end")
            time.sleep(0.05)
        for process in self._started:
            process.wait()
        self._started = []


class Machines:
    """Machines on a network that this machine belongs to as well; ``with`` removes them with all their processes."""

    def __init__(self, names: Sequence[str], private: Path | None = None) -> None:
        """Make the machines.

        Args:
            names: of the machines.
            private: a folder that is empty and separate for each process that is started on a machine.

        Raises:
            MachinesError: see ``why_not``; or a command failed.
        """
        reason = why_not()
        if reason is not None:
            raise MachinesError(reason)
        self._tag = secrets.token_hex(2)  # names of interfaces have 15 characters at most
        self._bridge, subnet = f"outr-{self._tag}", f"10.213.{secrets.choice(_SUBNETS)}"
        self.address = f"{subnet}.1"
        self.by_name: dict[str, Machine] = {}
        self._made = contextlib.ExitStack()
        try:
            self._made.callback(_remove_link, self._bridge)
            _ip(f"link add {self._bridge} type bridge")
            _ip(f"addr add {self.address}/24 dev {self._bridge}")
            _ip(f"link set {self._bridge} up")
            for number, name in enumerate(names, start=2):
                self.by_name[name] = self._make(number, f"{subnet}.{number}", private)
        except BaseException:
            self.close()
            raise

    def _make(self, number: int, address: str, private: Path | None) -> Machine:
        namespace, cable = f"outrider-{self._tag}-{number}", f"{self._bridge}-{number}"
        machine = Machine(namespace, address, private, cable)
        _ip(f"netns add {namespace}")
        self._made.callback(_ip, f"netns del {namespace}")
        self._made.callback(_remove_link, cable)  # with its namespace it would be removed a moment later
        self._made.callback(machine.kill)
        _ip(f"link add {cable} type veth peer name eth0 netns {namespace}")
        _ip(f"link set {cable} master {self._bridge} up")
        _ip(f"-n {namespace} addr add {address}/24 dev eth0")
        _ip(f"-n {namespace} link set eth0 up")
        _ip(f"-n {namespace} link set lo up")
        return machine

    def close(self) -> None:
        """End and remove all machines. May be repeated."""
        self._made.close()

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _remove_link(link: str) -> None:
    subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)  # may not exist yet


def _ip(arguments: str) -> str:
    found = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, check=False)
    if found.returncode:
        raise MachinesError(f"ip {arguments}: {found.stderr.strip()}")
    return found.stdout
