"""The record of a run that may be killed at any moment, and the table at its end."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from outrider.experiments.bench.record import write_record

NAME = "gpu-suite"
_WHAT, _VALUE, _SPREAD, _GOAL = 66, 22, 16, 24  # characters of the columns


class RunningRecord:
    """One file, replaced whole each time that more is known."""

    def __init__(
        self, config: Mapping[str, Any], seed: int, started: datetime, device: str, folder: Path, environment: dict[str, Any]
    ) -> None:
        """See ``write_record``; ``environment`` goes before the results."""
        self._config, self._seed, self._started, self._device, self._folder = config, seed, started, device, folder
        self.environment = environment
        self.path: Path | None = None

    def write(self, results: Mapping[str, Any]) -> None:
        """Replaces what the file holds."""
        whole = {"environment": self.environment, **results}
        given = self._config, whole, self._seed, self._started, self._device
        if self.path is None:
            self.path = write_record(NAME, *given, self._folder)
            return
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix="unfinished-") as beside:
            write_record(NAME, *given, Path(beside)).replace(self.path)


def print_table(jobs: Sequence[Mapping[str, Any]]) -> None:
    """Every part with its state, and its figures below it."""
    print(f"\n{'':{_WHAT}} {'median':>{_VALUE}} {'range':>{_SPREAD}}  {'goal or note':{_GOAL}}")
    for job in jobs:
        name = job["part"] if job["size"] is None else f"{job['part']} {job['size']}"
        seconds = f", {job['seconds']:.0f} s" if "seconds" in job else ""
        state = "" if job["state"] == "done" else f" {job['state'].upper()}: {job.get('error_line', '')}"
        print(f"{name}{seconds}{state}")
        if "before" in job:
            print(f"  without {job['before']['kind']}, as the worker was lost: {job['before']['error_line']}")
        for text in job["found"].get("warnings", ())[: None if job["part"] == "smoke" else 3]:
            print(f"  warning: {text}")
        for line in job["lines"]:
            if len(line["value"]) > _VALUE:
                print(f"  {line['what']}: {line['value']}".rstrip(), line["goal"], line["verdict"])
                continue
            cells = (f"  {line['what']:{_WHAT - 2}}", f"{line['value']:>{_VALUE}}", f"{line['spread']:>{_SPREAD}}")
            print(*cells, "", f"{line['goal']:{_GOAL - 8}} {line['verdict']}".rstrip(), flush=True)
