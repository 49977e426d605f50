"""What ``k8s/secrets.sh`` prints, taken apart."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.manifests import K8S

SCRIPT = K8S / "secrets.sh"


@dataclass(frozen=True)
class Made:
    """One run."""

    documents: list[dict[str, Any]]
    stdout: str
    said: str  # on stderr

    @property
    def values(self) -> dict[str, dict[str, str]]:
        """By the Secret's name and the key in it."""
        return {document["metadata"]["name"]: document["stringData"] for document in self.documents}

    def write(self, name: str, folder: Path) -> None:
        """Makes a Secret's keys files, as a volume does."""
        folder.mkdir(parents=True, exist_ok=True)
        for key, value in self.values[name].items():
            (folder / key).write_text(value)


def run_script(*options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *options], capture_output=True, text=True, check=False, **more)


def make_secrets(*options: str) -> Made:
    told = run_script(*options)
    assert told.returncode == 0, told.stderr
    return Made(list(yaml.safe_load_all(told.stdout)), told.stdout, told.stderr)
