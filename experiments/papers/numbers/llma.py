"""What LLMA (Inference with Reference, arXiv 2304.04487) published."""

from __future__ import annotations

from typing import Any

from experiments.papers.numbers.published import Claim, Paper, PaperTable, by_column

_SPEED_COLUMNS = ("plain tokens/s", "LLMA tokens/s", "plain s", "LLMA s", "speed-up")
_LENGTHS = PaperTable(
    "table 1",
    "3.1",
    "tokens of a sample",
    by_column(("input tokens", "output tokens"), {"retrieval, test": (898.8, 122.0), "cache, test": (17.1, 177.3)}),
)
_BEST = PaperTable(
    "table 2",
    "3.4",
    "match length n and copy length k found by grid search",
    by_column(
        ("retrieval n", "retrieval k", "cache n", "cache k"),
        {"7B": (1, 18, 1, 15), "13B": (1, 14, 1, 15), "30B": (1, 18, 1, 18)},
    ),
)
_SPEEDS = tuple(
    PaperTable(name, "3.4", title, by_column(_SPEED_COLUMNS, dict(zip(("7B", "13B", "30B"), rows, strict=True))))
    for name, title, rows in (
        ("table 3", "retrieval-augmented generation, 100 samples", (
            (23.9, 59.2, 511.2, 206.0, 2.48), (18.5, 41.1, 658.4, 296.8, 2.22), (4.9, 12.1, 2503.2, 1005.8, 2.49),
        )),
        ("table 4", "generation with cached sessions, 100 samples", (
            (24.3, 53.8, 730.8, 329.8, 2.22), (19.3, 42.3, 918.4, 419.3, 2.19), (5.1, 15.6, 3467.7, 1133.0, 3.06),
        )),
    )
)  # fmt: skip
_ROWS_COST = "rejected tokens take time on a CPU: see the note on a step of 16 rows"


def _claims(dataset: str, table: str, size: tuple[float, float]) -> tuple[Claim, ...]:
    cost: dict[str, Any] = {"beyond": _ROWS_COST, "against": True}
    few, many = "n=1 k=15", "n=4 k=15"
    short, long = "n=1 k=5", "n=1 k=20"
    faster = (
        (few, many, "aggressive triggering (n = 1) gives larger speed-up"),
        (few, short, "longer copy length gives larger speed-up"),
    )
    counted = (
        ("triggers", many, "smaller n allows more triggering of copying", False),
        ("accepted", many, "which leads to more accepted tokens", False),
        ("steps", many, "and less decoding steps", True),
        ("triggers", short, "larger k decreases the number of triggering", True),
        ("accepted", short, "larger k leads to more accepted tokens", False),
        ("steps", short, "and less decoding steps", True),
    )
    plateau = "the gains plateaued when k grows past 15"
    return (
        Claim(table, dataset, "speedup", "best", "plain", "2 to 3 times speed-up over the baseline", size=size, **cost),
        *(Claim("figure 3", dataset, "speedup", better, worse, words, **cost) for better, worse, words in faster),
        Claim("figure 3", dataset, "speedup", long, few, plateau, equal=True, tolerance=0.05, **cost),
        *(Claim("figure 4", dataset, metric, few, worse, words, lower=lower) for metric, worse, words, lower in counted),
    )


PAPER = Paper(
    "llma",
    "arXiv 2304.04487",
    "Inference with Reference: Lossless Acceleration of Large Language Models",
    "LLaMA 7B and 13B on one V100 32 GB, 30B on four, float16, batch 1, along davinci-003's outputs (target-guided simulation)",
    {
        "retrieval": "MS-MARCO queries with ten retrieved passages in the prompt, which are the references",
        "cache": "MS-MARCO queries, with the answers to four similar queries as references that are not in the prompt",
    },
    (_LENGTHS, _BEST, *_SPEEDS),
    (*_claims("retrieval", "table 3", (2.22, 2.49)), *_claims("cache", "table 4", (2.19, 3.06))),
    rows=16,
)
