"""Settings and reports of the parts of a measurement."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

ERROR_LINES = 6  # of a failed part's traceback, kept from its end
# Words of errors after which nothing on the device works any more in the same process.
_FATAL = ("CUDA error", "cudaError", "illegal memory access", "device-side assert", "unspecified launch failure", "CUBLAS_STATUS")


class UnavailableError(Exception):
    """Something is not available on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of the parts, which are sent between processes."""

    device: str = "cpu"  # torch's name of it
    double: bool = False  # it is the double of a GPU
    dtype: str = "bfloat16"
    kinds: tuple[str, ...] = ("strict", "rounding")  # of runners, the preferred one first; see ``models.build_runner``
    workloads: tuple[Path, ...] = ()
    tokenizer: Path | None = None
    records: int = 12  # of the workloads together
    max_tokens: int = 128  # of a known output
    seed: int = 0
    real_model: Path | None = None  # folder of a trained model
    no_real_model: str = ""  # why there is none
    out: Path = Path()  # for files beside the record
    read_gb_s: float | None = None  # measured bandwidth, once it is known
    scratch: Path = Path()  # for what is kept while the run lasts


@dataclass(frozen=True, slots=True)
class Job:
    """One part for one model."""

    part: str
    size: str | None  # of the model; None for parts without one
    function: str  # MODULE:NAME, called with a setting, a report and what the worker keeps between parts
    estimate_s: float

    @property
    def name(self) -> str:
        """Return the part and its size, such as ``steps 8b``."""
        return self.part if self.size is None else f"{self.part} {self.size}"


@dataclass(slots=True)
class Report:
    """Results of a running part. The content of ``found`` outlives the worker once ``save`` is called."""

    job: Job
    limit_s: float  # that the part may take
    send: Callable[[str, Any], None]
    found: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """A line of progress on stdout."""
        print(f"  [{self.job.name} {time.monotonic() - self.began:5.1f} s] {text}", flush=True)

    def left_s(self) -> float:
        """Seconds until the part should have ended."""
        return self.limit_s - (time.monotonic() - self.began)

    def ends_left_s(self, number: int, of: int) -> float:
        """Return the seconds of the part to be left after the ``number``-th of its pieces, from 0 on, has had its share."""
        return self.left_s() * (1 - 1 / (of - number))

    def line(self, what: str, value: str, spread: str = "", goal: str = "", met: bool | None = None) -> None:
        """Add a row to the table at the end; ``met`` says whether the goal, if any, was reached."""
        verdict = "" if met is None else "met" if met else "MISSED"
        self.lines.append({"what": what, "value": value, "spread": spread, "goal": goal, "verdict": verdict})

    def save(self) -> None:
        """Sends what was found so far, as JSON would give it back."""
        self.send("found", json.loads(json.dumps({"found": self.found, "lines": self.lines}, default=str)))

    def using(self, kind: str | None) -> None:
        """Names the kind of runner that works from now on: the one to leave out should the worker be lost."""
        self.send("using", kind)

    @contextmanager
    def attempt(self, label: str) -> Iterator[None]:
        """Run a piece of a part, whose failure is recorded and ends the piece alone.

        Raises:
            Exception: after which the device is of no use to this process.
        """
        try:
            yield
        except UnavailableError as error:
            self.found.setdefault("unavailable", {})[label] = str(error)
            self.line(label, f"n/a: {error}"[:150])
            self.say(f"{label}: n/a: {error}")
        except Exception as error:  # whatever a piece raises: the others are measured all the same
            logger.debug("%s failed", label, exc_info=True)
            if is_fatal(error):
                raise
            self.found.setdefault("failed", {})[label] = last_lines(error)
            self.line(label, f"FAILED: {one_line(error)}")
            self.say(f"{label} failed: {one_line(error)}")
        self.save()


def is_fatal(error: BaseException) -> bool:
    """Whether the device is lost to this process."""
    return not isinstance(error, MemoryError) and any(word in str(error) for word in _FATAL)


def one_line(error: BaseException, most: int = 150) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:most]


def last_lines(error: BaseException) -> list[str]:
    """The end of an error's traceback, without absolute paths."""
    text = "".join(traceback.format_exception(error)).replace(f"{Path.cwd()}/", "")
    return text.rstrip().splitlines()[-ERROR_LINES:]
