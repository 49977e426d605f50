"""Processes of the suite: a worker for the parts, and processes that compile ahead.

A fault on a GPU, such as an illegal address in a kernel, makes every later call of its process fail. Therefore the parts run in a
worker. The parent keeps the results of each part so far, and starts another worker if one is lost.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from outrider.experiments.bench.record import ROOT
from outrider.experiments.gpu_suite.device import measured_on
from outrider.experiments.gpu_suite.report import Job, Report, Setting, UnavailableError, is_fatal, last_lines, one_line

WARMED = ("executor", "llma", "trie", "auto")  # see ``experiments.gpu_suite.parts.warm``; a process each
_WARM_LIMIT_S = 150.0


def numba_fault() -> str | None:
    """Return why an installed numba cannot be used; None if it works or is not installed."""
    from outrider.decoding.jit import NATIVE  # here: a worker without numba hides it before its first import

    if not NATIVE:
        return None
    tried = subprocess.run([sys.executable, "-c", "import numba"], capture_output=True, text=True)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else None


def keep_compiled() -> None:
    """Keep compiled code of all processes where the project's tests do, so that it is compiled once."""
    os.environ["XDG_CACHE_HOME"] = str(ROOT / ".pytest_cache" / "user_cache")


class Warming:
    """Processes that compile ahead, beside the first parts."""

    def __init__(self, log: Path) -> None:
        """Start the processes; their output goes to ``log``."""
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
        """Wait until all have ended; those that take too long are killed, and then every process compiles for itself."""
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
        """End those that still run."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


logger = logging.getLogger(__name__)

_WARNING_CHARS = 300


def work(connection: Connection, without: tuple[str, ...] = ()) -> None:
    """Run the jobs that come through a connection, and send messages, until it is closed.

    The packages ``without`` count as not installed, because they do not work.
    """
    for package in without:
        sys.modules[package] = None  # type: ignore[assignment]
    kept: dict[str, Any] = {}  # models, between parts
    warnings = _Warnings(logging.WARNING)
    logging.captureWarnings(True)
    for logger_name in ("", "transformers"):  # which hands nothing on
        logging.getLogger(logger_name).addHandler(warnings)
    with contextlib.ExitStack() as device:
        _work(connection, warnings, kept, device)


def _work(connection: Connection, warnings: _Warnings, kept: dict[str, Any], device: contextlib.ExitStack) -> None:
    ready = False
    while True:
        try:
            job, setting, limit_s = connection.recv()
        except EOFError:
            return
        report = Report(job, limit_s, lambda kind, value: connection.send((kind, value)))
        warnings.report = report
        try:
            if not ready:
                device.enter_context(measured_on(setting.device, setting.double))
                ready = True
            module, _, name = job.function.partition(":")
            getattr(importlib.import_module(module), name)(setting, report, kept)
        except UnavailableError as error:
            report.save()
            connection.send(("unavailable", str(error)))
        except Exception as error:  # whatever a part raises: it is told, and the next part runs
            logger.debug("%s failed", job.name, exc_info=True)
            report.save()
            connection.send(("failed", {"lines": last_lines(error), "line": one_line(error), "fatal": is_fatal(error)}))
            if is_fatal(error):
                return
        else:
            report.save()
            connection.send(("done", None))


class _Warnings(logging.Handler):
    """Log handler that adds warnings, such as a step that could not be captured, to the report of the running part."""

    report: Report | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        if self.report is not None and record.name != "outrider.engine.loading.model_tables":  # whose progress it is
            text = " ".join(record.getMessage().split())[:_WARNING_CHARS]
            self.report.found.setdefault("warnings", []).append(f"{record.name}: {text}")
            self.report.say(f"warning: {text}")


class Worker:
    """Process that runs parts, started again when it is lost."""

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        self._without = without
        self._process: Any = None
        self._connection: Connection | None = None

    def run(self, job: Job, setting: Setting, limit_s: float, grace_s: float, on_found: Callable[[Any], None]) -> dict[str, Any]:
        """Run a job, and kill the worker ``grace_s`` after its limit; ``on_found`` gets the results each time they are saved.

        Returns:
            ``state`` (``done``, ``n/a`` or ``failed``); ``error`` (lines) and ``error_line``, unless it is done; ``lost``,
            whether the worker is gone; and ``kind``, of the runner that was in use.
        """
        connection = self._started()
        connection.send((job, setting, limit_s))
        kind: str | None = None
        ends = time.monotonic() + limit_s + grace_s
        while connection.poll(max(0.0, ends - time.monotonic())):
            try:
                message, value = connection.recv()
            except (EOFError, OSError):
                code = self.stop()
                return _lost(f"its process ended with exit code {code}", kind)
            if message == "found":
                on_found(value)
            elif message == "using":
                kind = value
            elif message == "done":
                return {"state": "done", "lost": False, "kind": kind}
            elif message == "unavailable":
                return {"state": "n/a", "error": [value], "error_line": value, "lost": False, "kind": kind}
            else:
                assert message == "failed", message
                if value["fatal"]:
                    self.stop()
                answer = {"state": "failed", "error": value["lines"], "error_line": value["line"]}
                return answer | {"lost": value["fatal"], "kind": kind}
        self.stop()
        return _lost(f"no end after {limit_s + grace_s:.0f} s: its process was killed", kind)

    def stop(self) -> int | None:
        """End the process, if any, and return its exit code."""
        if self._process is None or self._connection is None:
            return None
        self._connection.close()
        self._process.join(2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10.0)
        code: int | None = self._process.exitcode
        self._process = self._connection = None
        return code

    def _started(self) -> Connection:
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=work, args=(theirs, self._without))
            self._process.start()
            theirs.close()
        return self._connection


def _lost(why: str, kind: str | None) -> dict[str, Any]:
    return {"state": "failed", "error": [why], "error_line": why, "lost": True, "kind": kind}
