"""The parts of the GPU suite, and the order in which a run makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.experiments.gpu_suite.report import Job


@dataclass(frozen=True, slots=True)
class Part:
    """What can be asked for, and the time that it is given: parts repeat what they measure until it is over."""

    function: str
    estimate_s: float
    models: bool = True  # it needs one of the sizes
    later_s: float | None = None  # for each size behind the first; None where it runs for the first alone
    stage: int = 0  # the sizes behind the first come between stages 0 and 1


# In the order in which they run. Those of stage 0, and all sizes, fit into a first call of eight minutes.
PARTS: dict[str, Part] = {
    "smoke": Part("smoke:measure", 60.0, models=False),
    "tests": Part("tests:measure", 75.0, models=False),
    "ceilings": Part("ceilings:measure", 10.0, models=False),
    "steps": Part("steps:measure", 40.0, later_s=15.0),
    "prefill": Part("prefill:measure", 25.0, later_s=10.0),
    "batches": Part("batches:measure", 60.0, later_s=15.0),
    "strict": Part("exactness:measure", 20.0),
    "real": Part("real:measure", 25.0, models=False),
    "ranks": Part("ranks:measure", 25.0, models=False),
    "end_to_end": Part("end_to_end:measure", 45.0, stage=1),
    "host": Part("host:measure", 20.0, stage=1),
    "quantized": Part("quantized:measure", 40.0, stage=1),
    "profile": Part("profile:measure", 25.0, stage=1),
}
SIZES = ("8b", "7b", "1b", "13b", "tiny")  # keys of ``models.SIZES``, which only workers import
KINDS = ("strict", "rounding", "eager", "compiled")
USUAL_KINDS = KINDS[:2]  # the default form, and what it costs
_TINY_S = 8.0  # of every part of a tiny model
_WHOLE = ("smoke", "tests", "ranks")  # parts that take their time with a tiny model, too


def plan(parts: Sequence[str], sizes: Sequence[str]) -> list[Job]:
    """Return the jobs of a run, those of most worth first."""
    first, later, last = list[Job](), list[Job](), list[Job]()
    for number, size in enumerate(sizes):
        for name in parts:
            part = PARTS[name]
            estimate_s = part.estimate_s if number == 0 else part.later_s
            if estimate_s is None:
                continue
            if size == "tiny" and name not in _WHOLE:
                estimate_s = min(estimate_s, _TINY_S)
            job = Job(name, size if part.models else None, f"outrider.experiments.gpu_suite.parts.{part.function}", estimate_s)
            (later if number else last if part.stage else first).append(job)
    return [*first, *later, *last]
