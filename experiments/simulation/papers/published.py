"""What papers published of the speed of GPUs that are not at hand, for ``experiments.simulation.papers.run``."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.papers.numbers import jacobi, llma, trie
from experiments.simulation.hardware import GPUS, MODELS, Gpu, ModelShape

LLMA, TRIE, JACOBI = llma.PAPER.source, trie.PAPER.source, jacobi.PAPER.source

LLAMA_30B = ModelShape("llama-30b", 60, 6656, 52, 52, 128, 32.53e9, 32000)  # arXiv 2302.13971, table 2


@dataclass(frozen=True, slots=True)
class LlmaRow:
    """A row of LLMA's table 3, retrieval-augmented generation on V100s, with its setting of table 2 (n is 1 everywhere)."""

    model: ModelShape
    copy_length: int  # k
    gpus: int  # more than one: layers on one after the other, by accelerate
    baseline: float  # tokens a second
    speedup: float


_LLMA_MODELS = {"7B": (MODELS["llama-2-7b"], 1), "13B": (MODELS["llama-2-13b"], 1), "30B": (LLAMA_30B, 4)}  # 7B: the same shape
LLMA_TABLE_3 = tuple(
    LlmaRow(
        model,
        int(llma.PAPER.number("table 2", size, "retrieval k")),
        gpus,
        llma.PAPER.number("table 3", size, "plain tokens/s"),
        llma.PAPER.number("table 3", size, "speed-up"),
    )
    for size, (model, gpus) in _LLMA_MODELS.items()
)
LLMA_GPU: Gpu = GPUS["V100-32"]

# Table 4 of the trie's paper, one A100 of 80 GB: tokens a second of plain decoding, and speed-ups.
TRIE_GPU: Gpu = GPUS["A100-80"]
TRIE_MODEL: ModelShape = MODELS["antglm-10b"]
TRIE_BASELINE = trie.PAPER.number("table 4", "AntRAG, AntGLM-10B", "plain")
TRIE_SPEEDUPS = {
    "llma": trie.PAPER.number("table 4", "AntRAG, speed-up", "llma"),
    "trie": trie.PAPER.number("table 4", "AntRAG, speed-up", "hierarchical"),
}
TRIE_OTHER_MODEL = MODELS["llama-2-13b"]
TRIE_OTHER_BASELINE = trie.PAPER.number("table 4", "Dolly, Llama2-13B", "plain")


@dataclass(frozen=True, slots=True)
class JacobiRow:
    """A row of table 3 of Lookahead Decoding: 7B on MT-Bench, one A100, FlashAttention."""

    setting: str
    rows: int  # of a step, the root included: (W + G) (N - 1) and 1
    compression: float  # S, tokens a step
    speedup: float


def _jacobi_row(label: str, setting: str, rows: int) -> JacobiRow:
    compression, speedup = (jacobi.PAPER.number("table 3", label, column) for column in ("S", "speed-up"))
    return JacobiRow(setting, rows, compression, speedup)


JACOBI_TABLE_3 = (
    _jacobi_row("prompt lookup", "prompt lookup, 10 tokens", 11),
    *(
        _jacobi_row(label, f"N {n}, W {w}, G {g}{', prompt' if prompt else ''}", (w + g) * (n - 1) + 1)
        for label, ((n, w, g), prompt) in jacobi.SETTINGS.items()
    ),
)
JACOBI_GPU: Gpu = GPUS["A100-80"]  # of table 3; the eight of section 5.2 are below
SHARED_GPU: Gpu = GPUS["A100-40"]
SHARED_MODELS = (MODELS["llama-2-7b"], MODELS["llama-2-13b"])
SLOWDOWN = (0.75, 0.82)  # section 5.2: tensor parallelism (DeepSpeed) and pipelines (accelerate), against one GPU
LOOKAHEAD_ROWS, LOOKAHEAD_SPEEDUP = 121, 4.0  # table 4 for 7B; section 5.2, ClassEval, eight GPUs, against plain decoding
