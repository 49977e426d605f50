"""What LLMA (Inference with Reference, arXiv 2304.04487) published."""

from __future__ import annotations

from experiments.papers.published import Claim, Paper, PaperTable

_SPEED_COLUMNS = ("plain tokens/s", "LLMA tokens/s", "plain s", "LLMA s", "speed-up")


def _speeds(*rows: tuple[str, tuple[float, ...]]) -> dict[str, dict[str, float]]:
    return {model: dict(zip(_SPEED_COLUMNS, numbers, strict=True)) for model, numbers in rows}


_LENGTHS = PaperTable(
    "table 1",
    "3.1",
    "tokens of a sample",
    {
        "retrieval, test": {"input tokens": 898.8, "output tokens": 122.0},
        "cache, test": {"input tokens": 17.1, "output tokens": 177.3},
    },
)
_BEST = PaperTable(
    "table 2",
    "3.4",
    "match length n and copy length k found by grid search",
    {
        model: dict(zip(("retrieval n", "retrieval k", "cache n", "cache k"), numbers, strict=True))
        for model, numbers in (("7B", (1, 18, 1, 15)), ("13B", (1, 14, 1, 15)), ("30B", (1, 18, 1, 18)))
    },
)
_RETRIEVAL = PaperTable(
    "table 3",
    "3.4",
    "retrieval-augmented generation, 100 samples",
    _speeds(
        ("7B", (23.9, 59.2, 511.2, 206.0, 2.48)),
        ("13B", (18.5, 41.1, 658.4, 296.8, 2.22)),
        ("30B", (4.9, 12.1, 2503.2, 1005.8, 2.49)),
    ),
)
_CACHE = PaperTable(
    "table 4",
    "3.4",
    "generation with cached sessions, 100 samples",
    _speeds(
        ("7B", (24.3, 53.8, 730.8, 329.8, 2.22)),
        ("13B", (19.3, 42.3, 918.4, 419.3, 2.19)),
        ("30B", (5.1, 15.6, 3467.7, 1133.0, 3.06)),
    ),
)
_ROWS_COST = "rejected tokens take time where a device has no arithmetic to spare, as a CPU has none"


def _claims(dataset: str, table: str) -> tuple[Claim, ...]:
    few, many = "n=1 k=15", "n=4 k=15"
    short, long = "n=1 k=5", "n=1 k=20"
    return (
        Claim(table, dataset, "speedup", "best", "plain", "2 to 3 times speed-up over the baseline"),
        Claim(
            "figure 3", dataset, "speedup", few, many, "aggressive triggering (n = 1) gives larger speed-up", otherwise=_ROWS_COST
        ),
        Claim("figure 3", dataset, "speedup", few, short, "longer copy length gives larger speed-up", otherwise=_ROWS_COST),
        Claim(
            "figure 3",
            dataset,
            "speedup",
            long,
            few,
            "the gains plateaued when k grows past 15",
            equal=True,
            tolerance=0.05,
            otherwise=_ROWS_COST,
        ),
        Claim("figure 4", dataset, "triggers", few, many, "smaller n allows more triggering of copying"),
        Claim("figure 4", dataset, "accepted", few, many, "which leads to more accepted tokens"),
        Claim("figure 4", dataset, "steps", few, many, "and less decoding steps", lower=True),
        Claim("figure 4", dataset, "triggers", few, short, "larger k decreases the number of triggering", lower=True),
        Claim("figure 4", dataset, "accepted", few, short, "larger k leads to more accepted tokens"),
        Claim("figure 4", dataset, "steps", few, short, "and less decoding steps", lower=True),
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
    (_LENGTHS, _BEST, _RETRIEVAL, _CACHE),
    (*_claims("retrieval", "table 3"), *_claims("cache", "table 4")),
)
