"""How long a prompt takes, in forwards as the engine cuts them."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.configs.slices import EngineOptions
from outrider.decoding.sampling.ranking import argmax_rows
from outrider.decoding.tree import DraftTree
from outrider.engine.forward.batch import DummySequence, ScheduledDummy, pack
from outrider.engine.forward.runner import ModelRunner
from outrider.experiments.bench.record import spread
from outrider.experiments.gpu_suite import models
from outrider.experiments.gpu_suite.device import Case, in_turns, shown
from outrider.experiments.gpu_suite.report import Report, Setting

_ROUNDS = 3


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``prefill``: one prompt at a time, until the host has its first token."""
    bench = models.bench(setting, report, kept)
    lengths = models.SIZES[bench.size].prompts
    for number, kind in enumerate(setting.kinds):
        with report.attempt(kind):
            ends = report.ends_left_s(number, len(setting.kinds))
            runner = bench.runner(kind, report)
            report.found[kind] = {}
            for length in lengths:
                case = prefill_case(runner, length, bench.loaded.vocab_size, setting.seed)
                taken = in_turns(setting.device, {0: case}, _ROUNDS, 1, lambda ends=ends: report.left_s() < ends, warm=1)[0]  # type: ignore[misc]
                figures = {
                    "wall_ms": spread(taken.wall_s, 3, 1e3), "call_ms": spread(taken.call_s, 3, 1e3),
                    "tokens_per_s": spread([length / seconds for seconds in taken.wall_s], 1),
                }  # fmt: skip
                report.found[kind][str(length)] = figures
                what = f"{kind} prompt of {length}: {figures['tokens_per_s']['median']:.0f} tok/s"
                report.line(what, *shown(figures["wall_ms"], " ms", 1))
                report.save()


def prefill_case(runner: ModelRunner, length: int, vocab_size: int, seed: int) -> Case:
    """Return the forwards of a random prompt; the last one computes the logits of its last token."""
    text = np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)
    piece, line = EngineOptions().max_step_tokens, DummySequence(0, text)
    starts = range(0, length, piece)
    batches = [pack([ScheduledDummy(line, start, start + piece, None)]) for start in starts[:-1]]
    last = pack([ScheduledDummy(line, starts[-1], length, DraftTree.chain(int(text[-1]), []))])

    def launch() -> Any:
        for batch in batches:
            runner.forward(batch)
        return runner.forward(last)

    return Case(launch, argmax_rows)
