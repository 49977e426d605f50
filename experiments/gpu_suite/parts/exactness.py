"""Whether drafts change an output: engines against plain decoding in the same kind of runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.decoding.request import PLAIN
from outrider.experiments.bench.engines.contestants import Prompt, SharedModel
from outrider.experiments.gpu_suite import models
from outrider.experiments.gpu_suite.models import STRATEGIES
from outrider.experiments.gpu_suite.report import Report, Setting
from outrider.experiments.gpu_suite.texts import read_texts

_PROMPT, _OUTPUT = 1024, 64  # tokens: of the end of each prompt, and of an output
_WRONG_SHARE = 0.1  # tokens of a reference that are others than the output's: drafts are refused in places


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``strict``: outputs that are identical to plain decoding's, and the first token where others part."""
    bench = models.bench(setting, report, kept)
    size = models.SIZES[bench.size]
    prompts = read_texts(setting, bench.loaded.vocab_size, size.context, report)
    count = min(_OUTPUT, size.context // 4)
    for number, kind in enumerate(setting.kinds):
        with report.attempt(kind):
            ends = report.ends_left_s(number, len(setting.kinds))
            runner = bench.runner(kind, report)
            engines = models.engines(bench.loaded, runner, bench.folder(kind), guided=False)
            report.found[kind] = _compare(engines, prompts, count, report, ends, setting.seed)
            for name, row in report.found[kind].items():
                met = row["identical"] == row["outputs"] if kind == "strict" else None
                what = f"{kind} {name}: {row['tokens_per_step']:.2f} tok/step"
                report.line(
                    what, f"{row['identical']} of {row['outputs']} identical", goal="all" if kind == "strict" else "", met=met
                )


def _compare(
    engines: SharedModel, prompts: Sequence[Prompt], count: int, report: Report, ends_left_s: float, seed: int
) -> dict[str, Any]:
    """Plain decoding twice, then each strategy with a reference that is nearly the output, while there is time."""
    contestants = models.contestants(engines, count)
    found: dict[str, dict[str, Any]] = {
        name: {"outputs": 0, "identical": 0, "tokens": 0, "steps": 0, "parted_at": []} for name in STRATEGIES
    }
    draw = np.random.default_rng(seed)
    for number, prompt in enumerate(prompts):
        if number and report.left_s() < ends_left_s:
            break
        cut = prompt.ids[-_PROMPT:]
        plain = contestants[PLAIN].run([Prompt(f"{prompt.id}/plain", cut, [])]).outputs[0]
        reference = np.array(plain)
        wrong = draw.random(len(plain)) < _WRONG_SHARE
        reference[wrong] = draw.integers(0, engines.loaded.vocab_size, int(wrong.sum()))
        for name, contestant in contestants.items():
            run = contestant.run([Prompt(f"{prompt.id}/{name}", cut, [reference.tolist()])])
            row = found[name]
            row["outputs"] += 1
            row["tokens"] += len(run.outputs[0])
            row["steps"] += run.steps
            if run.outputs[0] == plain:
                row["identical"] += 1
            else:
                pairs = enumerate(zip(plain, run.outputs[0], strict=False))
                row["parted_at"].append(next((at for at, (one, other) in pairs if one != other), len(plain)))
    return {name: row | {"tokens_per_step": round(row["tokens"] / max(1, row["steps"]), 3)} for name, row in found.items()}
