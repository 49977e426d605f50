"""The latency curve of a model on this device, measured once and kept on disk.

A curve is a hint to a drafter: a wrong one costs speed and changes no output. So a file is believed when it is of this model,
device and code and holds what it must, and measured again, with a warning, when it does not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from decoding.budget.latency import LatencyCurve
from decoding.private_files import keep_file, open_private
from engine.environment import device_name
from engine.forward.runner import ModelRunner
from engine.loading.model_info import ModelInfo
from engine.measures.latency import Case, Report, Timings, cases, fit, measure, timing

logger = logging.getLogger(__name__)

_DISTURBED = 1.5  # the median of a step's times over the shortest
_FORMAT = 1  # raise it when steps are timed otherwise
_MAX_BYTES = 1 << 20  # of a file; a real one has a few thousand


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured."""

    seconds: dict[Case, float]
    curve: LatencyCurve
    setting: dict[str, Any]  # model, device and software that the times hold for
    spread: float  # see ``Timings.spread``

    @property
    def disturbed(self) -> bool:
        """Whether the machine was too busy for times to be relied on."""
        return self.spread > _DISTURBED


class CalibrationFile:
    """The file of one model, dtype, device and number of threads. Used while no request has a slot."""

    def __init__(self, folder: Path, runner: ModelRunner, info: ModelInfo) -> None:
        self._runner, self._max_model_len = runner, info.max_model_len
        self._setting = _setting(runner, info)
        digest = hashlib.sha256(json.dumps(self._setting, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"latency-{info.model_revision[:16]}-{digest[:16]}.json"

    def curve(self) -> LatencyCurve:
        """The curve of the file, or measured now and kept there."""
        kept = self.kept()
        return self._settled(self.measure()) if kept is None else kept

    def curve_in_pieces(self) -> Generator[None, None, LatencyCurve]:
        """As ``curve``, for whoever does other things between two forwards."""
        kept = self.kept()  # by another process meanwhile
        if kept is not None:
            return kept
        return self._settled(self._calibration((yield from timing(self._runner, self._cases()))))

    def kept(self) -> LatencyCurve | None:
        """The curve of the file; None where it has to be measured."""
        try:
            return self._read()
        except FileNotFoundError:
            logger.debug("no latency curve at %s yet", self.path)
        except (OSError, ValueError, RecursionError) as error:  # the last of json, for a file of brackets
            logger.warning("the latency curve at %s cannot be used and is measured again: %s", self.path, error)
        return None

    def _settled(self, found: Calibration) -> LatencyCurve:
        """The curve, kept unless it was disturbed."""
        if found.disturbed:  # it will do for now, but not for ever
            logger.warning("steps were timed on a busy machine, and will be again at the next start")
        else:
            self.keep(found)
        return found.curve

    def measure(self, report: Report | None = None) -> Calibration:
        """Measures now, whatever the file says."""
        return self._calibration(measure(self._runner, self._max_model_len, report))

    def _calibration(self, timings: Timings) -> Calibration:
        return Calibration(timings.seconds, fit(timings.seconds), self._setting, timings.spread)

    def _cases(self) -> list[Case]:
        return cases(self._runner.sequences, self._runner.cache.capacity, self._max_model_len, self._runner.full_rows)

    def keep(self, found: Calibration) -> bool:
        """Writes the file. Where that cannot be, a warning says so, and the answer is False."""
        kept = {"format": _FORMAT, "setting": self._setting, "covers": self._wanted(), "curve": found.curve.to_json()}
        try:
            keep_file(self.path, json.dumps(kept, indent=1).encode())
        except OSError as error:
            logger.warning("the latency curve could not be kept and will be measured again at the next start: %s", error)
            return False
        return True

    def _read(self) -> LatencyCurve | None:
        """The curve of the file; None where fewer or smaller KV slots were measured than there are.

        Raises:
            OSError: it cannot be read.
            ValueError: it does not hold what it must.
        """
        with open_private(self.path) as file:
            data = json.loads(file.read(_MAX_BYTES))
        if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("setting") != self._setting:
            raise ValueError("it is not of this model, device and version")
        covers, wanted = data.get("covers"), self._wanted()
        if not isinstance(covers, list) or len(covers) != len(wanted) or not all(isinstance(each, int) for each in covers):
            raise ValueError(f"covers must be {len(wanted)} numbers, got {covers!r}")
        if any(has < wants for has, wants in zip(covers, wanted, strict=True)):
            logger.info("the latency curve at %s is of fewer or smaller KV slots, and is measured again", self.path)
            return None
        return LatencyCurve.from_json(data.get("curve"))

    def _wanted(self) -> list[int]:
        """The most sequences, rows and entries of what is timed."""
        wanted = self._cases()
        return [max(case.sequences for case in wanted), max(case.rows for case in wanted), max(case.context for case in wanted)]


def _setting(runner: ModelRunner, info: ModelInfo) -> dict[str, Any]:
    """All that times depend on."""
    device = runner.model.device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "model": info.model_revision,
        "dtype": info.dtype,
        "device": device_name(device),
        "threads": min(torch.get_num_threads(), cores) if device.type == "cpu" else None,
        "ranks": runner.ranks,
        "part": [runner.cache.shape.layers, runner.cache.shape.kv_heads],  # of the model that is here: ranks may have the rest
        "forwards": runner.form(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "code": _code(),
    }


@cache
def _code() -> str:
    """Digits that stand for the sources of the engine, which compute the steps."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
