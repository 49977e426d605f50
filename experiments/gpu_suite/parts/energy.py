"""Joules for each emitted token, by the GPU's own counter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from engine.measures.energy import EnergyMeter, measure_idle, open_meter
from experiments.bench.engines.contestants import Contestant, Prompt
from experiments.bench.record import spread
from experiments.gpu_suite import models, traces
from experiments.gpu_suite.clock import shown
from experiments.gpu_suite.device import wait
from experiments.gpu_suite.report import Report, Setting, UnavailableError
from experiments.gpu_suite.texts import read_texts

_IDLE_S = 3.0
_BLOCK_S, _LEAST_BLOCK_S = 3.0, 1.5  # of one strategy: counters move every 20 to 100 ms
_ROUNDS = 3


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``energy``: blocks of some seconds of each strategy in turns, with the preferred kind of runner that there is.

    Raises:
        UnavailableError: no counter can be read, or there is no runner.
    """
    meter = open_meter([setting.device])
    report.found["source"] = meter.source
    if not meter.works:
        needs = (
            "no counter of this GPU can be read" if setting.device.startswith("cuda") else "needs CUDA, or RAPL that can be read"
        )
        raise UnavailableError(needs)
    bench = models.bench(setting, report, kept)
    prompts = read_texts(setting, bench.loaded.vocab_size, models.SIZES[bench.size].context, report)
    wait(setting.device)
    report.found["idle_w"] = measure_idle(meter, _IDLE_S)
    report.say(f"idle: {report.found['idle_w']} W, with the model in memory")
    for kind in setting.kinds:
        with report.attempt(kind):
            runner = bench.runner(kind, report)
            contestants = traces.contestants(traces.engines(bench.loaded, runner, bench.folder(kind)), setting.max_tokens)
            for contestant in contestants.values():
                contestant.run(prompts[:1])
            block_s = min(_BLOCK_S, max(_LEAST_BLOCK_S, report.left_s() / len(contestants) / _ROUNDS))
            found: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
            for turn in range(_ROUNDS):
                if turn and report.left_s() < block_s * len(contestants):
                    break
                for name, contestant in contestants.items():
                    contestant.renew()
                    found[name].append(_block(contestant, prompts, meter, block_s, setting.device))
            report.found[kind] = {name: _figures(blocks) for name, blocks in found.items()}
            for name, figures in report.found[kind].items():
                what = f"{kind} {name}: {figures['mean_w']:.0f} W"
                report.line(what, *shown(figures["j_per_token"], " J/token", 3))
            return  # one kind
    raise UnavailableError("no kind of runner could be built")


def _block(
    contestant: Contestant, prompts: Sequence[Prompt], meter: EnergyMeter, least_s: float, device: str
) -> dict[str, float]:
    """Records until so many seconds have passed: joules, seconds and tokens, prefills included."""
    tokens, number = 0, 0
    began = time.perf_counter()
    with meter.span() as span:
        while time.perf_counter() - began < least_s:
            if number and number % len(prompts) == 0:
                contestant.renew()  # what was learned from an output must not help with the same output again
            tokens += len(contestant.run([prompts[number % len(prompts)]]).outputs[0])
            number += 1
        wait(device)
    if span.joules is None:
        raise UnavailableError("the counter stopped in the middle")
    net = span.joules if span.net_joules is None else span.net_joules
    return {"joules": span.joules, "net_joules": net, "seconds": span.seconds, "tokens": tokens}


def _figures(blocks: Sequence[dict[str, float]]) -> dict[str, Any]:
    seconds = sum(block["seconds"] for block in blocks)
    return {
        "j_per_token": spread([block["joules"] / block["tokens"] for block in blocks], 4),
        "net_j_per_token": spread([block["net_joules"] / block["tokens"] for block in blocks], 4),
        "mean_w": round(sum(block["joules"] for block in blocks) / seconds, 1),
        "tokens": int(sum(block["tokens"] for block in blocks)),
        "seconds": round(seconds, 2),
    }
