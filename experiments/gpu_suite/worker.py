"""Worker process of the GPU suite: a part that fails, crashes or hangs takes no other part with it.

After a fault on a GPU, such as an illegal address in a kernel, all later calls of the process fail. Parts therefore run in a
worker. The suite keeps what each part has found so far, and starts another worker when one is lost.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.environment import environment
from experiments.gpu_suite.device import measured_on

logger = logging.getLogger(__name__)

_ERROR_LINES, _WARNING_CHARS = 6, 300
# Words of errors after which nothing on the device works any more in the same process.
_FATAL = ("CUDA error", "cudaError", "illegal memory access", "device-side assert", "unspecified launch failure", "CUBLAS_STATUS")


class UnavailableError(Exception):
    """Something is not available on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of the parts. They cross processes."""

    device: str = "cpu"  # torch's name
    double: bool = False  # it is the double of a GPU
    dtype: str = "bfloat16"
    kinds: tuple[str, ...] = ("strict", "rounding")  # of runners, the preferred one first; see ``models.build_runner``
    workloads: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    max_tokens: int = 128  # of a known output
    real_model: Path | None = None  # folder of a trained model
    out: Path = Path()  # for files beside the record
    read_gb_s: float | None = None  # measured bandwidth, once it is known
    scratch: Path = Path()  # temporary files of the run


@dataclass(frozen=True, slots=True)
class Job:
    """One part for one model."""

    part: str
    size: str | None  # of the model; None for parts without one
    function: str  # MODULE:NAME, called with a setting, a report and a dict that the worker keeps between parts
    estimate_s: float
    alone: bool = False  # the worker ends with it
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of a new worker

    @property
    def name(self) -> str:
        """Name for people, such as ``steps 8b``."""
        return self.part if self.size is None else f"{self.part} {self.size}"


@dataclass(slots=True)
class Report:
    """Results of a running part. ``found`` outlives the worker once ``save`` was called."""

    job: Job
    limit_s: float
    send: Callable[[tuple[str, Any]], None]
    found: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"  [{self.job.name} {time.monotonic() - self.began:5.1f} s] {text}", flush=True)

    def left_s(self) -> float:
        """Return the seconds that are left of the part's time."""
        return self.limit_s - (time.monotonic() - self.began)

    def line(self, what: str, value: str, spread: str = "", goal: str = "", met: bool | None = None) -> None:
        """Add a row to the table at the end."""
        verdict = "" if met is None else "met" if met else "MISSED"
        self.lines.append({"what": what, "value": value, "spread": spread, "goal": goal, "verdict": verdict})

    def figure(
        self, what: str, figures: Mapping[str, float], unit: str, goal: str = "", met: bool | None = None, digits: int = 2
    ) -> None:
        """Add a row with the median and the range of a ``spread``."""
        if not figures:
            self.line(what, "n/a", "", goal, met)
            return
        median, low, high = (f"{figures[name]:.{digits}f}" for name in ("median", "min", "max"))
        self.line(what, f"{median} {unit}", f"{low}-{high}", goal, met)

    def save(self) -> None:
        """Send the results so far to the suite."""
        self.send(("found", json.loads(json.dumps({"found": self.found, "lines": self.lines}, default=str))))

    def using(self, kind: str | None) -> None:
        """Name the kind of runner that is used from now on: the one to leave out if the worker is lost."""
        self.send(("using", kind))

    def each(self, labels: Sequence[str], measure: Callable[[str, Callable[[], bool]], None]) -> None:
        """Call ``measure(label, over)`` for each label in an equal share of the time; ``over`` says whether the share is used."""
        for number, label in enumerate(labels):
            with self.attempt(label):
                measure(label, self.share(number, len(labels)))

    def share(self, number: int, of: int) -> Callable[[], bool]:
        """Return a function that says whether piece ``number`` of ``of`` has used its share of the time that is left now."""
        ends = self.left_s() * (1 - 1 / (of - number))
        return lambda: self.left_s() < ends

    @contextlib.contextmanager
    def attempt(self, label: str) -> Iterator[None]:
        """Record the failure of a piece of a part, and go on behind it; raise if the device is lost."""
        try:
            yield
        except UnavailableError as error:
            self.found.setdefault("unavailable", {})[label] = str(error)
            self._failed(label, f"n/a: {error}"[:150])
        except Exception as error:  # all other pieces are measured
            logger.debug("%s failed", label, exc_info=True)
            if is_fatal(error):
                raise
            self.found.setdefault("failed", {})[label] = _last_lines(error)
            self._failed(label, f"FAILED: {one_line(error)}")
        self.save()

    def _failed(self, label: str, why: str) -> None:
        self.line(label, why)
        self.say(f"{label}: {why}")


