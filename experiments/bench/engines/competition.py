"""Contestants in turns over the same prompts: times, tokens, energy, and differing outputs of each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.engine.measures.energy import EnergyMeter, EnergySpan, NoMeter
from outrider.experiments.bench.engines.contestants import Contestant, Prompt, Run
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.record import NOT_METERED


class Lap(NamedTuple):
    """One run of a prompt, or of a batch of prompts."""

    wall_s: float
    prefill_s: float
    tokens: int
    steps: int
    drafted: int  # 0 if unknown


@dataclass(slots=True)
class Tally:
    """Sums over the runs of one contestant. The lists have one value per repeat."""

    wall_s: list[float]
    prefill_s: list[float]  # to the first token
    forward_s: list[float]  # forwards after it
    propose_s: list[float] | None  # drafting after it; None if unknown
    tokens: int = 0
    steps: int = 0
    drafted: int | None = 0  # None if unknown
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    differing: dict[str, list[int]] = field(default_factory=dict)  # record id -> first output unlike the expected one
    joules: float | None = 0.0  # of all repeats, idle power included; None if not metered
    net_joules: float | None = 0.0  # without idle power
    laps: list[Lap] = field(default_factory=list)  # in order

    @classmethod
    def empty(cls, repeats: int) -> Tally:
        """Return a tally of no runs."""
        return cls([0.0] * repeats, [0.0] * repeats, [0.0] * repeats, [0.0] * repeats)

    def add(self, repeat: int, run: Run, wall_s: float) -> None:
        """Add a run of a repeat."""
        self.wall_s[repeat] += wall_s
        self.prefill_s[repeat] += run.prefill_s
        self.forward_s[repeat] += run.forward_s
        if run.propose_s is None or self.propose_s is None:
            self.propose_s = None
        else:
            self.propose_s[repeat] += run.propose_s
        self.drafted = None if run.drafted is None or self.drafted is None else self.drafted + run.drafted
        tokens = sum(map(len, run.outputs))
        self.laps.append(Lap(wall_s, run.prefill_s, tokens, run.steps, run.drafted or 0))
        self.steps += run.steps
        self.tokens += tokens
        self.accepted_by_source.update(run.accepted_by_source)

    def book(self, span: EnergySpan) -> None:
        """Add the energy of a run. Rounding of the counter cancels out over many short spans."""
        idle_j = None if span.idle_w is None else span.idle_w * span.seconds
        self.joules = None if self.joules is None or span.joules is None else self.joules + span.joules
        # ``span.net_joules`` is never negative, which would bias a sum of short spans.
        if self.net_joules is None or span.joules is None or idle_j is None:
            self.net_joules = None
        else:
            self.net_joules += span.joules - idle_j


def joules_per_token(tallies: Sequence[Tally]) -> dict[str, float | str]:
    """Return joules per emitted token of one contestant, with and without idle power; ``n/a`` if a run was not metered."""
    tokens = max(1, sum(tally.tokens for tally in tallies))

    def figure(joules: Sequence[float | None]) -> float | str:
        known = [one for one in joules if one is not None]
        return round(sum(known) / tokens, 4) if len(known) == len(joules) else NOT_METERED

    whole, net = [tally.joules for tally in tallies], [tally.net_joules for tally in tallies]
    return {"j_per_token": figure(whole), "net_j_per_token": figure(net)}


def compete(
    contestants: Sequence[Contestant],
    prompts: Sequence[Prompt],
    repeats: int,
    batch_size: int,
    progress: Progress,
    expected: Mapping[str, list[int]] | None = None,
    meter: EnergyMeter | None = None,
) -> tuple[Mapping[str, list[int]], dict[str, Tally]]:
    """Run all contestants in turns on each batch of prompts; return the expected outputs and a tally per contestant.

    Turns make a drift of the machine hit all alike; the first batch is run once more before, untimed, to warm up. Each repeat
    begins with contestants without history, since a drafter that has seen an output must not draft the same output from it.
    ``expected`` maps prompt ids to outputs; by default those of the first contestant, on each prompt alone.
    """
    meter = NoMeter() if meter is None else meter
    groups = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    if expected is None:
        progress.say(f"{contestants[0].name} on {len(prompts)} prompts alone: the expected outputs")
        expected = {prompt.id: contestants[0].run([prompt]).outputs[0] for prompt in prompts}
    tallies = {contestant.name: Tally.empty(repeats) for contestant in contestants}
    for contestant in contestants:
        contestant.run(groups[0])
    for repeat in range(repeats):
        for contestant in contestants:
            contestant.renew()
        for number, group in enumerate(groups):
            for contestant in contestants:
                progress.note(f"repeat {repeat + 1} of {repeats}, turn {number + 1} of {len(groups)}: {contestant.name}")
                tally, started = tallies[contestant.name], time.perf_counter()
                with meter.span() as span:
                    run = contestant.run(group)
                waited_s = time.perf_counter() - started
                tally.add(repeat, run, waited_s if run.wall_s is None else run.wall_s)
                tally.book(span)
                for prompt, output in zip(group, run.outputs, strict=True):
                    if output != expected[prompt.id]:
                        tally.differing.setdefault(prompt.id, output)
    return expected, tallies


def summary(tally: Tally, num_prompts: int) -> dict[str, Any]:
    """Return speed, tokens per step and number of expected outputs of one contestant."""
    return {
        "wall_s": [round(seconds, 3) for seconds in tally.wall_s],
        "tokens_per_s": round(tally.tokens / sum(tally.wall_s), 1),
        "tokens_per_step": round(tally.tokens / tally.steps, 3),
        "identical": num_prompts - len(tally.differing),
    }


def decode_ratios(tally: Tally, baseline: Tally) -> list[float]:
    """Return the baseline's seconds after the first token over the contestant's, for each repeat."""
    base = zip(baseline.wall_s, baseline.prefill_s, strict=True)
    own = zip(tally.wall_s, tally.prefill_s, strict=True)
    return [(b_wall - b_first) / (wall - first) for (b_wall, b_first), (wall, first) in zip(base, own, strict=True)]


def where_time_goes(tally: Tally, prefills: int) -> dict[str, float | None]:
    """Return milliseconds of ``propose``, ``forward`` and ``rest`` per decoding step, and of ``prefill`` per prompt.

    The prompts, ``prefills`` over all repeats, must have run one at a time. An unknown ``propose`` is None and part of the rest.
    """
    steps = max(tally.steps - prefills, 1)
    propose_s = None if tally.propose_s is None else sum(tally.propose_s)
    rest_s = sum(tally.wall_s) - sum(tally.prefill_s) - sum(tally.forward_s) - (propose_s or 0.0)
    return {
        "propose": None if propose_s is None else round(1e3 * propose_s / steps, 3),
        "forward": round(1e3 * sum(tally.forward_s) / steps, 3),
        "rest": round(1e3 * rest_s / steps, 3),
        "prefill": round(1e3 * sum(tally.prefill_s) / prefills, 3),
    }
