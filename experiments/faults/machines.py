"""Machines made of namespaces: each has an address, ports and a folder of its own, and can be lost as a machine is.

Needs root, ``ip`` and ``unshare`` (Debian: iproute2, util-linux). Nothing outside this machine reaches them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_SUBNETS = range(1, 255)
_ENDED_S = 20.0


class MachinesError(RuntimeError):
    """No machines can be made; the message says what is missing."""


def why_not() -> str | None:
    """What keeps this process from making machines; None where nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(command) is None:
            return f"there is no command {command}: apt-get install {package}"
    return None


class Machine:
    """One of them, at first without a process."""

    def __init__(self, name: str, namespace: str, address: str, private: Path | None, cable: str) -> None:
        self.name, self.address, self._namespace, self._private, self._cable = name, address, namespace, private, cable
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Starts a process on it; what it says is appended to a file."""
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
        """Whether a process that was started here has ended by itself."""
        return any(process.poll() is not None for process in self._started)

    def pids(self) -> list[int]:
        """Of all processes that run on it."""
        return [int(pid) for pid in _ip("netns", "pids", self._namespace).split()]

    def cut(self) -> None:
        """Nothing reaches it any more, and nothing of it anybody: what it runs goes on, and no connection ends."""
        _ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        """Ends ``cut``."""
        _ip("link", "set", self._cable, "up")

    def kill(self) -> None:
        """Ends all that runs on it at once, without a word to anybody, and returns when it has ended."""
        deadline = time.monotonic() + _ENDED_S
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                raise MachinesError(f"{self.name}: processes {pids} do not end")
            time.sleep(0.05)
        for process in self._started:
            process.wait()
        self._started = []


class Machines:
    """Machines on one network, to which this one belongs as well. ``with`` takes them away again, with all that runs on them."""

    def __init__(self, names: Sequence[str], private: Path | None = None) -> None:
        """
        Args:
            names: of the machines.
            private: a folder of which each process that is started on a machine has an empty one of its own.

        Raises:
            MachinesError: see ``why_not``; or a command failed.
        """
        reason = why_not()
        if reason is not None:
            raise MachinesError(reason)
        self._tag = secrets.token_hex(2)  # names of interfaces have 15 characters at most
        self._private = private
        subnet = f"10.213.{secrets.choice(_SUBNETS)}"
        self.address = f"{subnet}.1"
        self.by_name: dict[str, Machine] = {}
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number, name in enumerate(names, start=2):
                self.by_name[name] = self._make(name, number, f"{subnet}.{number}")
        except BaseException:
            self.close()
            raise

    @property
    def _bridge(self) -> str:
        return f"outr-{self._tag}"

    def _make(self, name: str, number: int, address: str) -> Machine:
        namespace, cable = f"outrider-{self._tag}-{number}", f"{self._bridge}-{number}"
        _ip("netns", "add", namespace)
        machine = self.by_name[name] = Machine(name, namespace, address, self._private, cable)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", cable, "master", self._bridge, "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        return machine

    def close(self) -> None:
        """Ends and removes all of them. Harmless when repeated."""
        for number, machine in enumerate(self.by_name.values(), start=2):
            machine.kill()
            _take_away(f"{self._bridge}-{number}")  # with its namespace it would go a moment later
            _ip("netns", "del", f"outrider-{self._tag}-{number}")
        self.by_name = {}
        _take_away(self._bridge)

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _take_away(link: str) -> None:
    """Of a network that was made in part, some links are not there."""
    subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)


def _ip(*arguments: str) -> str:
    found = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if found.returncode:
        raise MachinesError(f"ip {' '.join(arguments)}: {found.stderr.strip()}")
    return found.stdout
