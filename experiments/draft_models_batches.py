"""Energy and time of plain decoding by batch size, as in Table 1 of arXiv 2407.09722."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from rich.progress import Progress

from configs.slices import EngineOptions
from decoding.request import PLAIN, Request, SamplingParams
from decoding.strategy_choice import parse_strategy
from engine.engine import Engine
from engine.loading.model import LoadedModel
from engine.measures.energy import EnergyMeter
from experiments.contestants import Prompt
from experiments.shared_model import SharedModel

_PROMPT = 256  # tokens at the end of a prompt that are used: contexts are alike at all batch sizes


class BatchRuns:
    """Forwards of the target with so many requests in each. Prefills are not counted."""

    def __init__(self, loaded: LoadedModel, prompts: Sequence[Prompt], largest: int, max_tokens: int) -> None:
        """
        Args:
            loaded: the target.
            prompts: taken again and again, cut to their ends.
            largest: batch size.
            max_tokens: of an output, at least 2.
        """
        assert max_tokens >= 2, max_tokens
        length = min(_PROMPT, *(len(prompt.ids) for prompt in prompts))
        self._prompts, self._max_tokens = [prompt.ids[-length:] for prompt in prompts], max_tokens
        rows = max(EngineOptions().max_step_tokens, largest * length)  # all prefills in one step: then all decode together
        options = EngineOptions(max_running=largest, max_step_tokens=rows, prefix_caching=False)
        self._shared = SharedModel(replace(loaded, max_model_len=length + max_tokens), options, 0)

    def run(self, batch: int, runs: int, sampling: dict[str, Any], seed: int, meter: EnergyMeter) -> dict[str, float | None]:
        """At least so many forwards with ``batch`` requests each.

        Returns:
            ``runs``, ``seconds``, ``s_per_run``, ``s_per_input``, and ``joules``, ``net_joules``, ``j_per_run``, ``j_per_input``,
            None where nothing is metered. An input is one request in one forward.
        """
        engine = self._shared.engine(parse_strategy(PLAIN))
        done, seconds = 0, 0.0
        joules: float | None = 0.0
        idle: float | None = 0.0
        while done < runs:
            self._begin(engine, batch, sampling, seed + done)
            with meter.span() as span:
                began = time.perf_counter()
                while engine.has_work:
                    engine.step()
                    done += 1
                seconds += time.perf_counter() - began
            joules = None if joules is None or span.joules is None else joules + span.joules
            idle = None if idle is None or span.idle_w is None else idle + span.idle_w * span.seconds
        net = None if joules is None or idle is None else joules - idle
        told = {"runs": done, "seconds": seconds, "s_per_run": seconds / done, "s_per_input": seconds / done / batch}
        return told | {
            "joules": joules,
            "net_joules": net,
            "j_per_run": None if joules is None else joules / done,
            "j_per_input": None if joules is None else joules / done / batch,
        }

    def _begin(self, engine: Engine, batch: int, sampling: dict[str, Any], seed: int) -> None:
        """Adds requests and runs them to their first tokens."""
        for at, ids in enumerate(islice(cycle(self._prompts), batch)):
            params = SamplingParams(self._max_tokens, seed=seed + at, ignore_eos=True, **sampling)
            engine.add(Request(f"{seed}-{at}", ids, params))
        started = engine.step()
        assert len(started) == batch, (len(started), batch)


def measure_batches(
    batches: BatchRuns, sizes: Sequence[int], runs: int, repeats: int, sampling: dict[str, Any], seed: int, meter: EnergyMeter,
    bar: Progress,
) -> dict[str, dict[str, list[float | None]]]:  # fmt: skip
    """All batch sizes in turns; of each, what ``BatchRuns.run`` tells, a list over the repeats."""
    task = bar.add_task("batch sizes", total=repeats * len(sizes))
    for size in sizes:
        batches.run(size, 1, sampling, seed, meter)  # warm-up
    told: dict[str, dict[str, list[float | None]]] = {str(size): {} for size in sizes}
    for repeat in range(repeats):
        for size in sizes:
            for name, value in batches.run(size, runs, sampling, seed + repeat, meter).items():
                told[str(size)].setdefault(name, []).append(None if value is None else round(value, 6))
            bar.advance(task)
    return told
