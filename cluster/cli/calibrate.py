"""``outrider doctor --calibrate``: measure step times, print a table and a figure, and keep the result for servers."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.cluster.cli.launch.preflight import LaunchError, check_model, with_threads
from outrider.cluster.cli.terminal import fail, fail_input, progress
from outrider.engine.child_process import child_environment, python_module

if TYPE_CHECKING:
    from outrider.configs.schema import Config
    from outrider.engine.measures.calibration import Calibration, CalibrationFile
    from outrider.engine.measures.latency import Case

_SLACK = 1.2  # the critical decoding length is the most rows whose step takes at most this many times as long as one row


def calibrate(config: Path | None, overrides: list[str], out: Path, as_json: bool) -> None:
    """Measure a model's step times and print them, with a figure in ``out``; end the command with one line on an error."""
    from outrider.configs.schema import REPOSITORY, ConfigError, load_config

    try:
        settings = load_config(config or REPOSITORY / "configs" / "local.yaml", overrides)
        check_model(settings.model.path)
    except (ConfigError, LaunchError) as error:
        fail_input(str(error))
    if out.exists() and not out.is_dir():
        fail_input(f"--out {out} is not a folder")
    if settings.parallelism.mode not in ("none", "lookahead"):
        fail_input(
            f"parallelism.mode is {settings.parallelism.mode}: its ranks time their steps when a server starts; to time one "
            "rank with the whole model, give a configuration with parallelism.mode none"
        )
    name, file = _load(settings)
    with progress() as bars:
        bar = bars.add_task(f"timing the steps of {name}", total=None)
        found = file.measure(lambda done, total: bars.update(bar, completed=done, total=total))
    kept = file.save(found)
    report = summary(name, found) | {"kept": str(file.path) if kept else None, "figure": None}
    figure = _draw(report, out / f"latency-{name}-{report['dtype']}.svg")
    report["figure"] = None if figure is None else str(figure)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    if found.disturbed:
        typer.echo("warning: the machine was busy, so that times are unreliable: calibrate again when it is quiet", err=True)


def server_threads(config: Config) -> int | None:
    """Return the torch threads of a replica on a CPU; None for torch's own default."""
    config = with_threads(config)
    if config.model.threads is not None or "OMP_NUM_THREADS" in os.environ:
        return config.model.threads
    # Ray gives a replica as many threads as CPUs reserved for it, unless the environment sets another number.
    return max(1, int(config.server.cpus_per_replica))


def summary(name: str, found: Calibration) -> dict[str, Any]:
    """Return the output of ``--json``: setting, critical decoding length, curve, and each step beside the curve's prediction."""
    curve = found.curve
    steps = [
        {
            "sequences": case.sequences,
            "rows": case.rows,
            "context": case.context,
            "ms": round(1e3 * seconds, 4),
            "curve_ms": round(1e3 * _expected(found, case), 4),
        }
        for case, seconds in sorted(found.seconds.items())
    ]
    setting = {key: value for key, value in found.setting.items() if key not in ("model", "code")}
    return {
        "model": name, **setting, "critical_rows": curve.critical_rows(_SLACK), "slack": _SLACK, "spread": round(found.spread, 3),
        "curve": curve.to_json(), "steps": steps,
    }  # fmt: skip


def _expected(found: Calibration, case: Case) -> float:
    import numpy as np

    from outrider.decoding.budget.latency import StepLoad

    load = StepLoad(case.sequences, case.sequences, case.sequences * case.context)
    return float(found.curve.seconds(np.array([float(case.sequences * case.rows)]), load)[0])


def _load(config: Config) -> tuple[str, CalibrationFile]:
    """Load the model as a server of this configuration would; return its name and the file of its latency curve."""
    from outrider.decoding.jit import cache_folder
    from outrider.engine.engine import load_runner
    from outrider.engine.errors import ModelLoadError
    from outrider.engine.measures.calibration import CalibrationFile

    model = dataclasses.replace(config.model, threads=server_threads(config))
    try:
        loaded, runner = load_runner(model, config.engine, config.speculation, 1)
    except ModelLoadError as error:
        fail(str(error))
    info = loaded.info(config.speculation.strategy, lossless=True)
    return loaded.served_name.replace("/", "-"), CalibrationFile(cache_folder(), runner, info)


def _draw(report: dict[str, Any], out: Path) -> Path | None:
    """Draw the figure in a separate process (``report.latency_figure``); print a line and return None if that fails."""
    if find_spec("matplotlib") is None or find_spec("outrider.experiments") is None:
        typer.echo("no figure: it needs the repository and matplotlib, pip install -e '.[dev]'", err=True)
        return None
    command = python_module("outrider.experiments.report.latency_figure", "-", "--out", str(out))
    done = subprocess.run(command, input=json.dumps(report), capture_output=True, text=True, env=child_environment())
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        typer.echo(f"no figure at {out}: {reason}", err=True)
        return None
    return out


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    curve, first = report["curve"], report["curve"]["rows_s"][0] * 1e3
    threads = f", {report['threads']} thread{'s' * (report['threads'] > 1)}" if report["threads"] else ""
    table = Table(title=f"{report['model']}, {report['dtype']}, {report['device']}{threads}", title_justify="left")
    for heading in ("requests", "rows of each", "tokens before", "ms", "x one row", "ms (curve)"):
        table.add_column(heading, justify="right")
    ordered = sorted(report["steps"], key=_group)
    for at, step in enumerate(ordered):
        last = at + 1 < len(ordered) and _group(step)[0] != _group(ordered[at + 1])[0]
        cells = step["sequences"], step["rows"], step["context"]
        times = f"{step['ms']:.2f}", f"{step['ms'] / first:.2f}", f"{step['curve_ms']:.2f}"
        table.add_row(*map(str, cells), *times, end_section=last)
    Console().print(table)
    rows, most, slack = report["critical_rows"], curve["rows"][-1], report["slack"]
    typer.echo(f"critical decoding length: {rows}{' or more' if rows == most else ''}")
    drafted = f"the committed token and {rows - 1} drafted"
    typer.echo(f"  Up to {rows} rows of a request, {drafted}, take at most {slack} times as long as one.")
    request_ms, entries_ms, rows_ms = 1e3 * curve["sequence_s"], 1e6 * curve["entry_s"], 1e6 * curve["row_entry_s"]
    beside = f"1,000 more tokens before it {entries_ms:.3g} ms, and {rows_ms:.3g} ms for each row"
    typer.echo(f"  A further request adds {request_ms:.3g} ms; {beside}.")
    if report["kept"]:
        typer.echo(f"kept in {report['kept']}: servers with this model, dtype and number of threads read it when they start.")
    if report["figure"]:
        typer.echo(f"figure: {report['figure']}")


def _group(step: dict[str, Any]) -> tuple[int, ...]:
    """Return the sort key of the table: rows of one request, by context, then several requests."""
    several = step["sequences"] > 1
    return 2 if several else 0, step["sequences"], step["context"], step["rows"]
