"""What Lookahead Decoding (arXiv 2402.02057), the method of the Jacobi window, published."""

from __future__ import annotations

from typing import Any

from experiments.papers.numbers.published import Claim, Paper, PaperTable, by_column

# Table 3: the tag in the paper, (N, W, G), whether the prompt is a reference, speed-up, compression.
SETTINGS: dict[str, tuple[tuple[int, int, int], bool]] = {
    "(10,1,3) prompt": ((10, 1, 3), True),
    "(5,1,10) prompt": ((5, 1, 10), True),
    "(5,1,30)": ((5, 1, 30), False),
    "(5,1,30) prompt": ((5, 1, 30), True),
    "(5,30,1)": ((5, 30, 1), False),
    "(5,15,15)": ((5, 15, 15), False),
    "(5,15,15) prompt": ((5, 15, 15), True),
}
_TABLE_3 = {
    "plain": (1.00, 1.00),
    "prompt lookup": (1.44, 1.55),
    "(10,1,3) prompt": (1.36, 1.45),
    "(5,1,10) prompt": (1.36, 1.51),
    "(5,1,30)": (1.04, 1.12),
    "(5,1,30) prompt": (1.46, 1.59),
    "(5,30,1)": (1.61, 1.79),
    "(5,15,15)": (1.78, 1.96),
    "(5,15,15) prompt": (1.88, 2.05),
}
ALPHA, STEPS_PER_GUESS = 0.425, 3.106  # figure 4 (b): the law's alpha and f
_COLUMNS = ("speed-up", "S")
_TABLES = (
    PaperTable(
        "table 2",
        "5.3",
        "sampling, LLaMA-2-7B-Chat (ROUGE left out: outputs are compared token by token here)",
        by_column(
            _COLUMNS,
            {
                "cnn, temperature 1": (1.46, 1.64),
                "cnn, temperature 0": (1.57, 1.72),
                "xsum, temperature 1": (1.50, 1.67),
                "xsum, temperature 0": (1.60, 1.77),
            },
        ),
    ),
    PaperTable(
        "table 3",
        "5.4",
        "(N, W, G), with and without the prompt as reference; LLaMA-2-7B-Chat, MT-Bench, A100, FlashAttention",
        by_column(_COLUMNS, _TABLE_3),
    ),
    PaperTable(
        "table 4",
        "5.5",
        "good settings on A100, G = W",
        by_column(("W", "N"), {"7B": (15, 5), "13B": (10, 5), "34B": (7, 5)}),
    ),
    PaperTable(
        "figure 4", "4.2", "the law's alpha and f, LLaMA-2-7B-Chat, MT-Bench", {"7B": {"alpha": ALPHA, "f": STEPS_PER_GUESS}}
    ),
    PaperTable(
        "figure 5", "5.1", "speed-ups over all datasets, one GPU, no FlashAttention", {"all": {"lowest": 1.5, "highest": 2.3}}
    ),
    PaperTable(
        "figure 6",
        "5.2",
        "several GPUs, 7B (bench scaling has this run's)",
        {
            "MT-Bench, one GPU, FlashAttention": {"plain": 1.07, "lookahead": 1.9},
            "TP (DeepSpeed) and PP (Accelerate), plain": {"lowest": 0.75, "highest": 0.82},
            "ClassEval, lookahead parallelism": {"highest": 4.0},
        },
    ),
    PaperTable(
        "figure 8",
        "5.5",
        "speed-ups easily reached on MT-Bench, N = 5",
        {"RTX 3090": {"speed-up": 1.3}, "A100": {"speed-up, more than": 1.5}},
    ),
)
_ROWS_COST = "120 rows take time on a CPU: see the note on a step of so many; S is what compares"
_COST: dict[str, Any] = {"beyond": _ROWS_COST, "against": True}
_ROUNDING = "where the model is not served exactly, rows that are computed together round in another order, and near-ties part"
_COPIES = "where a model copies from its prompt, prompt lookup brings ten tokens a step and an n-gram of N = 5 four"
_WARM = "a reference, too, is looked up by one token here, but the output's own n-grams enter the pool as they come"


