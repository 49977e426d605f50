"""What the roofline says of published speeds, once it knows how fast one model of the paper decodes plainly."""

from __future__ import annotations

import itertools
from typing import Any

from experiments.simulation.hardware import Gpu, ModelShape
from experiments.simulation.papers import published as paper
from experiments.simulation.steps import EXCHANGE_S, Mode, Software, roofline_s

_CONTEXT = 512  # entries before a step: the papers do not say how many
_PUBLISHED = "published speed of plain decoding"


def launching(gpu: Gpu, model: ModelShape, tokens_per_s: float) -> Software:
    """Software whose plain decoding of one model is as fast as published.

    Raises:
        ValueError: reading the weights alone takes longer: the shares of the peaks are too low.
    """
    step_s = 1 / tokens_per_s
    if roofline_s(gpu, model, Software(), 1, _CONTEXT, _CONTEXT) > step_s:
        raise ValueError(f"{model.name} on {gpu.name} decodes {tokens_per_s:g} tokens a second, which the roofline forbids")
    return Software(launch_s=step_s / model.layers)


def row(
    source: str,
    what: str,
    published: float | tuple[float, float],
    predicted: float,
    tolerance: float,
    why: str = "",
    told: str = "",
) -> dict[str, Any]:
    """A comparison.

    Args:
        source: paper and place.
        what: is compared.
        published: a number, or the ends of a range.
        predicted: here.
        tolerance: share within which they agree.
        why: they may not.
        told: what the prediction rests on.
    """
    low, high = published if isinstance(published, tuple) else (published, published)
    nearest = min(max(predicted, low), high)
    error = predicted / nearest - 1
    agree = abs(error) <= tolerance
    ends = low if low == high else [low, high]
    found = {"source": source, "what": what, "published": ends, "predicted": round(predicted, 3), "error": round(error, 3)}
    return found | {"agree": agree} | ({"told": told} if told else {}) | ({"why": why} if why and not agree else {})


def llama_software() -> Software:
    """That of Llama on A100s: launches as the trie's paper measured them of 13B, which Lookahead Decoding does not tell."""
    return launching(paper.TRIE_GPU, paper.TRIE_OTHER_MODEL, paper.TRIE_OTHER_BASELINE)


def baselines(tolerance: float) -> list[dict[str, Any]]:
    """Plain decoding of other sizes than the one that was told."""
    first = paper.LLMA_TABLE_3[0]
    software = launching(paper.LLMA_GPU, first.model, first.baseline)
    rows = []
    for other in paper.LLMA_TABLE_3[1:]:
        mode: Mode = "pipeline" if other.gpus > 1 else "lookahead"
        rate = 1 / _step_s(mode, other.gpus, paper.LLMA_GPU, other.model, software, 1)
        why = "most likely the hooks by which accelerate moves hidden states between GPUs, which one GPU does not tell"
        name = f"plain, {other.model.name}, {other.gpus} GPU{'s' * (other.gpus > 1)}, tokens/s"
        rows.append(row(f"{paper.LLMA} table 3", name, other.baseline, rate, tolerance, why, _PUBLISHED + " of 7B"))
    software = launching(paper.TRIE_GPU, paper.TRIE_MODEL, paper.TRIE_BASELINE)
    rate = 1 / _step_s("lookahead", 1, paper.TRIE_GPU, paper.TRIE_OTHER_MODEL, software, 1)
    why = "another model's code, which most likely launches more kernels a layer"
    what = f"plain, {paper.TRIE_OTHER_MODEL.name}, tokens/s"
    return [*rows, row(f"{paper.TRIE} table 4", what, paper.TRIE_OTHER_BASELINE, rate, tolerance, why, _PUBLISHED + " of 10B")]


def wide_steps(tolerance: float) -> list[dict[str, Any]]:
    """Speed-ups of Lookahead Decoding from its own tokens per step: what remains is what wide steps cost."""
    software = llama_software()
    gpu, model = paper.JACOBI_GPU, paper.SHARED_MODELS[0]
    plain_s = _step_s("lookahead", 1, gpu, model, software, 1)
    return [
        row(
            f"{paper.JACOBI} table 3", f"speed-up, {each.setting}", each.speedup,
            each.compression * plain_s / _step_s("lookahead", 1, gpu, model, software, each.rows), tolerance,
            "the time of drafting is not known", "its tokens per step",
        )
        for each in paper.JACOBI_TABLE_3
    ]  # fmt: skip


def shared_steps(tolerance: float) -> list[dict[str, Any]]:
    """Tensor and pipeline parallelism with software that launches every kernel from Python."""
    rows = []
    kinds: tuple[tuple[Mode, str], ...] = (("tensor", "DeepSpeed"), ("pipeline", "accelerate"))
    why = "most likely what the host does at each hand-over, which is not known"
    told = f"{_PUBLISHED} of 13B in {paper.TRIE}"
    for model, (mode, name), width in itertools.product(paper.SHARED_MODELS, kinds, (2, 4, 8)):
        ratio = _against_one(mode, width, model, llama_software())
        what = f"{mode} parallelism ({name}), {width} GPUs, {model.name}, against one GPU"
        rows.append(row(f"{paper.JACOBI} section 5.2", what, paper.SLOWDOWN, ratio, tolerance, why, told))
    return rows


def without_launches() -> list[dict[str, Any]]:
    """What the same GPUs would do with software that does not launch from Python: the papers say nothing of that, and it is the
    other half of the truth about tensor parallelism."""
    modes: tuple[Mode, ...] = ("tensor", "pipeline")
    rows = []
    for model, mode, width in itertools.product(paper.SHARED_MODELS, modes, (2, 4, 8)):
        ratio = _against_one(mode, width, model, Software())
        rows.append({"what": f"{mode}, {width} GPUs, {model.name}, plain decoding", "predicted": round(ratio, 3)})
    return rows


def needed_steps() -> list[dict[str, Any]]:
    """How many tokens a step must bring for the largest published speed-ups, by what steps cost here."""
    software = launching(paper.TRIE_GPU, paper.TRIE_MODEL, paper.TRIE_BASELINE)
    model = paper.SHARED_MODELS[0]
    trie = _step_s("lookahead", 1, paper.TRIE_GPU, paper.TRIE_MODEL, software, 64) * paper.TRIE_BASELINE
    one = _step_s("lookahead", 1, paper.SHARED_GPU, model, llama_software(), 1)
    shared = _step_s("lookahead", 1, paper.SHARED_GPU, model, llama_software(), paper.LOOKAHEAD_ROWS) + 8 * EXCHANGE_S
    costs = (
        ("trie, 64 rows, AntRAG", paper.TRIE_SPEEDUPS["trie"], trie),
        ("lookahead parallelism, 8 GPUs, 121 rows each, ClassEval", paper.LOOKAHEAD_SPEEDUP, shared / one),
    )
    return [{"what": what, "speedup": ratio, "tokens_per_step": round(ratio * cost, 2)} for what, ratio, cost in costs]


def _step_s(mode: Mode, width: int, gpu: Gpu, model: ModelShape, software: Software, rows: int) -> float:
    step = roofline_s(gpu, model, software, rows, _CONTEXT, rows * _CONTEXT, width if mode == "tensor" else 1)
    return step + (software.hop_s * (width - 1) if mode == "pipeline" else 0.0)


def _against_one(mode: Mode, width: int, model: ModelShape, software: Software) -> float:
    """Speed of plain decoding, against one GPU."""
    one = _step_s("lookahead", 1, paper.SHARED_GPU, model, software, 1)
    return one / _step_s(mode, width, paper.SHARED_GPU, model, software, 1)
