"""Runs of ``k8s/secrets.sh`` and of the script that makes a pod's certificate."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.manifests import K8S

SCRIPT = K8S / "secrets.sh"
CERTIFICATE = K8S / "components" / "tls" / "certificate.sh"


@dataclass(frozen=True)
class Made:
    """One run of ``k8s/secrets.sh``."""

    documents: list[dict[str, Any]]
    stdout: str
    said: str  # on stderr

    @property
    def values(self) -> dict[str, dict[str, str]]:
        """Return the values by the Secret's name and the key in it."""
        return {document["metadata"]["name"]: document["stringData"] for document in self.documents}

    def write(self, name: str, folder: Path) -> None:
        """Write a Secret's keys as files, as a volume does."""
        folder.mkdir(parents=True, exist_ok=True)
        for key, value in self.values[name].items():
            (folder / key).write_text(value)


def run_script(*options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *options], capture_output=True, text=True, check=False, **more)


def make_secrets(*options: str) -> Made:
    told = run_script(*options)
    assert told.returncode == 0, told.stderr
    return Made(list(yaml.safe_load_all(told.stdout)), told.stdout, told.stderr)


def make_certificate(authority: Path, folder: Path, address: str, *names: str) -> Path:
    """Make a folder with ``tls.crt``, ``tls.key`` and ``ca.crt`` for a pod with this address and names.

    ``authority`` is a folder with the keys of the secret outrider-ray-tls.
    """
    folder.mkdir(parents=True)
    environment = {"PATH": os.environ["PATH"], "POD_IP": address}
    command = [CERTIFICATE, authority, folder, *names]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    return folder


def tls_environment(folder: Path) -> dict[str, str]:
    """Return the variables by which Ray finds the files in a folder."""
    files = {"RAY_TLS_CA_CERT": "ca.crt", "RAY_TLS_SERVER_CERT": "tls.crt", "RAY_TLS_SERVER_KEY": "tls.key"}
    return {"RAY_USE_TLS": "1"} | {name: str(folder / file) for name, file in files.items()}
