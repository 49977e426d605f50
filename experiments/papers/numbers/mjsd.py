"""What the paper on multi-token joint speculative decoding (arXiv 2407.09722) measured, as its tables have it.

Its "greedy" is plain decoding of the large model, token by token from the warped law (top-k 20, top-p 0.9), on which speculative
and SpecTr must not differ from it; it is called ``plain`` here. Batch size 1, at most 128 tokens, one L40; the standard
deviations are over four runs. Speed-ups are left out: they are speeds over that of plain decoding.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from experiments.papers.numbers.published import Claim, Figure, Paper, PaperTable

METHODS = ("plain", "speculative", "bild", "spectr", "mjsd")  # in the order of Table 2
METRICS = {"speed": "tokens/s", "energy": "J/token", "perplexity": "perplexity"}
ROUGE = "ROUGE-L"
HIGHER_IS_BETTER = frozenset(("speed",))

# Table 2. CP: ChatGPT-Prompt, CA: ChatAlpaca, CD: CNN Dailymail; Llama-2-13B with Llama-68M, and OPT-13B with OPT-125m.
_TABLE_2: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {
    "CP, Llama-2": {
        "speed": ((22.6, 0.03), (36.8, 0.53), (34.4, 0.87), (45.1, 1.32), (63.0, 0.20)),
        "energy": ((11.7, 1.56), (6.62, 0.91), (7.45, 0.90), (5.17, 0.88), (3.38, 0.02)),
        "perplexity": ((3.74, 0.14), (3.64, 0.11), (3.15, 0.06), (3.64, 0.08), (2.06, 0.06)),
    },
    "CP, OPT": {
        "speed": ((22.4, 0.48), (33.8, 2.47), (31.5, 1.87), (38.0, 2.20), (55.8, 0.30)),
        "energy": ((13.2, 0.28), (7.48, 0.07), (8.75, 0.13), (6.08, 0.11), (3.61, 0.03)),
        "perplexity": ((5.49, 0.15), (5.47, 0.11), (4.51, 0.09), (5.27, 0.09), (3.00, 0.09)),
    },
    "CA, Llama-2": {
        "speed": ((22.0, 0.15), (31.6, 0.35), (28.8, 0.20), (27.7, 0.29), (44.1, 0.25)),
        "energy": ((11.2, 0.16), (6.98, 0.15), (7.99, 0.15), (7.20, 0.08), (4.72, 0.03)),
        "perplexity": ((2.11, 0.01), (2.13, 0.03), (1.95, 0.03), (2.15, 0.01), (1.88, 0.05)),
    },
    "CA, OPT": {
        "speed": ((23.8, 0.10), (35.6, 0.45), (38.5, 0.93), (28.4, 0.34), (49.6, 0.42)),
        "energy": ((11.3, 0.22), (5.74, 0.11), (5.12, 0.06), (6.24, 0.11), (4.03, 0.02)),
        "perplexity": ((3.28, 0.06), (3.32, 0.10), (2.60, 0.06), (3.16, 0.06), (2.07, 0.03)),
    },
    "CD, Llama-2": {
        "speed": ((21.7, 0.08), (30.7, 0.18), (30.5, 0.21), (25.0, 0.31), (44.2, 0.99)),
        "energy": ((11.3, 0.21), (7.07, 0.19), (7.41, 0.16), (8.22, 0.19), (4.80, 0.12)),
        "perplexity": ((2.88, 0.04), (2.87, 0.08), (2.93, 0.03), (3.06, 0.11), (2.63, 0.10)),
    },
    "CD, OPT": {
        "speed": ((23.3, 0.81), (31.7, 0.91), (30.9, 0.80), (23.7, 0.40), (43.6, 0.33)),
        "energy": ((11.5, 0.14), (6.37, 0.11), (6.71, 0.17), (7.31, 0.17), (4.86, 0.03)),
        "perplexity": ((3.93, 0.14), (3.97, 0.06), (3.74, 0.09), (4.04, 0.07), (3.17, 0.06)),
    },
}
TABLE_2: dict[str, dict[str, dict[str, Figure]]] = {  # column -> metric -> method
    column: {
        metric: {method: Figure(*pair) for method, pair in zip(METHODS, row, strict=True)} for metric, row in metrics.items()
    }
    for column, metrics in _TABLE_2.items()
}

# Table 3, of MJSD: number of beams -> tokens/s, J/token, perplexity.
TABLE_3: dict[str, dict[int, dict[str, Figure]]] = {
    pair: {beams: {metric: Figure(value) for metric, value in zip(METRICS, row, strict=True)} for beams, row in rows.items()}
    for pair, rows in {
        "Llama-2": {2: (55.9, 2.43, 2.44), 4: (59.9, 2.25, 2.12), 6: (60.2, 2.22, 2.14), 8: (61.3, 2.20, 2.10)},
        "OPT": {2: (51.0, 2.50, 3.63), 4: (54.1, 2.32, 3.16), 6: (54.3, 2.36, 3.42), 8: (55.9, 2.30, 3.19)},
    }.items()
}

# Figure 4, of MJSD, is told in words (section 5.2.2): metric, the threshold that they call better, and the worse one.
THRESHOLDS: tuple[tuple[str, float, float, str], ...] = (
    ("speed", 0.0, 1.0, "the efficiency drops when the threshold increases"),
    ("perplexity", 0.1, 1.0, "the perplexity increases when the threshold is close to 1"),
    ("perplexity", 0.0, 1.0, "the perplexity is good when the threshold is 0"),
)

# Table 5: the settings that gave the best perplexity on a validation set.
SETTINGS: dict[str, dict[str, float]] = {
    "speculative": {"num_draft_tokens": 4},
    "spectr": {"num_draft_tokens": 4, "sequences": 4},  # 2 sequences in three of the six columns
    "bild": {"num_draft_tokens": 10, "fallback": 0.9, "rollback": 2.0},  # of "CP, Llama-2"; OPT's fallback is 0.3
    "mjsd": {"num_draft_tokens": 4, "beams": 8, "threshold": 0.1},
}

DATASETS = {
    "prompts": "ChatGPT-Prompts (CP): instructions to play a part",
    "alpaca": "ChatAlpaca (CA): conversations of several turns",
    "cnn": "CNN/Daily Mail (CD): summaries",
}
_SHORT = dict(zip(DATASETS, ("CP", "CA", "CD"), strict=True))
_COLUMNS = {name: [TABLE_2[f"{short}, {pair}"] for pair in ("Llama-2", "OPT")] for name, short in _SHORT.items()}
ABLATED = "prompts"  # the dataset of table 3 and figure 4 here
TASK = "cnn"  # of figure 1: a task whose outputs are compared with what others wrote
BLOCKS = (1, 2, 4, 8)  # of figure 1: tokens that multi-token joint greedy decoding takes at a time
DRAWN = "8 beams, drawn"  # label of MJSD as its published code has it
_ROWS_COST = "drafts, of a fifth of the model's time or more, and their rows take time on a CPU"
_NO_METER = "nothing here counts this machine's energy"
_BEYOND = {"speed": _ROWS_COST, "energy": _NO_METER, "perplexity": ""}
_PAIRS = (
    *((method, METHODS[0]) for method in METHODS[1:]),
    *((METHODS[-1], method) for method in METHODS[1:-1]),
)  # fmt: skip


def _ahead(metric: str, first: Figure, second: Figure) -> int:
    """1 where the first is the better one, -1 where the second is, 0 where they are closer than their spreads together.

    Example: perplexities 3.74 +- 0.14 and 3.64 +- 0.11 are the same: 0.10 is less than 0.25.
    """
    if abs(first.mean - second.mean) <= first.spread + second.spread:
        return 0
    return 1 if (first.mean > second.mean) == (metric in HIGHER_IS_BETTER) else -1


def _compared(
    where: str, dataset: str, metric: str, names: tuple[str, str], sides: tuple[tuple[Figure, Figure], ...]
) -> list[Claim]:
    """What the columns say of two: the better one, or that they are the same; nothing where they contradict each other."""
    lower, (first, second) = metric not in HIGHER_IS_BETTER, names
    signs = {_ahead(metric, *pair) for pair in sides}
    if signs >= {1, -1}:
        return []
    if -1 in signs:
        first, second, sides = second, first, tuple((right, left) for left, right in sides)
    shown = ", ".join(f"{left.mean:g} against {right.mean:g}" for left, right in sides)
    ratios = [right.mean / left.mean if lower else left.mean / right.mean for left, right in sides]
    same = signs == {0}
    near = max((left.spread + right.spread) / min(left.mean, right.mean) for left, right in sides)
    words = f"{first} {'as good as' if same else 'better than'} {second}: {shown}"
    size = None if same else (min(ratios), max(ratios))
    told, against = METRICS[metric], second == METHODS[0] or first == METHODS[-1] or where == "table 3"
    more: dict[str, Any] = {"beyond": _BEYOND[metric], "against": metric == "speed" and against and not same}
    return [Claim(where, dataset, told, first, second, words, same, lower, max(0.02, near), size, **more)]


def beams(count: int) -> str:
    """The label of MJSD with so many beams."""
    return f"{count} beams"


def threshold(value: float) -> str:
    """The label of MJSD with a threshold."""
    return f"threshold {value:g}"


def block(length: int) -> str:
    """The label of multi-token joint greedy decoding of so many tokens at a time."""
    return f"mjgd, blocks of {length}"


def _claims() -> list[Claim]:
    claims = []
    for name, columns in _COLUMNS.items():
        for metric in METRICS:
            for pair in _PAIRS:
                sides = tuple((column[metric][pair[0]], column[metric][pair[1]]) for column in columns)
                claims += _compared("table 2", name, metric, pair, sides)
    for few, many in pairwise((2, 4, 8)):
        for metric in METRICS:
            sides = tuple((rows[many][metric], rows[few][metric]) for rows in TABLE_3.values())
            claims += _compared("table 3", ABLATED, metric, (beams(many), beams(few)), sides)
    for metric, winner, loser, words in THRESHOLDS:
        of, lower = (threshold(winner), threshold(loser)), metric not in HIGHER_IS_BETTER
        claims.append(Claim("figure 4", ABLATED, METRICS[metric], *of, words, lower=lower, beyond=_BEYOND[metric]))
    longer = {
        (1, 2): "from 1 to 2 there is a significant improvement in perplexity",
        (2, 8): "the perplexity continues to decrease when blocks grow further",
    }
    for name in (ABLATED, TASK):
        for (few, many), told in longer.items():
            claims.append(Claim("figure 1", name, METRICS["perplexity"], block(many), block(few), told, lower=True))
    better = "the ROUGE-L score also improves with the length of a block"
    claims.append(Claim("figure 1", TASK, ROUGE, block(8), block(1), better))
    return claims


PAPER = Paper(
    "mjsd",
    "arXiv 2407.09722",
    "Multi-token joint speculative decoding",
    "Llama-2-13B with Llama-68M and OPT-13B with OPT-125M, one L40, batch 1, at most 128 tokens, top-k 20, top-p 0.9",
    DATASETS,
    (
        PaperTable(
            "table 2", "5.2", "the methods; standard deviations over four runs",
            {f"{column}, {METRICS[metric]}": row for column, metrics in TABLE_2.items() for metric, row in metrics.items()},
        ),
        PaperTable(
            "table 3", "5.2.2", "MJSD by number of beams",
            {
                f"{pair}, {told}": {beams(count): row[metric] for count, row in rows.items()}
                for pair, rows in TABLE_3.items() for metric, told in METRICS.items()
            },
        ),
    ),
    tuple(_claims()),
    rows=33,
)  # fmt: skip
