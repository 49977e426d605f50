"""What the host does around a forward, and how long it takes: schedule, propose, pack, verify, commit, observe."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.decoding.drafters.registry import parse_strategy
from outrider.decoding.request import Request
from outrider.engine.forward.batch import Batch
from outrider.experiments.bench.engines.contestants import Prompt, SharedModel, make_request
from outrider.experiments.bench.engines.phases import PHASES, PhaseClock
from outrider.experiments.bench.record import spread
from outrider.experiments.gpu_suite import models
from outrider.experiments.gpu_suite.device import shown, wait
from outrider.experiments.gpu_suite.models import STRATEGIES, engines
from outrider.experiments.gpu_suite.report import Report, Setting, UnavailableError
from outrider.experiments.gpu_suite.texts import read_texts

GOAL_MS = 0.3  # of propose, pack, verify, commit and the rest together
_SLICES = 5  # of the steps, for the spread
_RECORDS = 4


class Phases:
    """The steps of an engine by phase; ``forward`` ends when the device is done, so that none of it is in ``verify``."""

    def __init__(self, model: SharedModel, strategy: str, device: str) -> None:
        self._engine = model.engine(parse_strategy(strategy))
        self._runner, self._guide, forward = model.runner, model.guide, model.runner.forward

        def complete(batch: Batch) -> torch.Tensor:
            logits = forward(batch)
            wait(device)
            return logits

        setattr(self._runner, "forward", complete)  # noqa: B010 - mypy: a method
        self._clock = PhaseClock(self._engine)

    def close(self) -> None:
        """Takes the wrapper off what other engines share."""
        del self._runner.forward

    def run(self, prompt: Prompt, over: Callable[[], bool]) -> list[dict[str, float]]:
        """Run one request for a prompt; see ``run_requests``."""
        return self.run_requests([make_request(prompt, 0, self._guide)], over)

    def run_requests(self, requests: Sequence[Request], over: Callable[[], bool]) -> list[dict[str, float]]:
        """Return seconds of each phase, of the steps in which all requests decoded and nothing was prefilled: one at least."""
        for request in requests:
            self._engine.add(request)
        steps = list[dict[str, float]]()
        while self._engine.has_work and not (steps and over()):
            if (step := self._clock.step(len(requests))) is not None:
                steps.append({phase: step[phase] for phase in PHASES})
        for request in requests:
            if request.finish_reason is None:
                self._engine.abort(request.request_id)
        return steps


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``host``: with the preferred kind of runner that there is."""
    bench = models.bench(setting, report, kept)
    prompts = read_texts(setting, bench.loaded.vocab_size, models.SIZES[bench.size].context, report)[:_RECORDS]
    for kind in setting.kinds:
        with report.attempt(kind):
            runner = bench.runner(kind, report)
            report.found[kind] = {}
            for number, strategy in enumerate(STRATEGIES):
                ends = report.ends_left_s(number, len(STRATEGIES))
                phases = Phases(engines(bench.loaded, runner, bench.folder(kind)), strategy, setting.device)
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
        phases.run(prompts[0], lambda: report.left_s() < ends_left_s)
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
        "around_ms": spread(around, 4, 1e3),
    }
    report.found[kind][strategy] = figures
    parts = ", ".join(f"{phase} {figures['ms'][phase]:.3f}" for phase in PHASES if phase != "forward")  # type: ignore[index]
    report.say(f"{kind} {strategy}: {parts} ms")
    met = figures["around_ms"]["median"] < GOAL_MS  # type: ignore[index]
    report.line(f"{kind} {strategy}: host around a forward", *shown(figures["around_ms"], " ms", 3), f"< {GOAL_MS}", met)  # type: ignore[arg-type]
