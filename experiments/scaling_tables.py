"""The tables of ``outrider bench scaling``: the same on a terminal and in a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Column
from rich.table import Table as RichTable

from experiments.report_cells import Cell, figure, median, repeats
from experiments.report_values import Table, table_of
from experiments.scaling_options import PARTS, PLAIN, called

Results = Mapping[str, Any]
_RATIOS = {
    "plain": "beside plain, one worker", "plain_threads": "beside plain, as many threads", "one": "beside one worker",
    "one_threads": "beside as many threads",
}  # fmt: skip


def tables(results: Results) -> list[Table]:
    """All of a run."""
    return [forms(results), speeds(results), steps(results), memory(results)]


def forms(results: Results) -> Table:
    """Every form with every strategy, after the first token: the paper's comparison is between three of these fields."""
    overall = list(results["overall"].values())
    columns = list(dict.fromkeys(row["form"] for row in overall))
    cells: dict[str, dict[str, Cell]] = {}
    for row in overall:
        cells.setdefault(called(row["strategy"]), {})[row["form"]] = repeats(row["decode_ratio"]["plain"])
    rows = [[Cell(name), *(of.get(form, Cell("")) for form in columns)] for name, of in cells.items()]
    return table_of("times plain decoding on one worker, after the first token", ("", *columns), rows)


def speeds(results: Results) -> Table:
    """A row a form and strategy: speeds of decoding are ratios; whether all outputs are plain decoding's."""
    rows = []
    for entry in results["overall"].values():
        ratio, own = entry["decode_ratio"], entry["strategy"] != PLAIN
        against = [ratio.get(name) if own or name.startswith("plain") else None for name in _RATIOS]
        same = f"{entry['identical']} of {entry['records']}"
        named = [_whole(entry["form"]), called(entry["strategy"]), str(entry["budget"] or ""), same]
        rows.append(
            [
                *map(Cell, named), repeats(entry["tokens_per_s"], 1), median(entry["tokens_per_s_per_device"], 1),
                *(repeats(each) if each else Cell("") for each in against), figure(entry["tokens_per_step"]),
                _joules(entry["j_per_token"]),
            ]
        )  # fmt: skip
    titles = (
        "form", "strategy", "budget", "same as plain", "tokens/s", "a device", *_RATIOS.values(), "tokens per step", "J/token",
    )  # fmt: skip
    return table_of("speeds after the first token; tokens/s with the prefill", titles, rows, keys=2)


def steps(results: Results) -> Table:
    """What a step is made of, in milliseconds."""
    rows = []
    for entry in results["overall"].values():
        ms = entry["ms"]
        parts = [Cell("n/a") if ms[part] is None else figure(ms[part]) for part in PARTS]
        share = Cell(f"{100 * ms['exchange_share']:.1f} %", ms["exchange_share"]) if ms.get("exchange_share") else Cell("")
        named, group = (
            map(Cell, (_whole(entry["form"]), called(entry["strategy"]))),
            (figure(ms.get("rows"), 1), figure(ms.get("balance"))),
        )
        rows.append([*named, *parts, share, *group])
    titles = ("form", "strategy", *PARTS, "share of exchange", "rows of a rank", "balance")
    return table_of("a step in milliseconds", titles, rows, keys=2)


def memory(results: Results) -> Table:
    """Memory of each rank of each form."""
    rows = []
    for form, of in results["forms"].items():
        ranks = Cell(", ".join(f"{size:.0f}" for size in of["rss_mib"]), max(of["rss_mib"]))
        held = [figure(of.get(key), 1) for key in ("weights_mib", "kv_mib", "gpu_mib")]
        rows.append([Cell(_whole(form)), ranks, *held, Cell(of.get("sums", ""))])
    titles = ("form", "process of each rank", "weights of rank 0", "KV slots of rank 0", "GPU of rank 0", "sums go through")
    shown = [at for at in range(len(titles)) if at == 0 or any(row[at].text for row in rows)]
    return table_of("memory in MiB", [titles[at] for at in shown], [[row[at] for at in shown] for row in rows])


def printed(table: Table) -> RichTable:
    """A report's table for a terminal."""
    columns = (
        Column(title, justify="right" if number else "left", overflow="fold")
        for (_, title), number in zip(table.header, table.numeric, strict=True)
    )
    shown = RichTable(*columns, title=table.title)
    for row in table.rows:
        shown.add_row(*(cell.text for cell in row))
    return shown


def _whole(form: str) -> str:
    """A form's label, on one line wherever it stands."""
    return form.replace(" ", "\N{NO-BREAK SPACE}")


def _joules(value: float | str) -> Cell:
    return Cell(value) if isinstance(value, str) else figure(value, 3)
