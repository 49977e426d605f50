"""What the benches of ``outrider bench`` do alike: meter a run, show its results, and end with what must not differ."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.measures.energy import EnergyMeter, EnergySpan, measure_idle, open_meter
from experiments.record import IDLE_S

WIDTH = 200  # columns of a table that no terminal shows


@contextlib.contextmanager
def metered(*devices: str) -> Iterator[tuple[EnergyMeter, EnergySpan]]:
    """The meter of some devices, whose idle power is measured first, and the span of the block, told when it has ended.

    Args:
        devices: torch's names of them.
    """
    meter = open_meter(devices)
    measure_idle(meter, IDLE_S)
    with meter.span() as span:
        yield meter, span


def show(as_json: bool, results: Mapping[str, Any], tables: Sequence[Table], lines: Sequence[str] = ()) -> None:
    """Results on stdout: as JSON, or as tables with some lines below them."""
    if as_json:
        print(json.dumps(results, indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(*tables, sep="\n")
    for line in lines:
        print(line)


def conclude(record: Path, pictures: Sequence[Path], wrong: Sequence[str], fails: bool = True) -> int:
    """Names the files and what is not identical to plain decoding though it must be; the exit code.

    Args:
        record: of the run.
        pictures: beside it.
        wrong: what differs.
        fails: whether that is a failure; False where the rounding of the type excuses it.
    """
    named = ", ".join(picture.name for picture in pictures)
    print(f"record: {record.name}, figures: {named}", file=sys.stderr)
    if wrong:
        print(f"not identical to plain decoding: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong and fails else 0
