"""A run of ``outrider bench scaling`` beside figures 6 and 7 of Lookahead Decoding (arXiv 2402.02057)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from decoding.request import PLAIN
from experiments.papers.beside import Found, Rows, beside
from experiments.papers.numbers.jacobi import PAPER as JACOBI
from experiments.papers.numbers.published import Claim, Figure, Paper, figure_of

_FIGURE = "figure 6"
_ALL = "all"
_METRIC = "times plain decoding on one worker"
_CORES = (
    "two cores of one machine read their parts at once, and a sum goes through shared memory in microseconds; eight GPUs launch "
    "each kernel anew for an eighth of the work"
)
_ROWS = "rows take time on a CPU, which has no arithmetic to spare: a second rank's rows cost what they bring"


def _claim(better: str, worse: str, words: str, beyond: str, size: tuple[float, float] | None = None) -> Claim:
    return Claim("figures 6, 7", _ALL, _METRIC, better, worse, words, size=size, beyond=beyond)


PAPER = Paper(
    "scaling",
    JACOBI.source,
    JACOBI.title,
    "LLaMA-2-Chat and CodeLlama, 7B and 13B, float16, batch 1, on a DGX of eight A100 40 GB with NVLink; TP by DeepSpeed, PP by "
    "accelerate, both decoding one token a step",
    {_ALL: "MT-Bench, HumanEval and ClassEval"},
    tuple(replace(table, title="several GPUs, 7B") for table in JACOBI.tables if table.name == _FIGURE),
    (
        _claim("one, plain", "tensor, plain", "TP slows decoding down: 0.75 to 0.82 times one GPU", _CORES, (1 / 0.82, 1 / 0.75)),
        _claim(
            "one, plain", "pipeline, plain", "PP slows decoding down: 0.75 to 0.82 times one GPU", _CORES, (1 / 0.82, 1 / 0.75)
        ),
        _claim("one, jacobi", "one, plain", "1.9 against 1.07 times, one GPU with FlashAttention", _ROWS, (1.9 / 1.07,) * 2),
        _claim("lookahead, jacobi", "one, jacobi", "several GPUs reduce the latency further, to 4 times on ClassEval", _ROWS),
        _claim("lookahead, jacobi", "tensor, plain", "LP with its strategy is ahead of TP that decodes one token a step", _ROWS),
        _claim(
            "lookahead, jacobi", "pipeline, plain", "LP with its strategy is ahead of PP that decodes one token a step", _ROWS
        ),
    ),
)


def beside_figures(results: Mapping[str, Any], dtype: str, device: str) -> dict[str, Any]:
    """What a run says of the paper, in the form of ``experiments.papers.beside``.

    Args:
        results: with ``overall`` and ``workloads``. Of several numbers of workers, the largest is compared.
        dtype: of the run.
        device: ``cpu`` or ``cuda``.
    """
    overall = results["overall"]
    most = max(row["workers"] for row in overall.values())
    rows = [row for row in overall.values() if row["workers"] in (1, most)]
    found = Found({_ALL: _measures(rows)}, {_FIGURE: _figure_rows(rows, results["workloads"], overall)})
    cores = f"{most} processes with a core each" if device == "cpu" else f"{most} GPUs"
    found.notes.append(
        f"Here: {cores}, {dtype}; speeds are of tokens after the first, against plain decoding on one worker. Plain decoding on "
        f"as many threads stands beside them, which the paper has no like of."
    )
    told = beside(PAPER, found, {}, device)
    return {key: told[key] for key in ("paper", "claims", "tables", "verdicts", "notes")}


def _called(strategy: str) -> str:
    return "plain" if strategy == PLAIN else strategy


def _measures(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Figure]]:
    found: dict[str, dict[str, Figure]] = {}
    for row in rows:  # the first stands for a method that ran with several options
        name = _called(row["strategy"]).partition(":")[0]
        found.setdefault(f"{row['kind']}, {name}", {_METRIC: figure_of(row["decode_ratio"]["plain"])})
    return found


def _figure_rows(rows: Sequence[Mapping[str, Any]], workloads: Mapping[str, Any], overall: Mapping[str, Any]) -> Rows:
    """In the columns of the paper: plain decoding and its method, lowest and highest over the workloads."""
    labels = {id(row): label for label, row in overall.items()}
    base = {name: statistics.median(next(iter(of["entries"].values()))["decode_tokens_per_s"]) for name, of in workloads.items()}
    found: dict[str, dict[str, float | Figure]] = {}
    for row in rows:
        if _called(row["strategy"]) not in ("plain", "jacobi"):
            continue
        rates = {name: of["entries"][labels[id(row)]]["decode_tokens_per_s"] for name, of in workloads.items()}
        ratios = [statistics.median(rates[name]) / base[name] for name in rates]
        found[labels[id(row)]] = {"lowest": min(ratios), "highest": max(ratios)}
    return found
