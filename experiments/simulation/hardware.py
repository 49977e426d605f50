"""GPUs and models as numbers, with their sources."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.loading.cards import CARDS

_GATED = frozenset(("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "codellama"))  # three matrices in an MLP


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


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name. Raises ``ValueError`` with the known names."""
    if name not in GPUS:
        raise ValueError(f"--gpu {name!r} is not known: it is one of {', '.join(GPUS)}")
    return GPUS[name]


def find_shape(name: str) -> ModelShape:
    """Return a model by its name, or of a folder with a ``config.json`` in the layout of transformers.

    Raises:
        ValueError: it is neither, or the file lacks a number.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name) / "config.json"
    if not path.is_file():
        raise ValueError(f"--model {name!r} is not known: give a folder with a config.json, or one of {', '.join(MODELS)}")
    try:
        return shape_of(path.parent.name, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--model {name!r}: {path} does not say what a simulation needs: {error}") from error


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
