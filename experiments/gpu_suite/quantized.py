"""Quantized checkpoints beside the same weights in 16 bits: loading, answers and speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from configs.slices import EngineOptions
from decoding.tree import DraftTree
from engine.errors import ModelLoadError
from engine.forward.attention import TREE_ATTENTION
from engine.forward.batch import Line, LineWork, pack
from engine.forward.runner import ModelRunner
from engine.forward.runners import make_runner
from engine.loading.model import load_weights
from engine.loading.weights.quantized import refuse_unusable
from experiments.bench.record import spread
from experiments.gpu_suite import models
from experiments.gpu_suite.device import empty_cache, in_turns, ratios
from experiments.gpu_suite.formats import packings, save_checkpoints
from experiments.gpu_suite.worker import Report, Setting, UnavailableError

_MEASURED = ("awq", "gptq", "w4a16", "fp8-channel", "fp8-blocks")
_SMALL = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 8,
}  # fmt: skip
_CONTEXT, _ROUNDS, _OFTEN = 256, 5, 4
_ROWS = (1, 16, 64)
_COMPARED = 32  # rows behind a text whose logits are compared


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Measure each format in a runner whose rows passed the exactness check; raise ``UnavailableError`` on the double."""
    if setting.double:
        raise UnavailableError("the packages of the formats need a GPU")
    shape, group = (models.SIZES["tiny"].shape, 32) if report.job.size == "tiny" else (_SMALL, 128)
    config = models.llama_config(shape, context=1024)
    torch.manual_seed(models.SEED)
    tensors = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    formats = packings(group)

    def measure_format(name: str, over: Callable[[], bool]) -> None:
        empty_cache(setting.device)
        try:
            refuse_unusable(name, formats[name].settings, setting.device == "cpu")
        except ModelLoadError as error:
            raise UnavailableError(str(error)) from error
        folders = {kind: setting.scratch / "checkpoints" / name / kind for kind in ("quantized", "plain")}
        save_checkpoints(folders["quantized"], folders["plain"], config, tensors, formats[name])
        figures: dict[str, Any] = {"load_s": {}, "weights_mib": {}, "fixed_rows": {}}
        runners = dict[str, ModelRunner]()
        for kind, folder in folders.items():
            began = time.perf_counter()
            model = load_weights(str(folder), "auto", TREE_ATTENTION, torch.device(setting.device)).eval()
            figures["load_s"][kind] = round(time.perf_counter() - began, 2)
            runners[kind] = make_runner(model, _CONTEXT + models.DRAFT_ROWS, EngineOptions(max_running=1))
            held = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
            figures["weights_mib"][kind] = round(held / 2**20, 1)  # including what the first forwards made of them
            figures["fixed_rows"][kind] = runners[kind].fixed_rows
        report.found[name] = figures
        _compare(report, name, figures, runners, all_bits=setting.device == "cpu")
        _time(setting, report, name, figures, runners, over)

    report.each(_MEASURED, measure_format)
    empty_cache(setting.device)


def _compare(report: Report, name: str, figures: dict[str, Any], runners: dict[str, ModelRunner], all_bits: bool) -> None:
    """Compare logits. Dequantized, as on a CPU, all bits are equal; kernels may add in another order and round inputs."""
    quantized, plain = (_logits(runners[kind]) for kind in ("quantized", "plain"))
    apart = float((quantized - plain).abs().max())
    same = float((quantized.argmax(1) == plain.argmax(1)).double().mean())
    figures |= {"most_apart": apart, "spread_of_logits": float(plain.std()), "same_argmax": same}
    sizes = figures["weights_mib"]
    what = f"{name}: {sizes['quantized']:.0f} MiB of {sizes['plain']:.0f}, rows {figures['fixed_rows']['quantized'] or 'any'}"
    goal, met = ("all bits", apart == 0.0) if all_bits else ("", None)
    report.line(f"{what}: same next token", f"{100 * same:.0f} %", goal=goal, met=met)


@torch.inference_mode()
def _logits(runner: ModelRunner) -> torch.Tensor:
    """Return [n, vocab] float32 on the CPU: of the last token of a random text, and of a chain behind it."""
    tokens = np.random.default_rng(models.SEED).integers(0, runner.model.config.vocab_size, _CONTEXT).astype(np.int32)
    text, behind = tokens[:-_COMPARED], tokens[-_COMPARED:]
    tree = DraftTree.chain(int(text[-1]), behind.tolist())
    return runner.forward(pack([LineWork(Line(0, text), 0, len(text), tree)])).float().cpu()


def _time(
    setting: Setting,
    report: Report,
    name: str,
    figures: dict[str, Any],
    runners: dict[str, ModelRunner],
    over: Callable[[], bool],
) -> None:
    """Time steps behind a context."""
    for runner in runners.values():
        models.fill_slot(runner, _CONTEXT)
    cases = {(kind, rows): models.step_case(runner, rows, _CONTEXT) for kind, runner in runners.items() for rows in _ROWS}
    times = in_turns(setting.device, cases, _ROUNDS, _OFTEN, over, warm=1)
    figures["wall_ms"] = {f"{kind}/{rows}": spread(taken.wall_s, 4, 1e3) for (kind, rows), taken in times.items()}
    figures["over_plain"] = {}
    for rows in _ROWS:
        ratio = spread(ratios(times["quantized", rows].wall_s, times["plain", rows].wall_s), 4)
        figures["over_plain"][str(rows)] = ratio
        report.figure(f"{name} {rows} rows", ratio, "x 16 bits")
