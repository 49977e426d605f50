"""What a replica that loads is doing, told to the command that started it and waits."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PROGRESS_VARIABLE = "OUTRIDER_PROGRESS_FILE"  # names the file; without it nothing is told
STAGES = ("importing torch and transformers", "reading the weights", "checking that steps are exact", "preparing drafts")


def tell(stage: str) -> None:
    """Says that one of ``STAGES`` begins. Of several replicas the last to speak is heard."""
    path = os.environ.get(PROGRESS_VARIABLE)
    if path:
        with contextlib.suppress(OSError):  # whoever waited has gone
            Path(path).write_text(stage, encoding="utf-8")


def told(path: Path) -> str:
    """The last stage and its place among all, such as ``reading the weights (2 of 4)``; empty before the first."""
    with contextlib.suppress(OSError):
        stage = path.read_text(encoding="utf-8")
        if stage in STAGES:
            return f"{stage} ({STAGES.index(stage) + 1} of {len(STAGES)})"
    return ""
