"""Figure of a calibration.

outrider doctor --calibrate --json > latency.json && python -m experiments.report.latency_figure latency.json --out latency.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.experiments.bench.figure import draw, panel


def latency_figure(calibration: Mapping[str, Any], out: Path) -> Path:
    """Draw step times of ``outrider doctor --calibrate --json`` by rows, by requests and by context, measured and fitted.

    The suffix of ``out`` selects the format.

    Raises:
        KeyError, ValueError: ``calibration`` has another format.
    """
    steps, near = calibration["steps"], calibration["curve"]["context"]
    alone = [step for step in steps if step["sequences"] == 1]
    several = [step for step in steps if step["sequences"] > 1 or (step["context"] == near and step["rows"] == 1)]
    deep = {step["rows"] for step in alone if step["context"] != near}
    by_rows = _series([step for step in alone if step["context"] == near], "rows", "")
    by_requests = _series(several, "sequences", "{rows} rows each, {context} tokens before, ")
    by_context = _series([step for step in alone if step["rows"] in deep], "context", "{rows} rows, ")
    slack = f"up to {calibration['critical_rows']} rows take {calibration['slack']} times as long as one"
    threads = f", torch threads: {calibration['threads']}" if calibration["threads"] else ""
    setting = f"{calibration['model']}, {calibration['dtype']}, {calibration['device']}{threads}"
    panels = {
        "rows": panel("lines", slack, f"rows of one request behind {near} tokens", "ms per step", by_rows),
        "requests": panel("lines", setting, "requests in the step", "ms per step", by_requests),
        "context": panel("lines", "", "tokens before them, one request", "ms per step", by_context),
    }
    return draw(panels, out)


def _series(steps: Sequence[Mapping[str, Any]], along: str, label: str) -> dict[str, dict[int, float]]:
    """Return measured and fitted times of each kind of step by the value of ``along``; without kinds of one step."""
    series: dict[str, dict[int, float]] = {}
    for step in sorted(steps, key=lambda step: step[along]):
        for words, key in (("measured", "ms"), ("curve", "curve_ms")):
            series.setdefault(label.format(**step) + words, {})[step[along]] = step[key]
    return {name: line for name, line in series.items() if len(line) > 1}


def main() -> None:
    """Draw the calibration of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", help="output of outrider doctor --calibrate --json; - for stdin")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .svg or .png")
    args = parser.parse_args()
    try:
        text = sys.stdin.read() if args.calibration == "-" else Path(args.calibration).read_text(encoding="utf-8")
        print(latency_figure(json.loads(text), args.out))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {args.calibration}: {type(error).__name__}: {error}") from None


if __name__ == "__main__":
    main()
