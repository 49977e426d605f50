"""Parts of a measurement in a process of their own: one that fails, crashes or hangs takes no other with it.

A fault on a GPU (an illegal address in a kernel, say) makes every later call of its process fail. So the parts run in a worker;
the process that asks for them keeps what each part has found so far, and starts another worker when one is lost.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from outrider.experiments.gpu_suite.device import measured_on
from outrider.experiments.gpu_suite.report import Job, Report, Setting, UnavailableError, is_fatal, last_lines, one_line

logger = logging.getLogger(__name__)

_WARNING_CHARS = 300


def work(connection: Connection, without: tuple[str, ...] = ()) -> None:
    """The worker's loop: a job and its setting in, messages out, until nothing comes any more.

    Args:
        connection: to the process that asks.
        without: packages that count as not installed, because they do not work.
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
    """Puts what is warned of into the report of the part that runs: a step that could not be captured, say."""

    report: Report | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        if self.report is not None and record.name != "outrider.engine.loading.model_tables":  # whose progress it is
            text = " ".join(record.getMessage().split())[:_WARNING_CHARS]
            self.report.found.setdefault("warnings", []).append(f"{record.name}: {text}")
            self.report.say(f"warning: {text}")


class Worker:
    """The process that runs parts, started anew when it is lost."""

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        """See ``work``."""
        self._without = without
        self._process: Any = None
        self._connection: Connection | None = None

    def run(self, job: Job, setting: Setting, limit_s: float, grace_s: float, on_found: Callable[[Any], None]) -> dict[str, Any]:
        """Runs a job.

        Args:
            job: to run.
            setting: for it.
            limit_s: that it is told to keep.
            grace_s: that it gets on top before the worker is killed.
            on_found: is given what was found, each time the part saves it.

        Returns:
            ``state`` (``done``, ``n/a`` or ``failed``); ``error`` (lines) and ``error_line``, where it is not done; ``lost``,
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
        """Ends the process, if there is one; its exit code."""
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
