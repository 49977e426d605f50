"""Data sheets of GPUs, and a stand-in for this process's GPUs that lets a plan run without one."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch

from outrider.engine.accelerator import Accelerator, use

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Card:
    """GPU model. Rates are per second and without sparsity."""

    name: str
    sheet_gb: int  # GB by the data sheet
    memory_gib: float  # available to a process, the total of ``torch.cuda.mem_get_info``
    bandwidth: float  # bytes per second
    half_flops: float  # bfloat16 or float16, accumulated in float32
    single_flops: float  # float32, without TF32
    capability: tuple[int, int]
    sources: tuple[str, ...]

    @property
    def memory_bytes(self) -> int:
        """Return the bytes available to a process."""
        return int(self.memory_gib * GIB)

    def flops(self, dtype: torch.dtype) -> float:
        """Return the operations per second in a type."""
        return self.half_flops if dtype.itemsize == 2 else self.single_flops


# Memory: total in torch's out-of-memory message, from the cited issue.
_A100 = "NVIDIA A100 datasheet, SXM: 312 and 19.5 TFLOP/s"
_HOPPER = "SXM: 989 and 67 TFLOP/s"
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card(
            "A100-80", 80, 79.15, 2.039e12, 312e12, 19.5e12, (8, 0),
            (_A100, "2,039 GB/s", "memory: vllm-project/vllm, issue 4408"),
        ),
        Card(
            "A100-40", 40, 39.50, 1.555e12, 312e12, 19.5e12, (8, 0),
            (_A100, "1,555 GB/s", "memory: TianheWu/CoSeR, issue 10"),
        ),
        Card(
            "H100", 80, 79.11, 3.35e12, 989e12, 67e12, (9, 0),
            (f"NVIDIA H100 datasheet, {_HOPPER}, 3.35 TB/s", "memory: vllm-project/vllm, issue 27508"),
        ),
        Card(
            "H200", 141, 139.72, 4.8e12, 989e12, 67e12, (9, 0),
            (f"NVIDIA H200 datasheet, {_HOPPER}, 4.8 TB/s", "memory: the least of several logs, 139.72 to 139.81 GiB"),
        ),
        Card(
            "L40S", 48, 44.42, 0.864e12, 362e12, 91.6e12, (8, 9),
            ("NVIDIA L40S datasheet: 362 and 91.6 TFLOP/s, 864 GB/s", "memory: stepfun-ai/Step-Video-T2V, issue 8"),
        ),
        Card(
            "L4", 24, 22.03, 0.3e12, 121e12, 30.3e12, (8, 9),
            ("NVIDIA L4 datasheet: 242 TFLOP/s with sparsity, 30.3, 300 GB/s", "memory: ArcInstitute/evo2, issue 190"),
        ),
        Card(
            "A10", 24, 22.49, 0.6e12, 125e12, 31.2e12, (8, 6),
            (
                "NVIDIA A10 datasheet: 125 and 31.2 TFLOP/s, 600 GB/s",
                "memory: of an A10G, AUTOMATIC1111/stable-diffusion-webui, issue 1259",
            ),
        ),
        Card(
            "RTX 4090", 24, 23.52, 1.008e12, 165.2e12, 82.6e12, (8, 9),
            (
                "NVIDIA Ada GPU architecture, appendix A: 165.2 and 82.6 TFLOP/s, 1,008 GB/s",
                "memory: Soul-AILab/SoulX-FlashTalk, issue 5",
            ),
        ),
    )
}  # fmt: skip


def find_card(name: str) -> Card:
    """Return a card by name, ignoring case and punctuation. Raises ``ValueError`` with the known names."""
    known = {_plain(each): card for each, card in CARDS.items()}
    if _plain(name) not in known:
        raise ValueError(f"--gpu {name!r} is not known: it is one of {', '.join(CARDS)}")
    return known[_plain(name)]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """``Accelerator`` with the memory and capability of an unused card; only methods that planning calls."""

    card: Card

    def unavailable(self) -> str | None:
        """See ``Accelerator``."""
        return None

    def device_count(self) -> int:
        """See ``Accelerator``."""
        return 1

    def name(self, device: torch.device) -> str:
        """See ``Accelerator``."""
        return self.card.name

    def capability(self, device: torch.device) -> tuple[int, int]:
        """See ``Accelerator``."""
        return self.card.capability

    def has_kernels(self, dtype: torch.dtype) -> bool:
        """See ``Accelerator``; Triton is assumed to be installed."""
        return dtype in (torch.bfloat16, torch.float16, torch.float32)

    def memory(self, device: torch.device) -> tuple[int, int]:
        """See ``Accelerator``."""
        return self.card.memory_bytes, self.card.memory_bytes

    def reserved(self, device: torch.device) -> int:
        """See ``Accelerator``."""
        return 0

    def empty_cache(self) -> None:
        """See ``Accelerator``."""

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """See ``Accelerator``."""
        return contextlib.nullcontext()


def planned(card: Card) -> AbstractContextManager[None]:
    """Make the engine see a card instead of this machine's GPUs within a block. Nothing can be computed in it."""
    return use(cast(Accelerator, PlannedGpu(card)))
