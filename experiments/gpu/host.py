"""What the host does around a forward, and how long it takes: schedule, propose, pack, verify, commit, observe."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine import executor as executor_module
from engine.engine import Engine
from engine.forward.batch import Work
from engine.scheduling.scheduler import Scheduler
from experiments.contestants import Prompt, make_request
from experiments.gpu import models
from experiments.gpu.clock import shown, spread, wait
from experiments.gpu.report import Report, Setting, UnavailableError
from experiments.gpu.texts import read_texts
from experiments.gpu.traces import STRATEGIES, Engines, TraceExecutor

GOAL_MS = 0.3  # of propose, pack, verify, commit and the rest together
PHASES = ("schedule", "propose", "pack", "forward", "verify", "commit", "observe")
_SLICES = 5  # of the steps, for the spread
_RECORDS = 4


class Phases:
    """Splits the steps of an engine into phases; ``forward`` ends when the device is done, so that none of it is in ``verify``.

    ``verify`` has the argmax, its way to the host, the walk and the KV of accepted rows. Methods are wrapped from outside.
    """

    def __init__(self, engines: Engines, strategy: str, device: str) -> None:
        drafter, self._spans = engines.drafter(strategy), dict[str, tuple[float, float]]()
        self._engine: Engine = engines.engine(strategy, drafter)
        scheduler: Scheduler = self._engine._scheduler
        self._works: Sequence[Work] = ()
        self._runner, forward = engines.runner, engines.runner.forward

        def complete(batch: Any) -> Any:
            logits = forward(batch)
            wait(device)
            return logits

        setattr(self._runner, "forward", self._timed("forward", complete))  # noqa: B010 - mypy: a method
        setattr(scheduler, "schedule", self._timed("schedule", scheduler.schedule))  # noqa: B010
        setattr(drafter, "observe", self._timed("observe", drafter.observe))  # noqa: B010
        self._executor: TraceExecutor = engines.executor  # type: ignore[assignment]
        setattr(self._executor, "execute", self._timed("execute", self._executor.execute))  # noqa: B010
        self._pack, executor_module.pack = executor_module.pack, self._timed("pack", executor_module.pack)

    def close(self) -> None:
        """Takes the wrappers off what other engines share."""
        del self._runner.forward, self._executor.execute
        executor_module.pack = self._pack

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if name == "execute":
                self._works = args[0]
            began = time.perf_counter()
            result = method(*args, **kwargs)
            self._spans[name] = began, time.perf_counter()
            return result

        return timed

    def run(self, prompt: Prompt, over: Callable[[], bool]) -> list[dict[str, float]]:
        """Seconds of each phase, of the steps in which nothing was prefilled."""
        self._engine.add(make_request(prompt, 0, self._executor))
        steps = []
        while self._engine.has_work and not over():
            self._spans.clear()
            began = time.perf_counter()
            self._engine.step()
            ended = time.perf_counter()
            if all(work.tree is not None and work.end - work.start == 1 for work in self._works):
                steps.append(self._split(began, ended))
        if self._engine.has_work:
            self._engine.abort(prompt.id)
        return steps

    def _split(self, began: float, ended: float) -> dict[str, float]:
        (execute_at, executed), (pack_at, packed) = self._spans["execute"], self._spans["pack"]
        (forward_at, forwarded), (schedule_at, scheduled) = self._spans["forward"], self._spans["schedule"]
        observe_at, observed = self._spans.get("observe", (0.0, 0.0))
        return {
            "schedule": scheduled - schedule_at,
            "propose": execute_at - began - (scheduled - schedule_at),
            "pack": packed - pack_at,
            "forward": forwarded - forward_at,
            "verify": executed - execute_at - (packed - pack_at) - (forwarded - forward_at),
            "commit": ended - executed - (observed - observe_at),
            "observe": observed - observe_at,
        }


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``host``: with the preferred kind of runner that there is."""
    assert report.job.size is not None, report.job
    bench = models.bench(report.job.size, setting, report, kept)
    prompts = read_texts(setting, bench.loaded.vocab_size, models.SIZES[bench.size].context, report)[:_RECORDS]
    for kind in setting.kinds:
        with report.attempt(kind):
            runner = bench.runner(kind, report)
            report.found[kind] = {}
            for number, strategy in enumerate(STRATEGIES):
                share_s = report.left_s() / (len(STRATEGIES) - number)
                ends = report.left_s() - share_s
                phases = Phases(Engines(bench.loaded, runner, bench.folder(kind)), strategy, setting.device)
                steps = _steps(phases, prompts, report, ends)
                if steps:
                    _tell(report, kind, strategy, steps)
                else:
                    report.line(f"{kind} {strategy}: host around a forward", "n/a: no time was left")
            return  # one kind
    raise UnavailableError("no kind of runner could be built")


def _steps(phases: Phases, prompts: Sequence[Prompt], report: Report, ends_left_s: float) -> list[dict[str, float]]:
    """The steps of all prompts but the first, which warms up, until so many seconds of the part are left."""
    steps: list[dict[str, float]] = []
    try:
        phases.run(prompts[0], lambda: False)
        for prompt in prompts[1:] or prompts:
            steps += phases.run(prompt, lambda: report.left_s() < ends_left_s)
    finally:
        phases.close()
    return steps


def _tell(report: Report, kind: str, strategy: str, steps: Sequence[dict[str, float]]) -> None:
    """Medians of the phases, and the spread of the whole over slices of the steps."""
    size = max(1, -(-len(steps) // _SLICES))
    slices = [steps[start : start + size] for start in range(0, len(steps), size)]
    around = [statistics.median(sum(step.values()) - step["forward"] for step in part) for part in slices]
    figures = {
        "steps": len(steps),
        "ms": {phase: round(1e3 * statistics.median(step[phase] for step in steps), 4) for phase in PHASES},
        "around_ms": spread(around, 1e3),
    }
    report.found[kind][strategy] = figures
    parts = ", ".join(f"{phase} {figures['ms'][phase]:.3f}" for phase in PHASES if phase != "forward")  # type: ignore[index]
    report.say(f"{kind} {strategy}: {parts} ms")
    met = figures["around_ms"]["median"] < GOAL_MS  # type: ignore[index]
    report.line(f"{kind} {strategy}: host around a forward", *shown(figures["around_ms"], " ms", 3), f"< {GOAL_MS}", met)  # type: ignore[arg-type]
