"""The table of ``experiments.node_faults``: what was lost or changed, what came of the answers, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.report_cells import Cell
from experiments.report_values import Table, table_of

_NAMES = {
    "engine": "the machine of an engine, another one comes after 10 s",
    "head": "the head's, back after 10 s",
    "redis": "Redis of the shared memory, back after 10 s",
    "upgrade": "other options of API and engines, and back",
    "scale": "a third engine on a further machine, and back to two",
    "keys": "the tenant's key",
    "api": "the API's machine, started again at once",
}
_TIMES = {
    "noticed_s": "noticed after",
    "running_after_s": "Serve runs again after",
    "meanwhile": "meanwhile `shared_cache` is",
    "whole_after_s": "whole again after",
    "upgrade_s": "there",
    "rollback_s": "back",
    "out_s": "there",
    "in_s": "back",
    "new_key_works_s": "the new one works after",
    "old_key_refused_s": "the old one is refused after",
    "nobody_answers_s": "nobody is answered for",
}


def node_faults(results: Mapping[str, Any]) -> Table:
    """A row for each fault."""
    rows = []
    for name, told in results["faults"].items():
        took = ", ".join(f"{words} {_shown(told[key])}" for key, words in _TIMES.items() if key in told)
        answers = f"{told['identical']} of {told['answers']}" if "answers" in told else ""
        pause = f"{told['pause_s']['p50']:.2f} s ({told['pause_s']['max']:.2f})" if told.get("pause_s") else ""
        rows.append([Cell(_NAMES[name]), Cell(answers), Cell(pause), Cell(took)])
    titles = ("lost or changed", "answers as undisturbed", "longest pause of a stream: p50 (max)", "")
    return table_of("", titles, rows)


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1f} s"
