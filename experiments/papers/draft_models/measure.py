"""The turns of ``outrider bench draft-models``, and what they say of each method."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.measures.energy import COARSE_S, EnergyMeter
from experiments.bench import run as bench
from experiments.bench.engines.competition import Tally, joules_per_token
from experiments.bench.engines.contestants import Prompt
from experiments.papers.draft_models.methods import BASELINE, Method, Runner, Setting
from experiments.papers.draft_models.quality import output_nats, perplexity, until_end


@dataclass(slots=True)
class Lap:
    """One method in one repeat."""

    tally: Tally = field(default_factory=lambda: Tally.empty(1))
    outputs: dict[str, list[int]] = field(default_factory=dict)  # by id of the prompt
    spans_s: list[float] = field(default_factory=list)  # of which energy was read


Laps = dict[str, list[Lap]]  # by label, one for each repeat


def take_turns(runners: Sequence[Runner], prompts: Sequence[Prompt], args: argparse.Namespace, run: bench.Run) -> Laps:
    """Runs all methods over all prompts, ``--turn`` prompts at a time.

    Each of ``--repeats`` has other seeds, from ``--seed`` on, and methods that know no earlier prompt.
    """
    for runner in runners:
        runner.warm_up(prompts[0])
    laps: Laps = {runner.method.label: [] for runner in runners}
    groups = [prompts[start : start + args.turn] for start in range(0, len(prompts), args.turn)]
    for repeat in range(args.repeats):
        now = [runner for runner in runners if runner.repeats is None or repeat < runner.repeats]
        for runner in now:
            runner.renew()
            laps[runner.method.label].append(Lap())
        for number, group in enumerate(groups):
            first = args.seed + repeat * len(prompts) + number * args.turn
            for runner in now:
                run.progress.note(f"repeat {repeat + 1}, turn {number + 1} of {len(groups)}: {runner.method.label}")
                _take_turn(runner, group, first, laps[runner.method.label][-1], run.meter)
    return laps


def _take_turn(runner: Runner, group: Sequence[Prompt], seed: int, lap: Lap, meter: EnergyMeter) -> None:
    with meter.span() as span:
        runs = [runner.run(prompt, seed + at) for at, prompt in enumerate(group)]
    for number, (prompt, run) in enumerate(zip(group, runs, strict=True)):
        lap.tally.add(0, run, 0.0 if number else span.seconds)
        lap.outputs[prompt.id] = run.outputs[0]
    lap.tally.book(span)
    lap.spans_s.append(span.seconds)


def rows_of(setting: Setting, methods: Sequence[Method], laps: Laps) -> dict[str, Any]:
    """The figures of each method by its label. Ratios are to ``sampled`` in the same repeat."""
    quality = Quality(setting)
    return {method.label: _row(method, laps, quality) for method in methods}


class Quality:
    """Perplexities of outputs. Methods and repeats that say the same are computed once."""

    def __init__(self, setting: Setting) -> None:
        self._runner, self._ends = setting.shared.runner, setting.loaded.eos_token_ids
        self._prompts = {prompt.id: prompt.ids for prompt in setting.prompts}
        self._known: dict[tuple[str, tuple[int, ...]], npt.NDArray[np.float64]] = {}

    def of(self, outputs: Mapping[str, Sequence[int]]) -> float:
        """Perplexity of outputs by the id of their prompts."""
        return perplexity(self._nats(key, until_end(output, self._ends)) for key, output in outputs.items())

    def _nats(self, key: str, output: list[int]) -> npt.NDArray[np.float64]:
        found = self._known.get((key, tuple(output)))
        if found is None:
            found = self._known[key, tuple(output)] = output_nats(self._runner, self._prompts[key], output)
        return found


def _row(method: Method, laps: Laps, quality: Quality) -> dict[str, Any]:
    own, base = laps[method.label], laps[BASELINE]
    speed = [lap.tally.tokens / lap.tally.wall_s[0] for lap in own]
    decode = [_decode_speed(lap) for lap in own]
    tokens, steps = sum(lap.tally.tokens for lap in own), sum(lap.tally.steps for lap in own)
    drafted = sum(lap.tally.drafted or 0 for lap in own)
    accepted = sum(count for lap in own for count in lap.tally.accepted_by_source.values())
    ratios = [mine * lap.tally.wall_s[0] / lap.tally.tokens for mine, lap in zip(speed, base, strict=False)]
    decode_ratios = [_ratio(mine, _decode_speed(lap)) for mine, lap in zip(decode, base, strict=False)]
    energies = [joules_per_token([lap.tally]) for lap in own]
    return {
        "strategy": method.choice.label,
        "lossless": method.lossless,
        "tokens": tokens,
        "tokens_per_s": _rounded(speed, 2),
        "decode_tokens_per_s": _rounded(decode, 2),
        "speedup": _rounded(ratios, 3),
        "decode_speedup": _rounded(decode_ratios, 3),
        "tokens_per_step": round(tokens / steps, 3),
        "drafted_per_step": round(drafted / steps, 3),
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "ms": _where(own, steps),
        "energy": {name: [energy[name] for energy in energies] for name in energies[0]},
        "energy_coarse": statistics.fmean(span for lap in own for span in lap.spans_s) < COARSE_S,
        "perplexity": _rounded([quality.of(lap.outputs) for lap in own], 4),
        "identical": _identical(method, laps),
    }


def _decode_speed(lap: Lap) -> float | None:
    """Tokens after the first one of each prompt, by second; None where there are none."""
    count, seconds = lap.tally.tokens - len(lap.outputs), lap.tally.wall_s[0] - lap.tally.prefill_s[0]
    return count / seconds if count > 0 and seconds > 0 else None


def _ratio(mine: float | None, base: float | None) -> float | None:
    return None if mine is None or base is None else mine / base


def _where(own: Sequence[Lap], steps: int) -> dict[str, float]:
    """Milliseconds of a decoding step: drafting (the draft model's forwards are in it), the target's forward, and the rest."""
    prefills = sum(len(lap.outputs) for lap in own)
    draft = sum(sum(lap.tally.propose_s or (0.0,)) for lap in own)
    target, prefill = (sum(sum(getattr(lap.tally, name)) for lap in own) for name in ("forward_s", "prefill_s"))
    rest = sum(sum(lap.tally.wall_s) for lap in own) - draft - target - prefill
    each = max(steps - prefills, 1)
    split = {"draft": draft / each, "target": target / each, "rest": rest / each, "prefill": prefill / prefills}
    return {name: round(1e3 * seconds, 3) for name, seconds in split.items()}


def _identical(method: Method, laps: Laps) -> dict[str, int] | None:
    """How many outputs are those of plain decoding, where they must be; the first that is not is no reason to stop the run."""
    plain = method.must_equal()
    if plain is None or plain not in laps:
        return None
    pairs = [
        (output, reference.outputs[key])
        for lap, reference in zip(laps[method.label], laps[plain], strict=False)
        for key, output in lap.outputs.items()
    ]
    return {"same": sum(output == expected for output, expected in pairs), "of": len(pairs)}


def _rounded(values: Sequence[float | None], digits: int) -> list[float | None]:
    return [None if value is None else round(value, digits) for value in values]
