"""Phases of an engine step by the clock: the model's forward, and the work around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from outrider.engine.engine import Engine
from outrider.engine.executor import LocalExecutor
from outrider.engine.forward.batch import ScheduledRequest

PHASES = ("schedule", "propose", "pack", "forward", "verify", "commit", "observe")


class PhaseClock:
    """Timer of the phases of one engine's steps.

    Example: ``execute`` runs from 10 to 20 ms and the forward in it from 11 to 18: 1 ms packed, 7 ms forward, 2 ms verified.
    """

    def __init__(self, engine: Engine) -> None:
        """Wrap methods of an engine of this process, whose steps ``step`` then makes."""
        self._engine, executor = engine, engine._executor
        assert isinstance(executor, LocalExecutor), executor
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self._works: Sequence[ScheduledRequest] = ()  # of the step
        for name, piece, method in (
            ("schedule", engine._scheduler, "schedule"),
            ("execute", executor, "execute"),
            ("forward", executor.runner, "forward"),
            ("observe", engine._drafter, "observe"),
        ):
            setattr(piece, method, self._timed(name, getattr(piece, method)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if name == "execute":
                self._works = args[0]
            started = time.perf_counter()
            result = method(*args, **kwargs)
            self._spans.setdefault(name, []).append((started, time.perf_counter()))
            return result

        return timed

    def step(self, batch: int) -> dict[str, float] | None:
        """Make a step; return seconds per phase, drafted rows and emitted tokens, or None if not all requests decoded."""
        self._spans.clear()
        self._works = []  # set by ``execute``
        started = time.perf_counter()
        outputs = self._engine.step()
        ended = time.perf_counter()
        works: Sequence[ScheduledRequest] = self._works
        if len(works) != batch or any(work.tree is None or work.end - work.start != 1 for work in works):
            return None
        (execute,), (forward,), (schedule,) = (self._spans[name] for name in ("execute", "forward", "schedule"))
        observe = sum(end - start for start, end in self._spans.get("observe", ()))
        return {
            "schedule": schedule[1] - schedule[0],
            "propose": execute[0] - started - (schedule[1] - schedule[0]),
            "pack": forward[0] - execute[0],
            "forward": forward[1] - forward[0],
            "verify": execute[1] - forward[1],
            "commit": ended - execute[1] - observe,
            "observe": observe,
            "drafted": sum(len(work.tree) - 1 for work in works if work.tree is not None),
            "emitted": sum(len(output.token_ids) for output in outputs),
        }
