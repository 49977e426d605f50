"""What ``outrider bench draft-models`` prints: its own figures, and the paper's beside them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from experiments.draft_models_agreement import summed
from experiments.draft_models_paper import METHODS, METRICS, TABLE_1, TABLE_2, TABLE_3
from experiments.record import NOT_METERED


def tables(results: Mapping[str, Any]) -> list[Table]:
    """All that there is something for."""
    shown = [methods_table(results), paper_table(results)]
    if results["ablations"]:
        shown += [ablation_table(results, "beams"), ablation_table(results, "thresholds")]
    if results["batches"]:
        shown.append(batches_table(results["batches"]))
    return [*shown, directions_table(results["paper"])]


def methods_table(results: Mapping[str, Any]) -> Table:
    """A row a method."""
    titles = (
        "tok/s",
        "decode",
        "speed-up",
        "min-max",
        "tok/step",
        "accepted",
        "ms: draft + target + rest",
        "J/token",
        "net",
        "ppl",
    )
    shown = Table(Column("method", overflow="fold"), *(Column(title, justify="right") for title in titles), "output")
    for label, row in results["methods"].items():
        ms = row["ms"]
        shown.add_row(
            label,
            _middle(row["tokens_per_s"], 1),
            _middle(row["decode_tokens_per_s"], 1),
            _middle(row["speedup"]),
            f"{min(row['speedup']):.2f}-{max(row['speedup']):.2f}",
            f"{row['tokens_per_step']:.2f}",
            "" if row["acceptance"] is None else f"{row['acceptance']:.0%}",
            f"{ms['draft']:.2f} + {ms['target']:.2f} + {ms['rest']:.2f}",
            _middle(row["energy"]["j_per_token"], 3) + (" (coarse)" if _metered(row) and row["energy_coarse"] else ""),
            _middle(row["energy"]["net_j_per_token"], 3),
            _spread(row["perplexity"]),
            _output(row),
        )
    return shown


def paper_table(results: Mapping[str, Any]) -> Table:
    """Table 2 with a column of this run's."""
    shown = Table("paper, Table 2", "metric", *(Column(column, justify="right") for column in (*TABLE_2, "here")))
    own = {row["paper"]: row for row in reversed(list(results["methods"].values())) if row["paper"] is not None}
    for metric, unit in METRICS.items():
        for method in METHODS:
            there = [metrics[metric][method] for metrics in TABLE_2.values()]
            cells = [f"{figure.mean:g} ± {figure.spread:g}" for figure in there]
            shown.add_row(method, unit, *cells, _spread(_values(own[method], metric)) if method in own else "")
    return shown


def ablation_table(results: Mapping[str, Any], part: str) -> Table:
    """MJSD by number of beams or threshold, with the paper's numbers where it has them."""
    shown = Table(
        f"mjsd, {part}", "tok/s", "J/token", "ppl", "tok/step", *(f"paper, {pair}" for pair in TABLE_3 if part == "beams")
    )
    for value, label in results["ablations"][part].items():
        row = results["methods"][label]
        there = []
        if part == "beams":
            cells = [pair.get(int(value)) for pair in TABLE_3.values()]
            there = ["" if cell is None else ", ".join(f"{cell[metric].mean:g}" for metric in METRICS) for cell in cells]
        own = [_spread(_values(row, metric)) for metric in METRICS]
        shown.add_row(value, *own, f"{row['tokens_per_step']:.2f}", *there)
    return shown


