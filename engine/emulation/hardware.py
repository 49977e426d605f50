"""Devices, links and models that can be emulated. Every figure has its source in ``FIGURES``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.cards import CARDS, Card

_GATED = frozenset(("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "codellama"))  # three matrices in an MLP
_GPT_FAST = "pytorch-labs/gpt-fast, README at 0f925b5, 8 A100-80 limited to 330 W"
_NCCL = "NVIDIA/nccl, src/graph/tuning.cc at 01afd20"
_CALCULON = "calculon (SC 2023), systems/a100_80g.json at 4f81f02"


@dataclass(frozen=True, slots=True)
class SourcedFigure:
    """SourcedFigure of the emulation with its source."""

    value: float
    unit: str
    of: str
    source: str


# Llama-2-7B in two bytes: 104.9 tokens/s on one GPU, 168.84, 254.02 and 328.43 on two, four and eight, which sum the rows of 32
# layers twice. A sum takes what the step takes longer than its part of the step of one GPU: 18, 24 and 29 us.
_ONE_S, _SUMS = 1 / 104.9, 64


def _sum_us(ranks: int, tokens_per_s: float) -> float:
    return round(1e6 * (1 / tokens_per_s - _ONE_S / ranks) / _SUMS, 1)


_SUM_OF = "all-reduce of one row over NVLink, {} GPUs: the step beyond its share of one GPU's step, over 64 all-reduces"
FIGURES: dict[str, SourcedFigure] = {
    "bandwidth_share": SourcedFigure(0.685, "of the peak", "memory bandwidth that reads reach: 1,397 of 2,039 GB/s", _GPT_FAST),
    "flops_share": SourcedFigure(0.6, "of the peak", "arithmetic reached by a matrix product of 1 to 16 GFLOP", _CALCULON),
    "step_16": SourcedFigure(1.0, "of its reads", "sixteen-bit weights", _GPT_FAST),
    "step_8": SourcedFigure(round(104.9 / 155.58, 3), "of its reads", "eight-bit step over sixteen-bit step", _GPT_FAST),
    "step_4": SourcedFigure(round(104.9 / 196.8, 3), "of its reads", "four-bit step over sixteen-bit step", _GPT_FAST),
    "launch_s": SourcedFigure(round(1 / 25.5 / 32, 6), "s a layer", "eager launches: 25.5 tokens/s of a Llama of 32 layers",
                       "pytorch.org/blog/accelerating-generative-ai-2, A100-80 limited to 330 W"),
    "all_reduce_2": SourcedFigure(_sum_us(2, 168.84), "us", _SUM_OF.format(2), _GPT_FAST),
    "all_reduce_4": SourcedFigure(_sum_us(4, 254.02), "us", _SUM_OF.format(4), _GPT_FAST),
    "all_reduce_8": SourcedFigure(_sum_us(8, 328.43), "us", _SUM_OF.format(8), _GPT_FAST),
    "send": SourcedFigure(3.6, "us", "start of an exchange between two GPUs (ring, LL)", _NCCL),
    "nvlink_step": SourcedFigure(0.47, "us", "step of a ring over NVLink (LL)", _NCCL),
    "pcie_step": SourcedFigure(1.0, "us", "step of a ring over PCIe (LL)", _NCCL),
    "ethernet_step": SourcedFigure(2.7, "us", "step of a ring over a network (LL)", _NCCL),
    "nvlink": SourcedFigure(300e9, "B/s", "NVLink of an A100, each direction", "NVIDIA A100 datasheet: 600 GB/s both ways"),
    "nvlink_h100": SourcedFigure(450e9, "B/s", "NVLink of an H100, each direction", "NVIDIA H100 datasheet: 900 GB/s both ways"),
    "pcie": SourcedFigure(32e9, "B/s", "PCIe 4.0 x16, each direction", "NVIDIA L40S and L4 datasheets: 64 GB/s both ways"),
    "ethernet": SourcedFigure(12.5e9, "B/s", "100 Gb Ethernet, each direction", "IEEE 802.3, 100GBASE"),
    "nvlink_share": SourcedFigure(0.6, "of the peak", "bandwidth of NVLink reached", _CALCULON),
    "pcie_share": SourcedFigure(0.7, "of the peak", "bandwidth of PCIe reached with messages of 1 to 10 MB", _CALCULON),
    "ethernet_share": SourcedFigure(0.9, "of the peak", "bandwidth of a network reached", _CALCULON),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """DeviceLink between the GPUs of a group."""

    name: str
    bandwidth: float  # bytes per second and direction that are reached
    step_s: float  # of a ring, without its bytes

    def all_reduce_s(self, ranks: int, size: float) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes: a ring's 2 (n - 1) steps and 2 (n - 1) / n of the bytes.

        Its start is measured over NVLink; another link adds the difference of its steps.
        """
        steps = 2 * (ranks - 1)
        measured = [(count, FIGURES[f"all_reduce_{count}"].value * 1e-6) for count in (2, 4, 8)]
        (few, low), (many, high) = measured[:2] if ranks <= 4 else measured[1:]
        start = low + (high - low) * (ranks - few) / (many - few)
        slower = self.step_s - FIGURES["nvlink_step"].value * 1e-6
        return start + steps * slower + steps / ranks * size / self.bandwidth

    def send_s(self, size: float) -> float:
        """Return the seconds in which ``size`` bytes reach another GPU."""
        return FIGURES["send"].value * 1e-6 + self.step_s + size / self.bandwidth


