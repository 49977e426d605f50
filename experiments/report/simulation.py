"""Tables of ``outrider simulate``: predictions beside measurements and papers, and of machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.decoding.request import PLAIN
from outrider.experiments.report.values import Table, figure, rounded, table_of

Results = Mapping[str, Any]
_FIGURES = {
    "tokens_per_s": "tokens/s",
    "e2e_ms mean": "end to end, mean (ms)",
    "ttft_ms p50": "TTFT, p50 (ms)",
    "tpot_ms p50": "TPOT, p50 (ms)",
}


def validation(results: Results) -> Table:
    """Each load and strategy, as measured, as predicted, and the error; bold if it is too large."""
    rows = []
    for load, cell in results["cells"].items():
        shown = (_beside(cell["figures"][name]) if name in cell["figures"] else "" for name in _FIGURES)
        rows.append((load, *shown, " ".join(figure(cell["tokens_per_step"][who]) for who in ("measured", "predicted"))))
    return table_of("", ("load, strategy", *_FIGURES.values(), "tokens per step"), rows)


def _beside(row: Mapping[str, Any]) -> str:
    digits = 0 if row["measured"] >= 100 else 1
    shown = f"{rounded(row['measured'], digits)}, {rounded(row['predicted'], digits)}: {100 * row['error']:+.0f} %"
    return shown if row["holds"] else f"**{shown}**"


def published(results: Results) -> Table:
    """Each figure of a paper and the prediction."""
    rows = []
    for row in results["comparisons"]:
        if "agree" in row:
            ends = row["published"] if isinstance(row["published"], list) else [row["published"]]
            predicted, agree = f"{row['predicted']:.3g}", "yes" if row["agree"] else "no"
            rows.append((row["source"], row["what"], "-".join(f"{end:g}" for end in ends), predicted, agree, row.get("why", "")))
    return table_of("", ("source", "of", "published", "predicted", "within 15 %", "why not"), rows)


def deployments(results: Results) -> Table:
    """Each deployment under each traffic."""
    rows = []
    for row in results["rows"]:
        if row["strategy"] == PLAIN and "lookahead" in row["deployment"]:
            continue  # plain decoding has no drafts to share: as with one GPU
        names = (row["traffic"], row["deployment"], row["strategy"], str(row["gpus"]))
        seconds = (row["e2e_s"]["p50"], row["e2e_s"]["p99"], row["ttft_s"]["p99"])
        speeds = (figure(row["tokens_per_s"], 0), figure(row["tokens_per_step"]), figure(row["usd_per_million"]))
        rows.append((*names, *map(figure, seconds), *speeds))
    times = ("p50 (s)", "p99 (s)", "TTFT p99 (s)")
    titles = ("traffic", "deployment", "strategy", "GPUs", *times, "tokens/s", "tokens per step", "$/M tokens")
    return table_of("", titles, rows)


def form_map(results: Results) -> Table:
    """By machine and GPUs the fastest form for each number of requests at once, and lookahead parallelism's share of it."""
    requests = list(next(iter(next(iter(results["cells"].values())).values())))
    rows = [
        (place, gpus, *(_winner(cells[count]) for count in requests))
        for place, by_gpus in results["cells"].items()
        for gpus, cells in by_gpus.items()
    ]
    return table_of("", ("", "GPUs", *(f"{count} at once" for count in requests)), rows)


def _winner(kinds: Mapping[str, Mapping[str, Any]]) -> str:
    if not kinds:
        return "nothing fits"
    best = next(iter(kinds))
    shown = f"{best}, {'plain' if kinds[best]['strategy'] == PLAIN else kinds[best]['strategy']}"
    if "lookahead" not in kinds:
        return shown
    others = [own["tokens_per_s"] for kind, own in kinds.items() if kind != "lookahead"]
    return f"{shown} (LP {kinds['lookahead']['tokens_per_s'] / max(others):.2f})"


def answer(results: Results) -> Table:
    """Return the deployment that ``--find`` found."""
    return table_of("", ("what was found",), [[line] for line in results.get("answer") or ()])