def is_fatal(error: BaseException) -> bool:
    """Return whether this process can no longer use the device."""
    return not isinstance(error, MemoryError) and any(word in str(error) for word in _FATAL)


def one_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:150]


def _last_lines(error: BaseException) -> list[str]:
    """Return the end of a traceback, without absolute paths."""
    text = "".join(traceback.format_exception(error)).replace(f"{Path.cwd()}/", "")
    return text.rstrip().splitlines()[-_ERROR_LINES:]


class _Warnings(logging.Handler):
    """Adds warnings to the report of the running part, such as one of a step that could not be captured."""

    report: Report | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.report is not None and record.name != "engine.loading.model_tables":  # it logs progress
            text = " ".join(record.getMessage().split())[:_WARNING_CHARS]
            self.report.found.setdefault("warnings", []).append(f"{record.name}: {text}")
            self.report.say(f"warning: {text}")


def work(connection: Connection) -> None:
    """Run jobs from the connection until it is closed."""
    warnings = _Warnings(logging.WARNING)
    logging.captureWarnings(True)
    for name in ("", "transformers"):  # the logger of transformers does not propagate
        logging.getLogger(name).addHandler(warnings)
    kept: dict[str, Any] = {}  # models, between parts
    with contextlib.ExitStack() as stack:
        while True:
            try:
                job, setting, limit_s = connection.recv()
            except EOFError:
                return
            warnings.report = report = Report(job, limit_s, connection.send)
            outcome = _run(job, setting, report, kept, stack)
            report.save()
            connection.send(("end", outcome))
            if outcome["lost"]:
                return


def _run(job: Job, setting: Setting, report: Report, kept: dict[str, Any], stack: contextlib.ExitStack) -> dict[str, Any]:
    try:
        if "device" not in kept:
            stack.enter_context(measured_on(setting.device, setting.double))
            kept["device"] = setting.device
        module, _, name = job.function.partition(":")
        getattr(importlib.import_module(module), name)(setting, report, kept)
    except UnavailableError as error:
        return {"state": "n/a", "error_line": str(error), "lost": False}
    except Exception as error:  # the suite records it and runs the next part
        logger.debug("%s failed", job.name, exc_info=True)
        return {"state": "failed", "error": _last_lines(error), "error_line": one_line(error), "lost": is_fatal(error)}
    return {"state": "done", "lost": False}


class Worker:
    """Process that runs parts, started again after it was lost."""

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Connection | None = None

    def run(self, job: Job, setting: Setting, limit_s: float, grace_s: float, on_found: Callable[[Any], None]) -> dict[str, Any]:
        """Run a job; kill the worker ``grace_s`` after its limit.

        Args:
            on_found: called with the results each time the part saves them.

        Returns:
            ``state`` (``done``, ``n/a`` or ``failed``), ``error_line`` and ``error`` (lines) if not done, ``lost``, whether the
            worker is gone, and ``kind``, the kind of runner that was in use.
        """
        connection = self._started(job.environment)
        connection.send((job, setting, limit_s))
        kind: str | None = None
        ends = time.monotonic() + limit_s + grace_s
        try:
            while connection.poll(max(0.0, ends - time.monotonic())):
                message, value = connection.recv()
                if message == "found":
                    on_found(value)
                elif message == "using":
                    kind = value
                else:
                    if value["lost"] or job.alone:
                        self.stop()
                    return value | {"kind": kind}
            self.stop()
            why = f"no end after {limit_s + grace_s:.0f} s: its process was killed"
        except (EOFError, OSError):
            why = f"its process ended with exit code {self.stop()}"
        return {"state": "failed", "error": [why], "error_line": why, "lost": True, "kind": kind}

    def stop(self) -> int | None:
        """End the process, if there is one, and return its exit code."""
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

    def _started(self, variables: Mapping[str, str]) -> Connection:
        if variables:
            self.stop()
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=work, args=(theirs,))
            with contextlib.ExitStack() as stack:
                for name, value in variables.items():
                    stack.enter_context(environment(name, value))
                self._process.start()
            theirs.close()
        return self._connection
