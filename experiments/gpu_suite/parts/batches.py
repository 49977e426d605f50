"""Many requests at once, greedy and sampled: tokens per second, and what the host takes of a step."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from outrider.configs.slices import EngineOptions
from outrider.decoding.request import PLAIN, Request, SamplingParams
from outrider.engine.forward.runner import ModelRunner, kv_shape
from outrider.engine.loading.memory import left_bytes
from outrider.experiments.bench.engines.contestants import SharedModel
from outrider.experiments.bench.record import spread
from outrider.experiments.gpu_suite import models
from outrider.experiments.gpu_suite.device import empty_cache, shown
from outrider.experiments.gpu_suite.parts.host import Phases
from outrider.experiments.gpu_suite.report import Report, Setting, UnavailableError

_PROMPT, _OUTPUT = 64, 24  # tokens
_CAPACITY = 640  # entries of a KV slot, for the texts that the check of exactness computes
_STEP_TOKENS = 4096  # prompts are computed so many rows at a time, so that all requests soon decode together
_KEPT_BACK = 4 << 30  # bytes of a GPU for steps and graphs
_LATE_S = 20.0  # behind the part's time, after which no case begins
_SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 1}}


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``batches``: plain decoding of so many requests at once."""
    bench = models.bench(setting, report, kept)
    batches, device = models.SIZES[bench.size].batches, torch.device(setting.device)
    for number, kind in enumerate(setting.kinds):
        with report.attempt(kind):
            report.using(kind)
            fitting = list(batches)
            if device.type == "cuda":
                empty_cache(setting.device)
                slot_bytes = kv_shape(bench.loaded.model).bytes_per_token() * _CAPACITY
                fitting = [batch for batch in batches if batch * slot_bytes < left_bytes(device) - _KEPT_BACK]
            if not fitting:
                raise UnavailableError("no KV slots fit beside the model")
            runner = models.build_runner(kind, bench.loaded.model, _CAPACITY, max(fitting))
            report.found[kind] = {"no_memory_for": [batch for batch in batches if batch not in fitting]}
            cases = [(batch, name) for batch in reversed(fitting) for name in _SAMPLINGS]
            ends = report.ends_left_s(number, len(setting.kinds))
            for place, (batch, name) in enumerate(cases):
                left = ends + (report.left_s() - ends) * (1 - 1 / (len(cases) - place))
                late = report.left_s() < -_LATE_S
                steps = [] if late else _steps(bench, runner, batch, _SAMPLINGS[name], report, left)
                if steps:
                    _tell(report, kind, batch, name, steps)
                else:
                    report.line(f"{kind} {batch} requests, {name}", "n/a: no time was left")
            del runner
        gc.collect()
        empty_cache(setting.device)


def _steps(
    bench: models.Bench, runner: ModelRunner, batch: int, sampling: dict[str, Any], report: Report, ends_left_s: float
) -> list[dict[str, float]]:
    """Return seconds by phase of the steps in which all requests decode."""
    loaded = dataclasses.replace(bench.loaded, max_model_len=_CAPACITY)
    options = EngineOptions(
        max_running=batch, max_step_tokens=_STEP_TOKENS, max_waiting=2 * batch, prefix_caching=False, kv_slots=runner.cache.slots
    )
    phases = Phases(SharedModel(loaded, options, 0, runner=runner, kept=bench.folder("batches")), PLAIN, bench.setting.device)
    draw = np.random.default_rng(bench.setting.seed)
    params = SamplingParams(_OUTPUT, ignore_eos=True, **sampling)
    requests = [Request(str(at), draw.integers(0, loaded.vocab_size, _PROMPT).tolist(), params) for at in range(batch)]
    try:
        return phases.run_requests(requests, lambda: report.left_s() < ends_left_s)
    finally:
        phases.close()


def _tell(report: Report, kind: str, batch: int, name: str, steps: Sequence[dict[str, float]]) -> None:
    whole, forward = [sum(step.values()) for step in steps], [step["forward"] for step in steps]
    around = [one - other for one, other in zip(whole, forward, strict=True)]
    figures: dict[str, Any] = {
        "steps": len(steps), "step_ms": spread(whole, 4, 1e3), "forward_ms": spread(forward, 4, 1e3),
        "host_ms": spread(around, 4, 1e3), "tokens_per_s": spread([batch / seconds for seconds in whole], 1),
        "host_ms_by_phase": {
            phase: round(1e3 * statistics.median(step[phase] for step in steps), 4) for phase in steps[0] if phase != "forward"
        },
    }  # fmt: skip
    report.found[kind].setdefault(str(batch), {})[name] = figures
    ms = {part: figures[f"{part}_ms"]["median"] for part in ("step", "host")}
    what = f"{kind} {batch} requests, {name}: step {ms['step']:.2f} ms, host {ms['host']:.2f} ms"
    report.line(what, *shown(figures["tokens_per_s"], " tok/s", 0))
    report.save()