def _link(name: str, kind: str, bandwidth: str) -> DeviceLink:
    return DeviceLink(name, FIGURES[bandwidth].value * FIGURES[f"{kind}_share"].value, FIGURES[f"{kind}_step"].value * 1e-6)


_NVLINK = {"A100-80": "nvlink", "H100": "nvlink_h100"}
DEVICES = ("A100-80", "H100", "L40S", "L4")  # as in ``configs.slices.EmulationOptions``


def find_device(name: str, link: str | None) -> tuple[Card, DeviceLink]:
    """Return a device and its link: ``link``, or NVLink where the device has it, else PCIe. Raises ``ModelLoadError``."""
    kind = link or ("nvlink" if name in _NVLINK else "pcie")
    if kind == "nvlink" and name not in _NVLINK:
        raise ModelLoadError(f"emulation.link is nvlink, which {name} does not have: set pcie or ethernet, or leave it out")
    return CARDS[name], _link(kind, kind, _NVLINK[name] if kind == "nvlink" else kind)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that determine the time of a forward."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    parameters: float
    vocabulary: int
    value_bytes: int = 2  # of a weight or a KV number

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of all weights, which a step reads once."""
        return self.parameters * self.value_bytes

    @property
    def entry_bytes(self) -> float:
        """Return the bytes of keys and values of one token in all layers."""
        return 2.0 * self.layers * self.kv_heads * self.head_size * self.value_bytes

    def operations(self, rows: float, looked_at: float) -> float:
        """Return 2 operations a weight and row, and 4 a head's number for each entry that a row looks at."""
        return 2 * self.parameters * rows + 4 * self.layers * self.heads * self.head_size * looked_at


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 6.74e9, 32000),
        ModelShape("llama-2-13b", 40, 5120, 40, 40, 128, 13.02e9, 32000),
        ModelShape("llama-30b", 60, 6656, 52, 52, 128, 32.53e9, 32000),  # arXiv 2302.13971, table 2
        ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 68.98e9, 32000),
        ModelShape("codellama-34b", 48, 8192, 64, 8, 128, 33.74e9, 32000),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 8.03e9, 128256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 70.55e9, 128256),
        ModelShape("antglm-10b", 48, 4096, 32, 32, 128, 10.14e9, 115328),  # arXiv 2312.12728, section 5.1
    )
}


def find_shape(name: str, option: str = "--model") -> ModelShape:
    """Return a model by its name, or of a folder with a ``config.json`` in the layout of transformers.

    Raises:
        ValueError: it is neither, or the file lacks a number; with the name of the ``option``.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name) / "config.json"
    if not path.is_file():
        raise ValueError(f"{option} {name!r} is not known: give a folder with a config.json, or one of {', '.join(MODELS)}")
    try:
        return shape_of(path.parent.name, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{option} {name!r}: {path} does not say what a step's time needs: {error}") from error


def shape_of(name: str, config: dict[str, Any]) -> ModelShape:
    """Return the shape of a decoder of the Llama family from its ``config.json``, without norms and biases.

    Example: 32 layers of 4096 with an MLP of 11008 and 32000 tokens are 32 * (4 * 4096**2 + 3 * 4096 * 11008) and twice
    32000 * 4096 parameters, 6.74 billion.

    Raises:
        KeyError: a number is missing.
    """
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    vocabulary, inner = config["vocab_size"], config["intermediate_size"]
    attention = 2 * hidden * head_size * (heads + kv_heads)
    matrices = 3 if config.get("model_type", "llama") in _GATED else 2
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    parameters = layers * (attention + matrices * hidden * inner) + embeddings
    return ModelShape(name, layers, hidden, heads, kv_heads, head_size, float(parameters), vocabulary)
