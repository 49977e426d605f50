"""GPUs as numbers, with their sources."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.loading.cards import CARDS


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak arithmetic, memory and links of one device."""

    name: str
    flops: float  # per second, bfloat16 or float16, without sparsity
    memory_bytes: float
    bandwidth: float  # bytes per second of its memory
    link: float  # bytes per second and direction to the other GPUs of the machine
    usd_per_hour: float | None  # None if no price is known
    sources: tuple[str, ...]


def _of_card(name: str, link: float, usd_per_hour: float | None, *sources: str) -> Gpu:
    card = CARDS[name]
    found = (*card.sources, *sources)
    return Gpu(name, card.half_flops, card.sheet_gb * 1e9, card.bandwidth, link, usd_per_hour, found)


_SPHERON = "price: spheron.network/blog/nvidia-a100-vs-h100, on demand, 1 May 2026"
_JARVIS = "price: jarvislabs.ai/blog/h100-vs-a100, April 2026"
_V100 = "NVIDIA V100 datasheet, SXM2: 125 TFLOP/s, 900 GB/s, NVLink 300 GB/s both ways"
_L40 = "NVIDIA L40 datasheet: 181 TFLOP/s without sparsity, 864 GB/s, PCIe 64 GB/s both ways"
_NVLINK = "NVLink 600 GB/s both ways"
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _of_card("A100-80", 300e9, 1.64, _NVLINK, _SPHERON),
        _of_card("A100-40", 300e9, 1.29, _NVLINK, _JARVIS),
        _of_card("H100", 450e9, 2.90, "NVLink 900 GB/s both ways", _SPHERON),
        Gpu("L40", 181e12, 48e9, 0.864e12, 32e9, None, (_L40,)),
        Gpu("V100-32", 125e12, 32e9, 0.9e12, 150e9, None, (_V100,)),
    )
}


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name. Raises ``ValueError`` with the known names."""
    if name not in GPUS:
        raise ValueError(f"--gpu {name!r} is not known: it is one of {', '.join(GPUS)}")
    return GPUS[name]
