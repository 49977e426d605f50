"""The runs of a paper's tables in a file that grows, so that what is cut off goes on, and ends in time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments.bench.engines.contestants import EngineContestant, Prompt, Run
from experiments.bench.record import Kept


class OutOfTimeError(Exception):
    """The hours of a command are over. What is done is kept."""


class KeptRuns:
    """Every run of a command, by race, strategy, repeat and prompts; those of an earlier command that was cut off, too."""

    def __init__(self, path: Path | None = None, setting: Any = None, hours: float | None = None, planned: int = 0) -> None:
        """
        Args:
            path: of the file; nothing is kept when None.
            setting: of the run, as JSON: a file of another is refused.
            hours: after which no run begins; no bound when None.
            planned: runs that are measured in all, as far as it is known.

        Raises:
            ValueError: the file is of another setting or revision.
        """
        self.path = path
        self._kept = None if path is None else Kept(path, setting, lambda line: tuple(line["key"]))
        self._runs = {tuple(line["key"]): line["run"] for line in (self._kept.found if self._kept else ())}
        self._began = time.perf_counter()
        self._hours, self.planned = hours, planned
        self.measured = self._now = 0  # runs, in all and those of this command

    def of(self, key: tuple[str, ...]) -> Run | None:
        """A run that is kept."""
        found = self._runs.get(key)
        return None if found is None else Run(**found)

    def put(self, key: tuple[str, ...], run: Run) -> None:
        """Keeps a run."""
        self._runs[key] = asdict(replace(run, accepted_by_source=dict(run.accepted_by_source)))  # asdict makes no counter
        if self._kept is not None:
            self._kept.add({"key": key, "run": self._runs[key]})

    def count(self, new: bool) -> None:
        """One more of the planned runs is there."""
        self.measured += 1
        self._now += new

    def check_time(self) -> None:
        """Raises ``OutOfTimeError`` where the hours are over."""
        if self._hours is not None and time.perf_counter() - self._began > 3600 * self._hours:
            raise OutOfTimeError(f"{self._hours:g} hours are over after {self.measured} of {self.planned} runs")

    def left(self) -> str:
        """How far it is and for how long it will run, for a line of progress: from what the runs of this command took."""
        if not self._now or self.planned <= self.measured:
            return ""
        spent = time.perf_counter() - self._began
        rest = spent / self._now * (self.planned - self.measured)
        if self._hours is not None:
            rest = min(rest, max(0.0, 3600 * self._hours - spent))
        return f" (run {self.measured + 1} of {self.planned}, {rest / 60:.0f} min left)"

    def end(self) -> None:
        """All is measured: the file has done its work."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class KeptContestant:
    """Runs what is not kept yet.

    A drafter that remembers outputs (``Engine.memory``) is taught those of its repeat again, by running them, before it goes on.
    """

    def __init__(self, race: str, inner: EngineContestant, runs: KeptRuns) -> None:
        """
        Args:
            race: a name of its own within a command.
            inner: what runs.
            runs: of the command.
        """
        self.name = inner.name
        self.outputs: dict[tuple[int, str], list[int]] = {}  # (repeat, id of the prompt), the first repeat is 1
        self._race, self._inner, self._runs = race, inner, runs
        self._repeat, self._is_cold = 0, True
        self._untaught: list[Sequence[Prompt]] = []

    def renew(self) -> None:
        """See ``Contestant``."""
        self._repeat += 1
        self._untaught.clear()
        self._inner.renew()

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """See ``Contestant``. What runs before the first repeat is not counted.

        Raises:
            OutOfTimeError: the hours are over.
        """
        key = (self._race, self.name, str(self._repeat), *(prompt.id for prompt in prompts))
        run = self._runs.of(key)
        if self._repeat:
            self._runs.count(run is None)
        if run is None:
            run = self._new(prompts)
            self._runs.put(key, run)
        else:
            self._untaught.append(prompts)
        self.outputs |= {(self._repeat, prompt.id): output for prompt, output in zip(prompts, run.outputs, strict=True)}
        return run

    def _new(self, prompts: Sequence[Prompt]) -> Run:
        self._runs.check_time()
        if self._repeat and self._is_cold:
            self._inner.run(prompts)
            self._inner.renew()
        if self._untaught and self._inner.engine.memory is not None:
            for group in self._untaught:
                self._inner.run(group)
        self._untaught.clear()
        started = time.perf_counter()
        found = self._inner.run(prompts)
        self._is_cold = False
        return replace(found, wall_s=time.perf_counter() - started)
