"""What Alipay's Lookahead (arXiv 2312.12728), the method of the trie, published."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from experiments.papers.numbers.published import Claim, Figure, Paper, PaperTable, by_column

FULL = "full"
FORWARD_S = 1 / 52.4  # its table 4: AntGLM-10B on AntRAG without drafts emits 52.4 tokens a second, one a step
# Tokens per second of AntGLM-10B on AntRAG: its table 5, and table 6 by capacity in multiples of the decoding length.
PARTS = {
    FULL: 280.9,
    "without prompt branches": 234.5,
    "without output branches": 202.0,
    "without pruning": 221.4,
    "without elimination": 234.2,
}
CAPACITIES = {1: 254.5, 2: 258.7, 4: 268.8, 8: 273.3, 16: 280.7, 32: 280.8, 64: 279.5, 128: 278.3}
_METHODS = ("plain", "llma", "parallel", "hierarchical")
_SPEEDS = PaperTable(
    "table 4", "5.2.1", "tokens a second, mean of five runs",
    by_column(_METHODS, {
        "AntRAG, AntGLM-10B": (Figure(52.4, 0.2), Figure(165.4, 3.3), Figure(263.4, 3.3), Figure(280.9, 4.4)),
        "AntRAG, speed-up": (1.00, 3.16, 5.03, 5.36),
        "Dolly, Llama2-13B": (Figure(34.0, 0.3), Figure(50.8, 0.2), Figure(68.9, 0.4), Figure(71.7, 0.9)),
        "Dolly, speed-up": (1.00, 1.49, 2.03, 2.11),
    }),
)  # fmt: skip
_PARTS = PaperTable("table 5", "5.2.3", "tokens a second without a part of the trie", {"AntRAG": dict(PARTS)})
_CAPACITY = PaperTable(
    "table 6",
    "5.2.3",
    "tokens a second by capacity, in decoding lengths",
    {"AntRAG": {f"capacity {capacity}x": speed for capacity, speed in CAPACITIES.items()}},
)
_BATCHES = PaperTable(
    "table 8", "appendix A", "batches",
    by_column(_METHODS, {
        "batch 2, tokens/s": (68.0, 185.2, 274.4, 285.5),
        "batch 2, speed-up": (1.00, 2.72, 4.04, 4.20),
        "batch 4, tokens/s": (88.2, 214.0, 291.2, 299.5),
        "batch 4, speed-up": (1.00, 2.43, 3.30, 3.40),
    }),
)  # fmt: skip
_MEMORY = PaperTable(
    "figure 6",
    "5.2.4",
    "peak memory of the device, and of the trie on the host",
    {
        "GPU": {"GiB, decoding length 1": 20.248, "more with 128, %": 0.6},
        "trie": {"MiB": 260.0},
    },
)
_ONLINE = PaperTable(
    "table 7", "5.3", "latency in service, seconds (not measured here: the scenarios are internal)",
    by_column(("plain", "hierarchical", "speed-up"), {
        "CHART2JSON": (12.97, 2.07, 6.26),
        "Citizen Biz Agent": (1.67, 0.32, 5.21),
        "Enterprise Info QA": (14.01, 2.74, 5.11),
        "Health Suggestion": (12.41, 2.66, 4.66),
        "Medical Report Summary": (3.33, 1.25, 2.66),
    }),
)  # fmt: skip
_ROWS_COST = "rows take time on a CPU: see figure 1 of this run"
_A = "antrag"
_NEVER_FULL = "outputs of so few requests do not fill the trie, so that nothing is pruned or crowded out"


def _faster(where: str, better: str, worse: str, words: str, dataset: str = _A, **more: Any) -> Claim:
    return Claim(where, dataset, "speedup", better, worse, words, beyond=_ROWS_COST, **more)


def _order(dataset: str, table: PaperTable, row: str, suffix: str = "") -> tuple[Claim, ...]:
    """The methods of a row of speed-ups, each against the one before it; and what a CPU can show of it, tokens a step."""
    speeds = {method: value for method, value in table.rows[row].items() if isinstance(value, float)}
    claims = []
    for worse, better in pairwise(_METHODS):
        ratio = speeds[better] / speeds[worse]
        words, of = f"{better} is faster than {worse}", (f"{better}{suffix}", f"{worse}{suffix}")
        claims.append(_faster(table.name, *of, words, dataset, size=(ratio, ratio), against=True))
        claims.append(Claim(table.name, dataset, "tokens_per_step", *of, f"{words}, by tokens a step"))
    return tuple(claims)


def _replayed(where: str, better: str, worse: str, words: str, ratio: float) -> Claim:
    return Claim(where, _A, "tokens/s at 19 ms", better, worse, words, size=(ratio, ratio), otherwise=_NEVER_FULL)


CLAIMS = (
    *_order("antrag", _SPEEDS, "AntRAG, speed-up"),
    *_order("dolly", _SPEEDS, "Dolly, speed-up"),
    *(_replayed("table 5", FULL, part, f"slower {part}", PARTS[FULL] / speed) for part, speed in PARTS.items() if part != FULL),
    _replayed("table 6", "capacity 16x", "capacity 1x", "254.5 against 280.7", CAPACITIES[16] / CAPACITIES[1]),
    Claim("table 6", _A, "tokens/s at 19 ms", "capacity 16x", "capacity 32x", "280.7 and 280.8", equal=True),
    *_order("antrag", _BATCHES, "batch 2, speed-up", ", batch 2"),
    *_order("antrag", _BATCHES, "batch 4, speed-up", ", batch 4"),
    _faster("table 8", "hierarchical", "hierarchical, batch 2", "5.36 alone, 4.20 in batches of two", size=(1.276, 1.276)),
    _faster("table 8", "hierarchical, batch 2", "hierarchical, batch 4", "4.20 of two, 3.40 of four", size=(1.235, 1.235)),
    *(
        Claim(
            "figure 1",
            "device",
            "ms",
            f"128 rows behind {context}",
            f"16 rows behind {context}",
            f"the differences between 16 and 128 rows are negligible with {context} tokens of context",
            equal=True,
            tolerance=0.15,
            beyond=_ROWS_COST,
        )
        for context in (64, 256)
    ),
    _faster("figure 4", "decoding 64 branch 12", "decoding 8 branch 12", "longer decoding lengths are faster", against=True),
    _faster("figure 4", "decoding 64 branch 12", "decoding 64 branch 4", "longer branches are faster", against=True),
    _faster(
        "figure 4",
        "llma branch 48",
        "llma branch 24",
        "LLMA does not gain beyond a branch length of 25",
        equal=True,
        tolerance=0.05,
        against=True,
    ),
    *(
        Claim("figure 5", _A, "tokens_per_step", better, worse, words)
        for better, worse, words in (
            ("decoding 128 branch 12", "decoding 16 branch 12", "a longer decoding length promises a longer EDL"),
            ("decoding 16 branch 12", "parallel 16 branch 12", "hierarchical branches give a longer EDL than parallel ones"),
        )
    ),
    Claim(
        "figure 6",
        "device",
        "peak bytes",
        "decoding length 128",
        "decoding length 1",
        "0.6 % more memory with a decoding length of 128",
        equal=True,
    ),
)

PAPER = Paper(
    "trie",
    "arXiv 2312.12728",
    "Lookahead: An Inference Acceleration Framework for Large Language Model with Lossless Generation Accuracy",
    "AntGLM-10B on AntRAG and Llama2-13B on Dolly, one A100 80 GB, the dev split in the trie before",
    {
        "antrag": "AntRAG, internal: a query and a retrieved document in the prompt, the answers of one product",
        "dolly": "databricks-dolly-15k: open instructions",
    },
    (_SPEEDS, _PARTS, _CAPACITY, _ONLINE, _BATCHES, _MEMORY),
    CLAIMS,
    rows=65,
)