def _order(better: str, worse: str, words: str = "", otherwise: str = "") -> Claim:
    up, low = _TABLE_3[better][1], _TABLE_3[worse][1]
    said = f"{words}: {up} against {low}" if words else f"{up} against {low}"
    return Claim("table 3", "mt_bench", "tokens_per_step", better, worse, said, size=(up / low, up / low), otherwise=otherwise)


def _sampling(name: str, fast: float, fewer: float, greedy: float) -> tuple[Claim, ...]:
    return (
        Claim(
            "table 2",
            name,
            "tokens_per_step",
            "temperature 1",
            "plain",
            f"{fewer} times fewer steps when sampling",
            size=(fewer, fewer),
        ),
        Claim(
            "table 2",
            name,
            "tokens_per_step",
            "temperature 0",
            "temperature 1",
            "using sampling gives smaller speed-ups",
            size=(greedy / fewer, greedy / fewer),
        ),
        Claim("table 2", name, "speedup", "temperature 1", "plain", f"{fast} times as fast", size=(fast, fast), **_COST),
        Claim(
            "table 2",
            name,
            "differing",
            "temperature 1",
            "plain",
            "the outputs' quality is that of plain decoding",
            equal=True,
            otherwise=_ROUNDING,
        ),
    )


_CLAIMS = (
    *_sampling("cnn", 1.46, 1.64, 1.72),
    *_sampling("xsum", 1.50, 1.67, 1.77),
    _order("(5,15,15) prompt", "(5,15,15)", "the prompt as reference boosts it further"),
    _order("(5,15,15)", "(5,30,1)", "a tiny verification branch has a lower potential"),
    _order("(5,15,15)", "(5,1,30) prompt", "a minimal lookahead branch is not as good", _WARM),
    _order("(5,30,1)", "(5,1,30)"),
    _order("(5,1,30) prompt", "(5,1,30)"),
    _order("(5,1,30) prompt", "prompt lookup", otherwise=_COPIES),
    _order("prompt lookup", "(5,1,10) prompt", "it checks several tokens where this checks one", _WARM),
    _order("(5,15,15)", "prompt lookup", otherwise=_COPIES),
    Claim("table 3", "mt_bench", "speedup", "(5,15,15)", "plain", "1.78 times as fast", size=(1.78, 1.78), **_COST),
    Claim("figure 4", "mt_bench", "tokens_per_step", "W=15 N=5", "W=1 N=5", "S grows with W = G"),
    Claim("figure 4", "mt_bench", "tokens_per_step", "W=15 N=5", "W=15 N=3", "S grows with N where W is large"),
    Claim("figure 8", "mt_bench", "speedup", "W=15 N=5", "plain", "A100 1.5, RTX 3090 1.3", size=(1.3, 1.5), **_COST),
    *(
        Claim("figure 5", name, "speedup", "lookahead", "plain", "1.5 to 2.3 times as fast", size=(1.5, 2.3), **_COST)
        for name in ("mt_bench", "human_eval", "gsm8k", "mbpp")
    ),
    Claim("figure 5", "all", "tokens_per_step", "human_eval", "mt_bench", "code completion does best: repetitive tokens"),
)  # fmt: skip

PAPER = Paper(
    "jacobi",
    "arXiv 2402.02057",
    "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
    "LLaMA-2-Chat and CodeLlama, 7B to 70B, float16, batch 1, on A100 80 GB; several GPUs: eight A100 40 GB",
    {
        "mt_bench": "MT-Bench: conversations of two turns",
        "human_eval": "HumanEval: code completion",
        "gsm8k": "GSM8K: the first thousand questions",
        "mbpp": "MBPP: code from instructions",
        "cnn": "CNN/Daily Mail: summaries",
        "xsum": "XSum: summaries",
    },
    _TABLES,
    _CLAIMS,
    rows=121,
)
