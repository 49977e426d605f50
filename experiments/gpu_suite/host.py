"""Work of the host around a forward, for one request with each strategy and for many requests with plain decoding."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from configs.slices import EngineOptions
from decoding.request import PLAIN, Request, SamplingParams
from decoding.strategy_choice import parse_strategy
from engine.forward.batch import Batch
from engine.forward.runner import ModelRunner, kv_shape
from engine.loading.memory import left_bytes
from experiments.bench.engines.contestants import make_request
from experiments.bench.engines.phases import PHASES, PhaseClock
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.record import spread
from experiments.gpu_suite import models
from experiments.gpu_suite.device import empty_cache, wait
from experiments.gpu_suite.outputs import STRATEGIES
from experiments.gpu_suite.texts import prompts_for
from experiments.gpu_suite.worker import Report, Setting, UnavailableError

GOAL_MS = 0.3  # of all phases around the forward together
_SLICES = 5  # of the steps, for the spread
_RECORDS = 4
_PROMPT, _OUTPUT = 64, 24  # tokens
_CAPACITY = 640  # entries of a KV slot, for the texts that the check of exactness computes
_STEP_TOKENS = 4096  # rows of prompts in a step, so that all requests soon decode together
_KEPT_BACK = 4 << 30  # bytes of a GPU for steps and graphs
_LATE_S = 20.0  # behind the part's time, after which no case begins
_SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 1}}

Steps = list[dict[str, float]]  # seconds by phase


def steps_by_phase(
    model: SharedModel, strategy: str, groups: Sequence[Sequence[Request]], device: str, over: Callable[[], bool]
) -> list[Steps]:
    """Run groups of requests, one group after the other, and return the steps in which all of a group decode: one at least.

    The forward waits for the device, so that none of its time is in ``verify``.
    """
    runner, forward = model.runner, model.runner.forward

    def complete(batch: Batch) -> torch.Tensor:
        logits = forward(batch)
        wait(device)
        return logits

    engine, found = model.engine(parse_strategy(strategy)), list[Steps]()
    setattr(runner, "forward", complete)  # noqa: B010 - mypy: a method
    try:
        clock = PhaseClock(engine)
        for requests in groups:
            steps: Steps = []
            for request in requests:
                engine.add(request)
            while engine.has_work and not (steps and over()):
                if (step := clock.step(len(requests))) is not None:
                    steps.append({phase: step[phase] for phase in PHASES})
            for request in requests:
                if request.finish_reason is None:
                    engine.abort(request.request_id)
            found.append(steps)
    finally:
        del runner.forward
    return found


def _figures(steps: Steps) -> dict[str, Any]:
    """Return milliseconds with their spread over slices of the steps, and the median of each phase."""
    length = max(1, -(-len(steps) // _SLICES))
    slices = [steps[start : start + length] for start in range(0, len(steps), length)]
    whole = [statistics.median(sum(step.values()) for step in part) for part in slices]
    host = [statistics.median(sum(step.values()) - step["forward"] for step in part) for part in slices]
    by_phase = {phase: round(1e3 * statistics.median(step[phase] for step in steps), 4) for phase in PHASES}
    return {"steps": len(steps), "step_ms": spread(whole, 4, 1e3), "host_ms": spread(host, 4, 1e3), "ms_by_phase": by_phase}


def measure_host(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Measure each strategy with the preferred kind of runner that is available; the first prompt warms up."""
    bench = models.bench(setting, report, kept)
    prompts = prompts_for(bench, report)[:_RECORDS]
    for kind in setting.kinds:
        with report.attempt(kind):
            bench.runner(kind, report)
            report.found[kind] = {}
            for number, strategy in enumerate(STRATEGIES):
                over, shared = report.share(number, len(STRATEGIES)), bench.engines(kind, report)
                requests = [[make_request(prompt, 0, shared.guide)] for prompt in prompts]
                first, *others = steps_by_phase(shared, strategy, requests, setting.device, over)
                steps = sum(others, Steps()) or first
                what = f"{kind} {strategy}: host around a forward"
                if not steps:
                    report.line(what, "n/a: no time was left")
                    continue
                figures = report.found[kind][strategy] = _figures(steps)
                report.say(f"{kind} {strategy}: {figures['ms_by_phase']} ms")
                report.figure(what, figures["host_ms"], "ms", f"< {GOAL_MS}", figures["host_ms"]["median"] < GOAL_MS, digits=3)
            return  # one kind
    raise UnavailableError("no kind of runner could be built")


def measure_batches(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Measure plain decoding of many requests at once, greedy and sampled, the most requests first."""
    bench = models.bench(setting, report, kept)
    batches, device = models.SIZES[bench.size].batches, torch.device(setting.device)

    def measure(kind: str, over: Callable[[], bool]) -> None:
        report.using(kind)
        empty_cache(setting.device)
        fitting = list(batches)
        if device.type == "cuda":
            slot_bytes = kv_shape(bench.loaded.model).bytes_per_token() * _CAPACITY
            fitting = [batch for batch in batches if batch * slot_bytes < left_bytes(device) - _KEPT_BACK]
        if not fitting:
            raise UnavailableError("no KV slots fit beside the model")
        runner = models.build_runner(kind, bench.loaded.model, _CAPACITY, max(fitting))
        report.found[kind] = {"no_memory_for": [batch for batch in batches if batch not in fitting]}
        cases = [(batch, name) for batch in reversed(fitting) for name in _SAMPLINGS]
        before = setting.kinds.index(kind) * len(cases)
        for number, (batch, name) in enumerate(cases, start=before):
            what, over = f"{kind} {batch} requests, {name}", report.share(number, len(setting.kinds) * len(cases))
            steps = [] if report.left_s() < -_LATE_S else _batch_steps(bench, runner, batch, name, over)
            if not steps:
                report.line(what, "n/a: no time was left")
                continue
            figures = _figures(steps)
            figures["tokens_per_s"] = spread([batch / sum(step.values()) for step in steps], 1)
            report.found[kind].setdefault(str(batch), {})[name] = figures
            ms = ", ".join(f"{part} {figures[f'{part}_ms']['median']:.2f} ms" for part in ("step", "host"))
            report.figure(f"{what}: {ms}", figures["tokens_per_s"], "tok/s", digits=0)
            report.save()

    report.each(setting.kinds, measure)
    empty_cache(setting.device)


def _batch_steps(bench: models.Bench, runner: ModelRunner, batch: int, sampling: str, over: Callable[[], bool]) -> Steps:
    loaded = dataclasses.replace(bench.loaded, max_model_len=_CAPACITY)
    options = EngineOptions(
        max_running=batch, max_step_tokens=_STEP_TOKENS, max_waiting=2 * batch, prefix_caching=False, kv_slots=runner.cache.slots
    )
    shared = SharedModel(loaded, options, 0, runner=runner, kept=bench.folder("batches"))
    draw = np.random.default_rng(models.SEED)
    params = SamplingParams(_OUTPUT, ignore_eos=True, **_SAMPLINGS[sampling])
    requests = [Request(str(at), draw.integers(0, loaded.vocab_size, _PROMPT).tolist(), params) for at in range(batch)]
    return steps_by_phase(shared, PLAIN, [requests], bench.setting.device, over)[0]
