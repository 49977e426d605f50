"""Runs of a paper's races in a growing file, with which an interrupted command continues, and a limit in hours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.engine.measures.energy import EnergyMeter, NoMeter
from outrider.experiments.bench.engines.contestants import EngineContestant, Prompt, Run
from outrider.experiments.bench.record import Kept

Entry = tuple[Run, float | None]  # a run and its joules, None without a counter


class OutOfTimeError(Exception):
    """The hours of a command are over."""


class KeptRuns:
    """All runs of a command by race, strategy, repeat and prompts, including those of an interrupted one."""

    def __init__(
        self, path: Path | None = None, setting: Any = None, hours: float | None = None, meter: EnergyMeter | None = None
    ) -> None:
        """Read the runs of a file.

        Args:
            path: file; None for none.
            setting: of the command, as JSON.
            hours: after which no run begins; None for no limit.
            meter: of the device.

        Raises:
            ValueError: the file has another setting or revision.
        """
        self.path, self.meter = path, meter or NoMeter()
        self._kept = None if path is None else Kept(path, setting, lambda line: tuple(line["key"]))
        self._entries: dict[tuple[str, ...], Entry] = {
            tuple(line["key"]): (Run(**line["run"]), line["joules"]) for line in (self._kept.found if self._kept else ())
        }
        self._began, self._hours = time.perf_counter(), hours
        self.measured = 0

    def of(self, key: tuple[str, ...]) -> Entry | None:
        """Return a kept run."""
        return self._entries.get(key)

    def put(self, key: tuple[str, ...], entry: Entry) -> None:
        """Keep a run."""
        self._entries[key] = entry
        if self._kept is not None:
            run, joules = entry
            plain = replace(run, accepted_by_source=dict(run.accepted_by_source))  # asdict makes no counter
            self._kept.add({"key": key, "run": asdict(plain), "joules": joules})

    def check_time(self) -> None:
        """Raise ``OutOfTimeError`` if the hours are over."""
        if self._hours is not None and time.perf_counter() - self._began > 3600 * self._hours:
            raise OutOfTimeError(f"{self._hours:g} hours are over after {self.measured} runs")

    def end(self) -> None:
        """Delete the file after a complete command."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class KeptContestant:
    """Contestant that computes only the runs that are not kept.

    A drafter with a memory runs the kept prompts of its repeat again before it continues.
    """

    def __init__(self, race: str, inner: EngineContestant, runs: KeptRuns) -> None:
        self.name = inner.name
        self.outputs: dict[tuple[int, str], list[int]] = {}  # (repeat, id of the prompt); the first repeat is 1
        self.energy: dict[str, tuple[float, float]] = {}  # first prompt of a group -> joules and tokens of all repeats
        self._race, self._inner, self._runs = race, inner, runs
        self._repeat, self._is_cold = 0, True
        self._untaught: list[Sequence[Prompt]] = []

    def renew(self) -> None:
        """See ``Contestant``."""
        self._repeat += 1
        self._untaught.clear()
        self._inner.renew()

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """See ``Contestant``. Runs before the first repeat are not counted.

        Raises:
            OutOfTimeError: the hours are over.
        """
        key = (self._race, self.name, str(self._repeat), *(prompt.id for prompt in prompts))
        entry = self._runs.of(key)
        if entry is None:
            entry = self._new(prompts)
            self._runs.put(key, entry)
        else:
            self._untaught.append(prompts)
        run, joules = entry
        self._runs.measured += self._repeat > 0
        if self._repeat and joules is not None:
            before = self.energy.get(prompts[0].id, (0.0, 0.0))
            self.energy[prompts[0].id] = (before[0] + joules, before[1] + sum(map(len, run.outputs)))
        self.outputs |= {(self._repeat, prompt.id): output for prompt, output in zip(prompts, run.outputs, strict=True)}
        return run

    def _new(self, prompts: Sequence[Prompt]) -> Entry:
        self._runs.check_time()
        if self._repeat and self._is_cold:
            self._inner.run(prompts)
            self._inner.renew()
        if self._untaught and self._inner.engine.histories is not None:
            for group in self._untaught:
                self._inner.run(group)
        self._untaught.clear()
        with self._runs.meter.span() as span:
            started = time.perf_counter()
            found = self._inner.run(prompts)
            wall_s = time.perf_counter() - started
        self._is_cold = False
        return replace(found, wall_s=wall_s), span.joules
