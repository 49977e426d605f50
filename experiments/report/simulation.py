"""Tables of what ``outrider simulate`` predicts: beside what was measured, beside what papers published, and of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoding.request import PLAIN
from experiments.report.cells import Cell, figure, rounded
from experiments.report.values import Table, table_of

Results = Mapping[str, Any]
_FIGURES = {
    "tokens_per_s": "tokens/s",
    "e2e_ms mean": "end to end, mean (ms)",
    "ttft_ms p50": "TTFT, p50 (ms)",
    "tpot_ms p50": "TPOT, p50 (ms)",
}


def validation(results: Results) -> Table:
    """``experiments.simulation.validation.run``: each load and strategy, as measured, as predicted, and how far that is off."""
    rows = []
    for load, cell in results["cells"].items():
        found = [Cell(load)]
        for name in _FIGURES:
            row = cell["figures"].get(name)
            found.append(
                Cell("") if row is None else Cell(_beside(row["measured"], row["predicted"], row["error"], row["holds"]))
            )
        rows.append([*found, Cell(" ".join(rounded(cell["tokens_per_step"][who], 2) for who in ("measured", "predicted")))])
    return table_of("", ("load, strategy", *_FIGURES.values(), "tokens per step"), rows)


def published(results: Results) -> Table:
    """``experiments.simulation.papers.run``: each figure of a paper and the prediction."""
    rows = []
    for row in results["comparisons"]:
        if "agree" not in row:
            continue
        ends = row["published"] if isinstance(row["published"], list) else [row["published"]]
        rows.append([
            Cell(row["source"]), Cell(row["what"]), Cell("-".join(f"{end:g}" for end in ends)), Cell(f"{row['predicted']:.3g}"),
            Cell("yes" if row["agree"] else "no"), Cell(row.get("why", "")),
        ])  # fmt: skip
    return table_of("", ("source", "of", "published", "predicted", "within 15 %", "why not"), rows)


def deployments(results: Results) -> Table:
    """``outrider simulate``: each deployment under each traffic."""
    titles = (
        "traffic",
        "deployment",
        "strategy",
        "GPUs",
        "p50 (s)",
        "p99 (s)",
        "TTFT p99 (s)",
        "tokens/s",
        "tokens per step",
        "$/M tokens",
    )
    rows = []
    for row in results["rows"]:
        if row["strategy"] == PLAIN and "lookahead" in row["deployment"]:
            continue  # nothing to share: as with one GPU
        names = (row["traffic"], row["deployment"], row["strategy"], str(row["gpus"]))
        seconds = (row["e2e_s"]["p50"], row["e2e_s"]["p99"], row["ttft_s"]["p99"])
        speeds = (figure(row["tokens_per_s"], 0), figure(row["tokens_per_step"]), figure(row["usd_per_million"]))
        rows.append([*map(Cell, names), *map(figure, seconds), *speeds])
    return table_of("", titles, rows, keys=3)


def _beside(measured: float, predicted: float, error: float, holds: bool) -> str:
    digits = 0 if measured >= 100 else 1
    shown = f"{rounded(measured, digits)}, {rounded(predicted, digits)}: {100 * error:+.0f} %"
    return shown if holds else f"**{shown}**"


def form_map(results: Results) -> Table:
    """``experiments.simulation.choice``: by machine and GPUs the fastest form with each number of requests at once, and how fast
    lookahead parallelism is beside the best other form; nothing where a copy of the model does not fit a GPU."""
    requests = list(next(iter(next(iter(results["cells"].values())).values())))
    rows = []
    for place, by_gpus in results["cells"].items():
        for gpus, cells in by_gpus.items():
            rows.append([Cell(place), Cell(gpus), *(_winner(cells[count]) for count in requests)])
    return table_of("", ("", "GPUs", *(f"{count} at once" for count in requests)), rows)


def _winner(kinds: Mapping[str, Mapping[str, Any]]) -> Cell:
    if not kinds:
        return Cell("nothing fits")
    best = next(iter(kinds))
    strategy = "plain" if kinds[best]["strategy"] == PLAIN else kinds[best]["strategy"]
    others = [own["tokens_per_s"] for kind, own in kinds.items() if kind != "lookahead"]
    if "lookahead" not in kinds:
        return Cell(f"{best}, {strategy}")
    lead = kinds["lookahead"]["tokens_per_s"] / max(others)
    return Cell(f"{best}, {strategy} (LP {lead:.2f})", lead)
