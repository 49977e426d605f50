"""Child processes, which import this code, ignore the current folder and get no secrets; the progress of a loading replica."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

CODE = str(Path(os.path.abspath(__file__)).parents[2])  # folder of the package ``outrider``

# Variables by name or prefix, without Ray's token, addresses with passwords, and secrets of the cache.
_VARIABLES = (
    "PATH", "HOME", "USER", "LANG", "LC_", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_", "VIRTUAL_ENV",
    "OMP_", "MKL_", "OPENBLAS_", "KMP_", "NUMBA_", "CUDA_", "NVIDIA_", "TORCH", "TRITON_", "HF_", "MPL", "COVERAGE_",
)  # fmt: skip
PIP_VARIABLES = (
    "PIP_", "SSL_CERT_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC",
    "http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
)  # fmt: skip
_SECRETS = ("HF_TOKEN", "HF_HUB_TOKEN")
# Path of the file through which a loading replica reports to the command that waits for it; without it nothing is reported.
PROGRESS_VARIABLE = "OUTRIDER_PROGRESS_FILE"
STAGES = ("importing torch and transformers", "reading the weights", "checking that steps are exact", "preparing drafts")


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module without imports from the current folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(*more: str) -> dict[str, str]:
    """Return the environment of a child process: a fixed set of variables, and those that begin with ``more``."""
    # ``HF_`` passes the hub's settings, but not its tokens.
    kept = {name: value for name, value in os.environ.items() if name.startswith((*_VARIABLES, *more)) and name not in _SECRETS}
    path = os.environ.get("PYTHONPATH")
    return kept | {"PYTHONPATH": f"{CODE}{os.pathsep}{path}" if path else CODE}


def report_progress(stage: str) -> None:
    """Report that one of ``STAGES`` begins; with several replicas the most recent report wins."""
    path = os.environ.get(PROGRESS_VARIABLE)
    if path:
        with contextlib.suppress(OSError):  # the waiting command has exited
            Path(path).write_text(stage, encoding="utf-8")


def last_progress(path: Path) -> str:
    """Return the last reported stage and its number, such as ``reading the weights (2 of 4)``; empty before the first."""
    with contextlib.suppress(OSError):
        stage = path.read_text(encoding="utf-8")
        if stage in STAGES:
            return f"{stage} ({STAGES.index(stage) + 1} of {len(STAGES)})"
    return ""
