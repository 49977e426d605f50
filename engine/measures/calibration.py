"""Latency curve of a model on this device, measured once and stored in a file; a wrong curve only costs speed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.private_files import open_private, save_file
from outrider.engine.environment import code_digest, device_name
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.measures.latency import Case, Report, Timings, cases, fit, measure, rough_cases, rough_timings, timing

logger = logging.getLogger(__name__)

_DISTURBED = 1.5  # a larger ``Timings.spread`` means a disturbed measurement
_FORMAT = 1  # increase it when the timing method changes
_MAX_BYTES = 1 << 20  # maximum file size; a real one has a few thousand bytes


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured step times and the curve fitted to them."""

    seconds: dict[Case, float]
    curve: LatencyCurve
    setting: dict[str, Any]  # model, device and software of the measurement
    spread: float  # see ``Timings.spread``

    @property
    def disturbed(self) -> bool:
        """Return whether the machine was too busy for reliable times."""
        return self.spread > _DISTURBED


class CalibrationFile:
    """Latency file of one model, dtype, device and number of threads; for use while no request has a slot.

    A ``rough`` curve is of a few steps, for a fast start.
    """

    def __init__(self, folder: Path, runner: ModelRunner, info: ModelInfo, rough: bool = False) -> None:
        self._runner, self._max_model_len, self._rough = runner, info.max_model_len, rough
        self._setting = _setting(runner, info)
        digest = hashlib.sha256(json.dumps(self._setting, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{'rough-' * rough}latency-{info.model_revision[:16]}-{digest[:16]}.json"

    def curve(self) -> LatencyCurve:
        """Return the stored curve, or measure and store it."""
        kept = self.cached()
        return self._settled(self.measure()) if kept is None else kept

    def curve_in_pieces(self) -> Generator[None, None, LatencyCurve]:
        """Return the curve like ``curve``, yielding before each forward."""
        kept = self.cached()  # another process may have written it meanwhile
        if kept is not None:
            return kept
        return self._settled(self._calibration((yield from timing(self._runner, self._cases()))))

    def cached(self) -> LatencyCurve | None:
        """Return the stored curve; None if it has to be measured."""
        try:
            return self._read()
        except FileNotFoundError:
            logger.debug("no latency curve at %s yet", self.path)
        except (OSError, ValueError, RecursionError) as error:  # RecursionError: deeply nested JSON
            logger.warning("the latency curve at %s cannot be used and is measured again: %s", self.path, error)
        return None

    def _settled(self, found: Calibration) -> LatencyCurve:
        if found.disturbed:  # usable for now, but not stored
            logger.warning("steps were timed on a busy machine and will be timed again at the next start")
        else:
            self.save(found)
        return found.curve

    def measure(self, report: Report | None = None) -> Calibration:
        """Measure the curve now, regardless of the file."""
        if self._rough:
            return self._calibration(rough_timings(self._runner, self._max_model_len))
        return self._calibration(measure(self._runner, self._max_model_len, report))

    def _calibration(self, timings: Timings) -> Calibration:
        return Calibration(timings.seconds, fit(timings.seconds), self._setting, timings.spread)

    def _cases(self) -> list[Case]:
        if self._rough:
            return rough_cases(self._runner, self._max_model_len)
        return cases(self._runner.sequences, self._runner.cache.capacity, self._max_model_len, self._runner.full_rows)

    def save(self, found: Calibration) -> bool:
        """Write the file; on failure log a warning and return False."""
        kept = {"format": _FORMAT, "setting": self._setting, "covers": self._wanted(), "curve": found.curve.to_json()}
        try:
            save_file(self.path, json.dumps(kept, indent=1).encode())
        except OSError as error:
            logger.warning("the latency curve could not be saved and will be measured again at the next start: %s", error)
            return False
        return True

    def _read(self) -> LatencyCurve | None:
        """Return the stored curve; None if it covers fewer or smaller KV slots than exist now.

        Raises ``OSError`` if the file cannot be read, ``ValueError`` if it is invalid or of another setting.
        """
        with open_private(self.path) as file:
            data = json.loads(file.read(_MAX_BYTES))
        if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("setting") != self._setting:
            raise ValueError("it belongs to another model, device or version")
        covers, wanted = data.get("covers"), self._wanted()
        if not isinstance(covers, list) or len(covers) != len(wanted) or not all(isinstance(each, int) for each in covers):
            raise ValueError(f"covers must be {len(wanted)} numbers, got {covers!r}")
        if any(has < wants for has, wants in zip(covers, wanted, strict=True)):
            logger.info("the latency curve at %s covers fewer or smaller KV slots and is measured again", self.path)
            return None
        return LatencyCurve.from_json(data.get("curve"))

    def _wanted(self) -> list[int]:
        wanted = self._cases()
        return [max(case.sequences for case in wanted), max(case.rows for case in wanted), max(case.context for case in wanted)]


def _setting(runner: ModelRunner, info: ModelInfo) -> dict[str, Any]:
    device = runner.model.device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "model": info.model_revision,
        "dtype": info.dtype,
        "device": device_name(device),
        "threads": min(torch.get_num_threads(), cores) if device.type == "cpu" else None,
        "ranks": runner.ranks,
        "part": [runner.cache.shape.layers, runner.cache.shape.kv_heads],  # part of the model on this rank
        "forwards": runner.calibration_key(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "code": code_digest(),
    }