def batches_table(batches: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Table:
    """Table 1: energy and time of a forward by its batch size, relative to one request as well."""
    titles = (
        "J/run",
        "J/input",
        "s/run",
        "s/input",
        "relative: J/run, s/run",
        "paper: J/run, J/input, s/run, s/input",
        "relative",
    )
    shown = Table("batch", *(Column(title, justify="right") for title in titles))
    first = next(iter(batches))
    for size, row in batches.items():
        paper = TABLE_1.get(int(size))
        there = (
            ""
            if paper is None
            else ", ".join(f"{paper[key]:g}" for key in ("j_per_run", "j_per_input", "s_per_run", "s_per_input"))
        )
        base = TABLE_1.get(int(first))
        relative = (
            "" if paper is None or base is None else ", ".join(f"{paper[k] / base[k]:.2f}" for k in ("j_per_run", "s_per_run"))
        )
        shown.add_row(
            size,
            _middle(row["j_per_run"], 4),
            _middle(row["j_per_input"], 4),
            _middle(row["s_per_run"], 5),
            _middle(row["s_per_input"], 5),
            ", ".join(_relative(row[key], batches[first][key]) for key in ("j_per_run", "s_per_run")),
            there,
            relative,
        )
    return shown


def directions_table(paper: Mapping[str, Any]) -> Table:
    """Who is better of each two: in the columns of the paper, and here."""
    shown = Table("comparison", "metric", "better in the paper (columns)", "better here", Column("agrees with", justify="right"))
    for part, rows in paper["comparisons"].items():
        for row in summed(rows):
            there = ", ".join(f"{name} ({count})" for name, count in sorted(row["paper"].items(), key=lambda item: -item[1]))
            agrees = NOT_METERED if row["agree"] is None else f"{row['agree']} of {row['columns']}"
            shown.add_row(f"{part}: {' / '.join(row['of'])}", row["metric"], there, row["here"] or NOT_METERED, agrees)
    return shown


def lines(results: Mapping[str, Any]) -> list[str]:
    """What the tables rest on, and how much of the paper this run agrees with."""
    told, paper, parameters = results["prompts"], results["paper"], results["parameters"]
    sizes = f"target {parameters['target']:,} parameters"
    if "draft" in parameters:
        sizes += f", draft model {parameters['draft']:,} ({parameters['draft'] / parameters['target']:.0%})"
    return [
        sizes,
        *_drafting(results),
        *_perplexities(results),
        f"{told['prompts']} prompts, perplexity over the {told['finished_by_all']} that all methods finished",
        f"energy: {results['energy_source']}",
        f"{paper['agree']} of {paper['told']} comparisons go as in {paper['source']}",
    ]


def _drafting(results: Mapping[str, Any]) -> list[str]:
    """What a draft costs: the reason where a method is not as fast as its tokens per step."""
    rows = results["methods"]
    plain = sum(rows[results["baseline"]]["ms"][part] for part in ("draft", "target", "rest"))
    costs = [f"{label} {row['ms']['draft'] / plain:.2f}" for label, row in rows.items() if row["paper"] not in (None, "plain")]
    return [f"drafting for a step, in steps of plain decoding: {', '.join(costs)}"] if costs and plain else []


def _perplexities(results: Mapping[str, Any]) -> list[str]:
    """MJSD beside plain decoding with the same choice of the target's own tokens."""
    rows, told = results["methods"], []
    for label, plain in (("mjsd", results["baseline"]), ("mjsd, greedy", "greedy")):
        if label in rows and plain in rows:
            told.append(f"{label} {_spread(rows[label]['perplexity'])}, {plain} {_spread(rows[plain]['perplexity'])}")
    return [f"perplexity: {'; '.join(told)}"] if told else []


def _metered(row: Mapping[str, Any]) -> bool:
    return NOT_METERED not in row["energy"]["j_per_token"]


def _values(row: Mapping[str, Any], metric: str) -> list[float | None]:
    if metric == "energy":
        return [None if value == NOT_METERED else value for value in row["energy"]["j_per_token"]]
    values: list[float | None] = row["tokens_per_s" if metric == "speed" else "perplexity"]
    return values


def _output(row: Mapping[str, Any]) -> str:
    """What its texts are, beside those of plain decoding."""
    if row["identical"] is not None:
        return f"{row['identical']['same']}/{row['identical']['of']} identical"
    return "same law" if row["lossless"] else "lossy"


def _known(values: Sequence[float | str | None]) -> list[float]:
    return [value for value in values if isinstance(value, float | int)]


def _middle(values: Sequence[float | str | None], digits: int = 2) -> str:
    known = _known(values)
    return f"{statistics.median(known):.{digits}f}" if known else NOT_METERED


def _spread(values: Sequence[float | None]) -> str:
    """Mean and standard deviation, as the paper's."""
    known = _known(values)
    if not known:
        return NOT_METERED
    return f"{statistics.fmean(known):.3g}" + (f" ± {statistics.stdev(known):.2g}" if len(known) > 1 else "")


def _relative(values: Sequence[float | None], base: Sequence[float | None]) -> str:
    mine, other = _known(values), _known(base)
    return f"{statistics.median(mine) / statistics.median(other):.2f}" if mine and other else NOT_METERED
