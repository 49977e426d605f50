"""What a machine measures with, and the compiling that is done ahead."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outrider.decoding.jit import NATIVE
from outrider.experiments.bench.record import ROOT

WARMED = ("executor", "llma", "trie", "auto")  # see ``experiments.gpu_suite.parts.warm``; a process each
_WARM_LIMIT_S = 150.0


def numba_fault() -> str | None:
    """Why numba cannot be used, where it is installed and fails; the project would rely on it."""
    if not NATIVE:
        return None
    tried = subprocess.run([sys.executable, "-c", "import numba"], capture_output=True, text=True)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else None


def keep_compiled() -> None:
    """Has all processes of the run keep compiled code where the project's tests do, so that it is compiled once."""
    os.environ["XDG_CACHE_HOME"] = str(ROOT / ".pytest_cache" / "user_cache")


class Warming:
    """The processes that compile, beside the first parts."""

    def __init__(self, log: Path) -> None:
        """
        Args:
            log: for what they print.
        """
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._began, self._log = time.monotonic(), log
        with log.open("wb") as file:
            self._processes = {
                name: subprocess.Popen(
                    [sys.executable, "-m", "outrider.experiments.gpu_suite.parts.warm", name],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file, stderr=subprocess.STDOUT,
                )
                for name in WARMED
            }  # fmt: skip
        self.outcome: dict[str, Any] | None = None  # once they have ended: exit codes, seconds, and the last lines of a failure

    def wait(self) -> None:
        """Until all have ended, or have taken too long and are killed; then every process compiles for itself."""
        if self.outcome is not None:
            return
        codes = {}
        for name, process in self._processes.items():
            try:
                codes[name] = process.wait(max(0.1, _WARM_LIMIT_S - (time.monotonic() - self._began)))
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait()
        self.outcome = {"exit_codes": codes, "waited_until_s": round(time.monotonic() - self._began, 1)}
        if any(codes.values()):
            self.outcome["log"] = self._log.read_text(errors="replace").splitlines()[-6:]

    def end(self) -> None:
        """Ends those that still run."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
