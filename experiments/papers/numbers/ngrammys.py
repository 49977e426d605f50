"""What The N-Grammys (arXiv 2411.03786) published."""

from __future__ import annotations

from experiments.papers.numbers.published import Claim, Figure, Paper, PaperTable, Value

DATASETS = ("mt_bench", "human_eval", "gsm8k")


def _row(*pairs: tuple[float | None, tuple[float, float]]) -> dict[str, Value]:
    """Tokens per call and speed-up of each dataset; the speed-up with its deviation over three runs."""
    row: dict[str, Value] = {}
    for name, (calls, speedup) in zip(DATASETS, pairs, strict=True):
        if calls is not None:
            row[f"{name} tok/call"] = calls
        row[f"{name} speed-up"] = Figure(*speedup)
    return row


_TABLE_1 = PaperTable(
    "table 1",
    "5.1",
    "tokens per call and wall-time speed-up of (k, w) = (10, 10) and of the fastest (k*, w*)",
    {
        "3B (10,10)": _row((2.17, (2.01, 0.02)), (2.28, (2.11, 0.01)), (2.38, (2.30, 0.02))),
        "3B (k*,w*)": _row((2.36, (2.18, 0.02)), (2.51, (2.34, 0.02)), (2.41, (2.51, 0.01))),  # (25, 14), the largest tried
        "7B lookahead decoding": _row((None, (1.65, 0.0)), (None, (2.25, 0.0)), (None, (1.89, 0.0))),  # as that paper reports it
        "7B REST": {"mt_bench speed-up": 1.69, "human_eval speed-up": 2.12},
        "7B (10,10)": _row((2.13, (1.91, 0.01)), (2.22, (2.04, 0.01)), (2.16, (2.03, 0.03))),
        "7B (k*,w*)": _row((2.13, (1.91, 0.01)), (2.19, (2.05, 0.01)), (2.16, (2.03, 0.03))),
        "13B lookahead decoding": _row((None, (1.51, 0.0)), (None, (2.26, 0.0)), (None, (1.72, 0.0))),
        "13B REST": {"mt_bench speed-up": 1.77, "human_eval speed-up": 2.17},
        "13B (10,10)": _row((2.78, (2.31, 0.01)), (2.89, (2.50, 0.01)), (2.56, (2.21, 0.01))),
        "13B (k*,w*)": _row((2.68, (2.45, 0.02)), (2.91, (2.77, 0.02)), (2.46, (2.32, 0.01))),
    },
)


def _range(column: str) -> tuple[float, float]:
    """Lowest and highest of (10, 10) in a column of table 1, over the paper's models."""
    values = [row[column] for label, row in _TABLE_1.rows.items() if label.endswith("(10,10)")]
    numbers = [value.mean if isinstance(value, Figure) else value for value in values]
    return min(numbers), max(numbers)


def _words(size: tuple[float, float]) -> str:
    return f"{size[0]:.2f} to {size[1]:.2f}"


_ROWS_COST = "rows take time on a CPU: see figure 1 of this run; tokens per call compare"
_SMALL_MODEL = "a model of few parameters says after one token alone nearly what it says after a text, or repeats itself"
_OTHER_CASE = "the paper reports the same of its 3B model, which never was compute-bound"


def _claims(name: str) -> tuple[Claim, ...]:
    wide, narrow = "k=25 w=14", "k=5 w=2"
    calls, fast = (_range(f"{name} {column}") for column in ("tok/call", "speed-up"))
    return (
        Claim("table 1", name, "tokens_per_step", "k=10 w=10", "plain", f"{_words(calls)} tokens per call", size=calls),
        Claim(
            "table 1",
            name,
            "speedup",
            "k=10 w=10",
            "plain",
            f"{_words(fast)} times as fast",
            size=fast,
            beyond=_ROWS_COST,
            against=True,
        ),
        Claim("figure 5", name, "tokens_per_step", wide, narrow, "tokens per call increase with either k or w"),
        Claim("figure 3", name, "speedup", "best", wide, "the largest block is not the fastest (7B, 13B)", beyond=_OTHER_CASE),
        Claim(
            "figure 4",
            name,
            "accepted length",
            "context",
            "bigram",
            "the context n-gram speculates further into the future; the bigram is ineffective for larger w",
            otherwise=_SMALL_MODEL,
        ),
        Claim(
            "figure 4",
            name,
            "accepted rank",
            "bigram",
            "context",
            "the bigram's rank distribution is heavy-tailed beside the context's",
            otherwise=_SMALL_MODEL,
        ),
    )


def _top_k(name: str) -> tuple[Claim, ...]:
    return (
        Claim(
            "figure 2", name, "tokens_per_step", "bigram k=25 w=1", "bigram k=1 w=1", "the model's token is often in the top-k"
        ),
        Claim("figure 2", name, "tokens_per_step", "bigram k=25 w=1", "unigram k=25 w=1", "bigram above unigram (drawn)"),
        Claim("figure 2", name, "tokens_per_step", "bigram k=25 w=2", "bigram k=25 w=1", "gains comparing w = 1 to w = 2"),
        Claim("figure 2", name, "gain", "w=1 to w=2", "w=2 to w=3", "but diminishing gains going to w = 3"),
    )


PAPER = Paper(
    "ngrammys",
    "arXiv 2411.03786",
    "The N-Grammys: Accelerating Autoregressive Inference with Learning-Free Batched Speculation",
    "Phi-3 (3B), Mistral 7B and Vicuna 13B on one A100 40 GB, bfloat16, greedy, three runs",
    {
        "mt_bench": "MT-Bench: conversations of two turns",
        "human_eval": "HumanEval: code completion",
        "gsm8k": "GSM8K: questions of school mathematics",
    },
    (_TABLE_1,),
    (
        *(claim for name in DATASETS for claim in _claims(name)),
        *(claim for name in ("mt_bench", "human_eval") for claim in _top_k(name)),
        *(
            Claim("table 1", name, "speedup", *of, f"{up} against {low} (7B)", size=(up / low, up / low), beyond=_ROWS_COST)
            for name, of, up, low in (
                ("mt_bench", ("k=10 w=10", "lookahead decoding"), 1.91, 1.65),
                ("human_eval", ("lookahead decoding", "k=10 w=10"), 2.25, 2.04),
                ("gsm8k", ("k=10 w=10", "lookahead decoding"), 2.03, 1.89),
            )
        ),
    ),
    rows=101,
)
