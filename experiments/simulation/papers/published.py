"""What papers published of the speed of GPUs that are not at hand, for ``experiments.simulation.papers.run``."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.simulation.hardware import GPUS, MODELS, Gpu, ModelShape

LLMA, TRIE, JACOBI = "arXiv 2304.04487", "arXiv 2312.12728", "arXiv 2402.02057"

LLAMA_30B = ModelShape("llama-30b", 60, 6656, 52, 52, 128, 32.53e9, 32000)  # arXiv 2302.13971, table 2


@dataclass(frozen=True, slots=True)
class LlmaRow:
    """A row of LLMA's table 3, retrieval-augmented generation on V100s, with its setting of table 2 (n is 1 everywhere)."""

    model: ModelShape
    copy_length: int  # k
    gpus: int  # more than one: layers on one after the other, by accelerate
    baseline: float  # tokens a second
    speedup: float


LLMA_TABLE_3 = (
    LlmaRow(MODELS["llama-2-7b"], 18, 1, 23.9, 2.48),  # the first LLaMA has the same shape
    LlmaRow(MODELS["llama-2-13b"], 14, 1, 18.5, 2.22),
    LlmaRow(LLAMA_30B, 18, 4, 4.9, 2.49),
)
LLMA_GPU: Gpu = GPUS["V100-32"]

# Table 4 of the trie's paper, one A100 of 80 GB: tokens a second of plain decoding, and speed-ups.
TRIE_GPU: Gpu = GPUS["A100-80"]
TRIE_MODEL: ModelShape = MODELS["antglm-10b"]
TRIE_BASELINE = 52.4
TRIE_SPEEDUPS = {"llma": 3.16, "trie": 5.36}
TRIE_OTHER_MODEL, TRIE_OTHER_BASELINE = MODELS["llama-2-13b"], 34.0


@dataclass(frozen=True, slots=True)
class JacobiRow:
    """A row of table 3 of Lookahead Decoding: 7B on MT-Bench, one A100, FlashAttention."""

    setting: str
    rows: int  # of a step, the root included: (W + G) (N - 1) and 1
    compression: float  # S, tokens a step
    speedup: float


JACOBI_TABLE_3 = (
    JacobiRow("prompt lookup, 10 tokens", 11, 1.55, 1.44),
    JacobiRow("N 10, W 1, G 3, prompt", 37, 1.45, 1.36),
    JacobiRow("N 5, W 1, G 10, prompt", 45, 1.51, 1.36),
    JacobiRow("N 5, W 1, G 30", 125, 1.12, 1.04),
    JacobiRow("N 5, W 1, G 30, prompt", 125, 1.59, 1.46),
    JacobiRow("N 5, W 30, G 1", 125, 1.79, 1.61),
    JacobiRow("N 5, W 15, G 15", 121, 1.96, 1.78),
    JacobiRow("N 5, W 15, G 15, prompt", 121, 2.05, 1.88),
)
JACOBI_GPU: Gpu = GPUS["A100-80"]  # of table 3; the eight of section 5.2 are below
SHARED_GPU: Gpu = GPUS["A100-40"]
SHARED_MODELS = (MODELS["llama-2-7b"], MODELS["llama-2-13b"])
SLOWDOWN = (0.75, 0.82)  # section 5.2: tensor parallelism (DeepSpeed) and pipelines (accelerate), against one GPU
LOOKAHEAD_ROWS, LOOKAHEAD_SPEEDUP = 121, 4.0  # table 4 for 7B; section 5.2, ClassEval, eight GPUs, against plain decoding
