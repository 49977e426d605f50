"""Quantized checkpoints in the formats of transformers: whether they load on the device, what they answer, and how fast they are.

The checkpoints are made here, by each format's published layout and bit by bit, with the weights that they stand for beside them.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from outrider.configs.slices import EngineOptions
from outrider.decoding.sampling.ranking import argmax_rows
from outrider.decoding.tree import DraftTree
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.batch import DummySequence, ScheduledDummy, pack
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.runners import make_runner
from outrider.engine.loading.model import load_weights
from outrider.engine.loading.weights.quantized import refuse_unusable
from outrider.experiments.bench.record import spread
from outrider.experiments.gpu_suite import models
from outrider.experiments.gpu_suite.device import Case, empty_cache, in_turns, ratios, shown
from outrider.experiments.gpu_suite.report import Report, Setting, UnavailableError

_MEASURED = ("awq", "gptq", "w4a16", "fp8-channel", "fp8-blocks")
_SMALL = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 8,
}  # fmt: skip
_TINY_GROUP, _GROUP = 32, 128  # columns that share a scale, and the side of a block of FP8
_CONTEXT, _ROUNDS, _OFTEN = 256, 5, 4
_ROWS = (1, 16, 64)
_COMPARED = 32  # rows behind a text whose logits are compared
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of eight whose numbers follow one another in an int32, the lowest bits first
_E4M3 = torch.finfo(torch.float8_e4m3fn).max

Parts = dict[str, torch.Tensor]  # what stands for one weight in a file, by the ends of the names


@dataclass(frozen=True, slots=True)
class Packing:
    """A format, and how a weight is brought into it."""

    settings: dict[str, Any]  # ``quantization_config`` of config.json
    pack: Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]  # of [out, in]: the parts, and the weight that they stand for
    dtype: torch.dtype  # of everything else in the file


def _pack_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[a, b] below 2^bits to int32 [a, ceil(b * bits / 32)], the first number in the lowest bits."""
    each = 32 // bits
    missing = -numbers.shape[1] % each
    padded = torch.nn.functional.pad(numbers.long(), (0, missing)).unflatten(1, (-1, each))
    words = sum(padded[..., at] << (bits * at) for at in range(each))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _in_groups(
    weight: torch.Tensor, group: int, bits: int, zeros: bool, dtype: torch.dtype, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds to the nearest: numbers [out, in], zeros and scales [out, groups], and the weight that they stand for.

    Args:
        weight: [out, in].
        group: columns of a group.
        bits: of a number.
        zeros: each group has a zero of its own, from 1 to 2^bits - 1; 2^(bits-1) otherwise.
        dtype: of the scales.
        order: [in], the group of each column; in turn when absent.
    """
    most, wide = 2**bits - 1, weight.float()
    groups = -(-weight.shape[1] // group)
    order = torch.arange(weight.shape[1]) // group if order is None else order
    members = [wide[:, order == at] for at in range(groups)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in members], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in members], 1)
    if zeros:
        scales = ((high - low) / most).clamp(min=1e-6).to(dtype)
        zero = (-low / scales.float()).round().clamp(1, most)
    else:
        scales = (2 * torch.maximum(high, -low) / most).clamp(min=1e-6).to(dtype)
        zero = torch.full_like(low, 2 ** (bits - 1))
    numbers = (wide / scales.float()[:, order] + zero[:, order]).round().clamp(0, most)
    return numbers, zero, scales, ((numbers - zero[:, order]) * scales.float()[:, order]).to(dtype)


def _awq(group: int) -> Packing:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        numbers, zero, scales, known = _in_groups(weight, group, 4, True, torch.float16)

        def packed(table: torch.Tensor) -> torch.Tensor:
            return _pack_bits(table.unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1), 4)

        return {"qweight": packed(numbers.T), "qzeros": packed(zero.T), "scales": scales.T.contiguous()}, known

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Packing({**settings, "modules_to_not_convert": None}, pack, torch.float16)


def _gptq(group: int, bits: int = 4, act_order: bool = False, version: int = 1, zeros: bool = True) -> Packing:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        width = weight.shape[1]
        columns = torch.randperm(width, generator=torch.Generator().manual_seed(width)) if act_order else torch.arange(width)
        order = columns // group
        numbers, zero, scales, known = _in_groups(weight, group, bits, zeros, torch.float16, order)
        stored = zero.T - (1 if version == 1 else 0)
        parts = {
            "qweight": _pack_bits(numbers, bits).T.contiguous(), "qzeros": _pack_bits(stored, bits),
            "scales": scales.T.contiguous(), "g_idx": order.to(torch.int32),
        }  # fmt: skip
        return parts, known

    settings = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": not zeros,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    return Packing(settings, pack, torch.float16)


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "kv_cache_scheme": None,
    }  # fmt: skip


def _packed(bits: int, group: int | None, zeros: bool = False) -> Packing:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        size = group or weight.shape[1]
        numbers, zero, scales, known = _in_groups(weight, size, bits, zeros, torch.bfloat16)
        parts = {"weight_packed": _pack_bits(numbers, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        if zeros:
            parts["weight_zero_point"] = _pack_bits(zero.T, bits).T.contiguous()
        return parts, known

    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, "strategy": "group" if group else "channel"}
    return Packing(_compressed("pack-quantized", weights | {"group_size": group}), pack, torch.bfloat16)


def _float(strategy: str) -> Packing:
    """FP8 weights with a scale for each of them, or for each of their rows; inputs are rounded by the token, as they come."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        wide = weight.float()
        peak = wide.abs().amax().reshape(1) if strategy == "tensor" else wide.abs().amax(1, keepdim=True)
        scales = (peak / _E4M3).to(torch.bfloat16)
        numbers = (wide / scales.float()).clamp(-_E4M3, _E4M3).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": scales}, (numbers.float() * scales.float()).to(torch.bfloat16)

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return Packing(_compressed("float-quantized", weights, inputs), pack, torch.bfloat16)


def _int8() -> Packing:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        wide = weight.float()
        scales = (wide.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
        numbers = (wide / scales.float()).round().clamp(-128, 127).to(torch.int8)
        return {"weight": numbers, "weight_scale": scales}, (numbers.float() * scales.float()).to(torch.bfloat16)

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return Packing(_compressed("int-quantized", weights, inputs), pack, torch.bfloat16)


def _blocks(rows: int, columns: int) -> Packing:
    """Return the packing of DeepSeek-V3 and Qwen3-FP8: a float32 scale per block; blocks at the edges may be smaller."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        wide, (out, width) = weight.float(), weight.shape
        padded = torch.nn.functional.pad(wide, (0, -width % columns, 0, -out % rows))
        peaks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3))
        scales = (peaks / _E4M3).clamp(min=1e-12)
        each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:out, :width]
        numbers = (wide / each).clamp(-_E4M3, _E4M3).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale_inv": scales}, (numbers.float() * each).to(torch.bfloat16)

    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
    return Packing(settings, pack, torch.bfloat16)


def packings(group: int) -> dict[str, Packing]:
    """The formats, with groups of so many columns and blocks of so many rows and columns."""
    return {
        "awq": _awq(group),
        "gptq": _gptq(group),
        "gptq-symmetric": _gptq(group, zeros=False),
        "gptq-act-order": _gptq(group, act_order=True),
        "gptq-8-bits": _gptq(group, bits=8),
        "gptq-v2": _gptq(group, version=2),
        "w4a16": _packed(4, group),
        "w4a16-zeros": _packed(4, group, zeros=True),
        "w8a16": _packed(8, None),
        "w8a16-zeros": _packed(8, group, zeros=True),
        "fp8-tensor": _float("tensor"),
        "fp8-channel": _float("channel"),
        "w8a8": _int8(),
        "fp8-blocks": _blocks(group, group),
    }


def save_checkpoints(
    quantized: Path, plain: Path, config: PreTrainedConfig, tensors: dict[str, torch.Tensor], packing: Packing
) -> dict[str, torch.Tensor]:
    """Write a model to two folders: as a quantized checkpoint, and with the weights that this stands for; return these weights.

    The matrices of the layers among ``tensors`` are quantized.
    """
    stored, known = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and ".layers." in name:
            parts, known[name] = packing.pack(tensor.cpu())
            stem = name.removesuffix(".weight")
            stored |= {f"{stem}.{end}": part.contiguous() for end, part in parts.items()}
        else:
            stored[name] = known[name] = tensor.to("cpu", packing.dtype).contiguous()
    described = config.to_dict() | {"dtype": str(packing.dtype).removeprefix("torch.")}
    for folder, content, extra in ((quantized, stored, {"quantization_config": packing.settings}), (plain, known, {})):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(described | extra, indent=1) + "\n", encoding="utf-8")
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    return known


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``quantized``: each format beside the same weights in 16 bits, in a runner whose rows were seen to be exact.

    Raises:
        UnavailableError: on the double of a GPU.
    """
    if setting.double:
        raise UnavailableError("the packages of the formats need a GPU")
    tiny = report.job.size == "tiny"
    shape = models.SIZES["tiny"].shape if tiny else _SMALL
    config = LlamaConfig(**shape, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(setting.seed)
    tensors = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    formats = packings(_TINY_GROUP if tiny else _GROUP)
    for number, name in enumerate(_MEASURED):
        with report.attempt(name):
            ends = report.ends_left_s(number, len(_MEASURED))
            try:
                refuse_unusable(name, formats[name].settings, setting.device == "cpu")
            except ModelLoadError as error:
                raise UnavailableError(str(error)) from error
            report.found[name] = _beside_plain(setting, report, name, config, tensors, formats[name], ends)
        gc.collect()
        empty_cache(setting.device)


def _beside_plain(
    setting: Setting,
    report: Report,
    name: str,
    config: LlamaConfig,
    tensors: dict[str, torch.Tensor],
    packing: Packing,
    ends_left_s: float,
) -> dict[str, Any]:
    """One format, until so many seconds of the part are left."""
    folders = {kind: setting.scratch / "checkpoints" / name / kind for kind in ("quantized", "plain")}
    save_checkpoints(folders["quantized"], folders["plain"], config, tensors, packing)
    figures: dict[str, Any] = {"load_s": {}, "weights_mib": {}, "fixed_rows": {}}
    runners = dict[str, ModelRunner]()
    for kind, folder in folders.items():
        began = time.perf_counter()
        model = load_weights(str(folder), "auto", TREE_ATTENTION, torch.device(setting.device)).eval()
        figures["load_s"][kind] = round(time.perf_counter() - began, 2)
        runners[kind] = make_runner(model, _CONTEXT + models.DRAFT_ROWS, EngineOptions(max_running=1))
        figures["weights_mib"][kind] = round(_bytes(model) / 2**20, 1)  # with what the first forwards made of it
        figures["fixed_rows"][kind] = runners[kind].fixed_rows
    logits = {kind: _logits(runner, config.vocab_size, setting.seed) for kind, runner in runners.items()}
    apart = (logits["quantized"] - logits["plain"]).abs().max()
    same = (logits["quantized"].argmax(1) == logits["plain"].argmax(1)).double().mean()
    figures |= {"most_apart": float(apart), "spread_of_logits": float(logits["plain"].std()), "same_argmax": float(same)}
    times = _times(setting, report, runners, config.vocab_size, ends_left_s)
    figures["wall_ms"] = {f"{kind}/{rows}": spread(taken, 4, 1e3) for (kind, rows), taken in times.items()}
    figures["over_plain"] = {str(rows): spread(ratios(times["quantized", rows], times["plain", rows]), 4) for rows in _ROWS}
    sizes = figures["weights_mib"]
    what = f"{name}: {sizes['quantized']:.0f} MiB of {sizes['plain']:.0f}, rows {figures['fixed_rows']['quantized'] or 'any'}"
    # Dequantized, as on a CPU, it is the plain model; kernels may add up in another order and round inputs.
    met = float(apart) == 0.0 if setting.device == "cpu" else None
    report.line(f"{what}: same next token", f"{100 * float(same):.0f} %", goal="all bits" if met is not None else "", met=met)
    for rows in (_ROWS[0], _ROWS[-1]):
        report.line(f"{name} {rows} rows", *shown(figures["over_plain"][str(rows)], " x 16 bits"))
    return figures


def _bytes(model: PreTrainedModel) -> int:
    return sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))


@torch.inference_mode()
def _logits(runner: ModelRunner, vocab_size: int, seed: int) -> torch.Tensor:
    """[n, vocab] in float32 on the CPU: of the last token of a random text, and of a chain behind it."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, _CONTEXT).astype(np.int32)
    text, behind = tokens[:-_COMPARED], tokens[-_COMPARED:]
    tree = DraftTree.chain(int(text[-1]), behind.tolist())
    return runner.forward(pack([ScheduledDummy(DummySequence(0, text), 0, len(text), tree)])).float().cpu()


def _times(
    setting: Setting, report: Report, runners: dict[str, ModelRunner], vocab_size: int, ends_left_s: float
) -> dict[tuple[str, int], list[float]]:
    """Seconds of a step behind a context, by runner and rows."""
    cases = dict[tuple[str, int], Case]()
    for kind, runner in runners.items():
        models.fill_slot(runner, _CONTEXT, setting.seed)
        for rows in _ROWS:
            batch = models.tree_batch(models.random_tree(rows, vocab_size, rows), _CONTEXT)
            cases[kind, rows] = Case(partial(runner.forward, batch), argmax_rows)
    times = in_turns(setting.device, cases, _ROUNDS, _OFTEN, lambda: report.left_s() < ends_left_s, warm=1)
    return {key: taken.wall_s for key, taken in times.items()}
