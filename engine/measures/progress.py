"""Progress of a loading replica, passed through a file to the waiting command that started it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PROGRESS_VARIABLE = "OUTRIDER_PROGRESS_FILE"  # path of the file; without it nothing is reported
STAGES = ("importing torch and transformers", "reading the weights", "checking that steps are exact", "preparing drafts")


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
