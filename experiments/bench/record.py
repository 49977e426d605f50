"""Records of runs: command, configuration, machine, versions and results, one JSON file per run."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from outrider.engine.environment import cpu_name
from outrider.engine.measures.energy import EnergySpan

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
NOT_METERED = "n/a"  # value of energy fields without a counter
_PACKAGES = ("torch", "transformers", "outrider", "triton", "numba", "numpy", "tokenizers", "nvidia-ml-py", "flash-attn")


def write_record(
    name: str,
    config: Mapping[str, Any],
    results: Mapping[str, Any],
    seed: int | None,
    started: datetime,
    device: str = "cpu",
    folder: Path = RESULTS,
    energy: EnergySpan | None = None,
) -> Path:
    """Write the record of a finished run and return its path, ``folder/DATE-NAME.json`` or ``DATE-NAME-2.json`` and so on.

    A record names no host, no user and no absolute path: paths in ``config`` become relative to the repository, or their last
    part. ``results`` are kept unchanged, so they should hold numbers and ids, but no prompts.
    """
    finished = datetime.now(UTC)
    record = {
        "name": name,
        "started": started.astimezone(UTC).isoformat(timespec="seconds"),
        "finished": finished.isoformat(timespec="seconds"),
        "duration_s": round((finished - started).total_seconds(), 1),
        "git": git_state(ROOT),
        "command": command_line(sys.orig_argv),
        "config": portable(config),
        "seed": seed,
        "device": describe_device(device),
        "energy": {"source": NOT_METERED} if energy is None else describe_energy(energy),
        "versions": versions(),
        "results": results,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False, default=_encode) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    stem, number = f"{finished:%Y-%m-%d}-{name}", 1
    while True:
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            number += 1
        else:
            return path


class Kept:
    """Intermediate results in a growing file of JSON lines, with which an interrupted run continues."""

    def __init__(self, path: Path, setting: Mapping[str, Any], key: Callable[[Any], Hashable]) -> None:
        """Read the values of an earlier run; a truncated last line is dropped.

        Raises:
            ValueError: the file has another setting or revision.
        """
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        lines = whole.splitlines()
        if lines and json.loads(lines[0]) != json.loads(json.dumps(setting)):
            raise ValueError(f"--kept {path.name} is of another setting or revision: delete it, or name another file")
        self.found = [json.loads(line) for line in lines[1:]]
        self._key, self._keys = key, {key(value) for value in self.found}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if not lines:
            print(json.dumps(setting), file=self._file, flush=True)

    def has(self, key: Hashable) -> bool:
        """Return whether a value with this key exists."""
        return key in self._keys

    def add(self, value: Any) -> None:
        """Append a JSON value."""
        self.found.append(value)
        self._keys.add(self._key(value))
        print(json.dumps(value), file=self._file, flush=True)


def spread(values: Sequence[float], digits: int = 3, scale: float = 1.0) -> dict[str, float]:
    """Return median, minimum and maximum of some values times ``scale``; empty without values."""
    if not values:
        return {}
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value * scale, digits) for name, value in found.items()}


def portable(value: Any) -> Any:
    """Make every absolute path in a value relative to the repository, or cut it to its last part."""
    if isinstance(value, Mapping):
        return {str(key): portable(item) for key, item in value.items()}
    if isinstance(value, Path):
        return _portable_path(value)
    if isinstance(value, str):
        option, separator, path = value.partition("=")  # --out=/some/where
        if separator and path.startswith("/"):
            return f"{option}={_portable_path(Path(path))}"
        return _portable_path(Path(value)) if value.startswith("/") else value
    if isinstance(value, Sequence):
        return [portable(item) for item in value]
    return value


def command_line(arguments: Sequence[str]) -> str:
    """Return the command as typed in the root of the repository, with ``python`` as the interpreter."""
    return " ".join(["python", *(portable(argument) for argument in arguments[1:])])


def git_state(root: Path) -> dict[str, Any] | None:
    """Return revision and cleanliness of a checkout, ignoring earlier records; None outside of one."""
    try:
        revision = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--", ".", ":(exclude)experiments/results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"revision": revision, "dirty": bool(changes)}


def describe_device(device: str) -> dict[str, Any]:
    """Describe the processor, and the GPU if ``device`` is one."""
    described: dict[str, Any] = {
        "type": device,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if device.startswith("cuda"):
        described["gpu"] = torch.cuda.get_device_name(device)
    return described


def describe_energy(span: EnergySpan) -> dict[str, Any]:
    """Describe an energy span: joules with and without idle power, and the idle power; ``n/a`` if unknown."""
    return {
        "source": span.source,
        "joules": _figure(span.joules),
        "net_joules": _figure(span.net_joules),
        "idle_w": _figure(span.idle_w),
        "seconds": round(span.seconds, 3),
        "coarse": span.coarse,
    }


def _figure(value: float | None) -> float | str:
    return NOT_METERED if value is None else round(value, 3)


def _portable_path(path: Path) -> str:
    if not path.is_absolute():
        return str(path)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _encode(value: object) -> object:
    if isinstance(value, Path):
        return _portable_path(value)
    raise TypeError(f"a record holds JSON values and paths, got {type(value).__name__}: {value!r}")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    return {"python": platform.python_version()} | {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"  # outrider run from its source tree: the git revision says which


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
