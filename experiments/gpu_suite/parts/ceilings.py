"""What a device can do at best: how fast it copies and reads memory, and multiplies matrices."""

from __future__ import annotations

from typing import Any

import torch

from outrider.engine.accelerator import accelerator
from outrider.experiments.bench.record import spread
from outrider.experiments.gpu_suite.device import Case, in_turns, is_cuda, shown
from outrider.experiments.gpu_suite.report import Report, Setting

_MATMUL = 8192


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``ceilings``."""
    device, large = setting.device, is_cuda(setting.device)
    report.found["device"] = describe(device)
    report.say(str(report.found["device"]))
    figures = bandwidth(device, report)
    report.found |= figures
    size = _MATMUL if large else 256
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    times = in_turns(device, {"matmul": Case(lambda: left @ right)}, 5, 10 if large else 1)["matmul"]
    rates = [2 * size**3 / seconds / 1e12 for seconds in times.gpu_s or times.wall_s]
    report.found["matmul_tflop_s"], report.found["matmul_size"] = spread(rates), size
    for name, unit in (("copy_gb_s", " GB/s"), ("read_gb_s", " GB/s"), ("gemv_gb_s", " GB/s"), ("matmul_tflop_s", " TFLOP/s")):
        report.line(name.rpartition("_")[0].removesuffix("_gb").removesuffix("_tflop"), *shown(report.found[name], unit, 1))


def describe(device: str) -> dict[str, Any]:
    """Return name, capability and memory of a GPU; of a CPU its kind alone."""
    if not device.startswith("cuda"):
        return {"name": device}
    gpu, number = accelerator(), torch.device(device)
    major, minor = gpu.capability(number)
    return {
        "name": gpu.name(number),
        "capability": f"{major}.{minor}",
        "memory_gib": round(gpu.memory(number)[1] / 2**30, 1),
        "cuda": torch.version.cuda,
    }


@torch.inference_mode()
def bandwidth(device: str, report: Report) -> dict[str, Any]:
    """GB/s (1e9 bytes) of a copy (bytes read and written), of a sum of bfloat16 numbers, and of a matrix with a vector.

    ``read_best_gb_s`` is the largest of the three medians: the roof that steps are held against.
    """
    large = is_cuda(device)
    rows, columns = (131_072, 16_384) if large else (512, 1024)  # 4 GiB of bfloat16 on a GPU
    source = torch.randn(columns, device=device).to(torch.bfloat16).repeat(rows, 1)
    target, vector = torch.empty_like(source), torch.randn(columns, device=device).to(torch.bfloat16)
    cases = {
        "copy_gb_s": Case(lambda: target.copy_(source)),
        "read_gb_s": Case(lambda: source.sum(dtype=torch.float32)),
        "gemv_gb_s": Case(lambda: source @ vector),
    }
    figures: dict[str, Any] = {"buffer_bytes": source.nbytes}
    for name, times in in_turns(device, cases, 5, 5 if large else 1).items():
        moved = source.nbytes * (2 if name == "copy_gb_s" else 1)
        figures[name] = spread([moved / seconds / 1e9 for seconds in times.gpu_s or times.wall_s], digits=1)
    figures["read_best_gb_s"] = max(figures[name]["median"] for name in cases)
    report.say(", ".join(f"{name} {figures[name]['median']}" for name in cases))
    return figures


def roof_gb_s(setting: Setting, report: Report, kept: dict[str, Any]) -> float:
    """The bandwidth to hold steps against: as it was measured before, or is now."""
    if setting.read_gb_s is not None:
        return setting.read_gb_s
    if "roof_gb_s" not in kept:
        kept["roof_gb_s"] = bandwidth(setting.device, report)["read_best_gb_s"]
    roof: float = kept["roof_gb_s"]
    return roof
