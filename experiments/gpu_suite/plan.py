"""The parts of the GPU suite, and the order in which a run makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.gpu_suite.report import Job


@dataclass(frozen=True, slots=True)
class Part:
    """What can be asked for, and the time that it is given: parts repeat what they measure until it is over."""

    function: str
    models: str  # none, first or each: for which of the sizes it runs
    estimate_s: float


PARTS: dict[str, Part] = {
    "ceilings": Part("ceilings:measure", "none", 20.0),
    "tests": Part("tests:measure", "none", 150.0),
    "steps": Part("steps:measure", "each", 60.0),
    "end_to_end": Part("end_to_end:measure", "each", 60.0),
    "strict": Part("exactness:measure", "first", 30.0),
    "host": Part("host:measure", "first", 20.0),
    "energy": Part("energy:measure", "first", 35.0),
    "shares": Part("shares:measure", "first", 20.0),
    "profile": Part("profile:measure", "first", 25.0),
    "quantized": Part("quantized:measure", "first", 40.0),
}
SIZES = ("8b", "7b", "1b", "13b", "tiny")  # keys of ``models.SIZES``, which only workers import
KINDS = ("graphs", "strict", "eager", "compiled")
USUAL_KINDS = KINDS[:3]  # compiling takes a minute that the others would lack
_LATER = 0.7  # of a part's time, for the sizes behind the first
_TINY_S = 8.0  # of every part of a tiny model


def plan(parts: Sequence[str], sizes: Sequence[str]) -> list[Job]:
    """The jobs of a run, those of most worth first: all parts for the first size, then those for every size."""
    jobs = []
    for number, size in enumerate(sizes):
        for name in parts:
            part = PARTS[name]
            if number and part.models != "each":
                continue
            estimate_s = part.estimate_s * (_LATER if number else 1.0)
            if size == "tiny":
                estimate_s = min(estimate_s, 90.0 if name == "tests" else _TINY_S)
            jobs.append(
                Job(name, None if part.models == "none" else size, f"experiments.gpu_suite.parts.{part.function}", estimate_s)
            )
    return jobs
