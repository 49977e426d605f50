"""Runner of benches: parses the options, measures, writes the record with its figure, and prints the tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.engine.errors import ModelLoadError
from outrider.engine.measures.energy import EnergyMeter, EnergySpan, measure_idle, open_meter
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.record import RESULTS, write_record

IDLE_S = 5.0  # duration of the idle power measurement, if there is a meter
Results = dict[str, Any]
Options = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True, slots=True)
class Run:
    """Services of the runner for one measurement."""

    progress: Progress
    meter: EnergyMeter  # of ``--device``, or of the processor


@dataclass(frozen=True, slots=True)
class Bench:
    """A measurement with its command-line options."""

    name: str  # of its record
    text: str  # description in ``--help``
    measure: Callable[[argparse.Namespace, Run], Results]  # ``ValueError``, ``ModelLoadError``, ``OSError`` exit with code 2
    options: Options = lambda parser: None
    least: Mapping[str, float] = field(default_factory=dict)  # option -> lowest valid value
    check: Callable[[argparse.Namespace, argparse.ArgumentParser], None] = lambda args, parser: None
    wrong: Callable[[Results, argparse.Namespace], Sequence[str]] = lambda results, args: ()  # faults that exit with code 1
    refuses: tuple[type[Exception], ...] = ()  # further errors that exit with code 2
    recorded: bool = True  # whether a record is written without ``--out``


def run(bench: Bench, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a bench and return the exit code: 1 for wrong results, 2 for invalid input."""
    args, started = arguments(bench, argv, prog), datetime.now(UTC)
    refuses: tuple[type[Exception], ...] = (ValueError, ModelLoadError, OSError, *bench.refuses)
    try:
        with Progress() as progress, metered(device_of(args)) as (meter, energy):
            results = bench.measure(args, Run(progress, meter))
    except refuses as error:
        return refused(error)
    if args.out is not None:
        keep(bench.name, args, results, started, energy)
    if args.json:
        print(json.dumps(results, indent=1, default=str))
    else:
        show(bench.name, results)
    wrong = bench.wrong(results, args)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


def keep(name: str, args: argparse.Namespace, results: Results, started: datetime, energy: EnergySpan) -> None:
    """Write the record of a run, and draw its figure beside it."""
    path = write_record(name, vars(args), results, getattr(args, "seed", None), started, device_of(args), args.out, energy)
    picture = ""
    if results.get("figures") and find_spec("matplotlib") is None:
        picture = ", no figure: it needs matplotlib, which the extra `dev` has"
    elif results.get("figures"):
        from outrider.experiments.bench.figure import draw

        picture = f", figure: {draw(results['figures'], path.with_suffix('.svg')).name}"
    print(f"record: {path.name}{picture}", file=sys.stderr)


def arguments(bench: Bench, argv: Sequence[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """Parse the command line of a bench; exit with code 2 if an option is invalid."""
    parser = argparse.ArgumentParser(prog=prog, description=bench.text, formatter_class=argparse.RawDescriptionHelpFormatter)
    bench.options(parser)
    out, when = (RESULTS, "") if bench.recorded else (None, "; default: nothing is written")
    parser.add_argument("--out", type=Path, default=out, help=f"folder of the record and the figure{when}")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    args = parser.parse_args(argv)
    for name, bound in bench.least.items():
        value = getattr(args, name)
        lowest = min(value) if isinstance(value, list | tuple) and value else value
        if lowest is not None and lowest != [] and lowest != () and lowest < bound:
            parser.error(f"--{name.replace('_', '-')} must be at least {bound:g}, got {lowest}")
    bench.check(args, parser)
    return args


def show(name: str, results: Results) -> None:
    """Print the tables of a run: the headline tables of its report, or all results."""
    from outrider.experiments.report.tables import headlines
    from outrider.experiments.report.values import blocks_of, print_tables

    results = json.loads(json.dumps(results, default=str))  # as a record holds them
    rest = {key: value for key, value in results.items() if key != "figures"}
    print_tables(headlines({"name": name, "results": results}) or blocks_of("", rest))


def device_of(args: argparse.Namespace) -> str:
    """Return torch's name of the device that a run computes on."""
    import torch

    device = str(getattr(args, "device", "cpu"))
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


@contextmanager
def metered(device: str) -> Iterator[tuple[EnergyMeter, EnergySpan]]:
    """Measure the idle power of a device, then yield its meter and the energy span of the block."""
    meter = open_meter([device])
    measure_idle(meter, IDLE_S)
    with meter.span() as span:
        yield meter, span


def refused(error: Exception) -> int:
    """Print why a run is impossible and return exit code 2; errors of libraries are printed with their type."""
    own = isinstance(error, ValueError | ModelLoadError | OSError | RuntimeError)
    print(f"error: {error}" if own else f"error: {type(error).__name__}: {error}", file=sys.stderr)
    return 2
