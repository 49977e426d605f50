"""``outrider bench papers``: what five papers say beside what is measured here, on one screen, from records and without a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.experiments.bench.record import RESULTS
from outrider.experiments.papers.beside import DIRECTION_ONLY, FAILS, HELD, NOT_MEASURED, NOT_TESTABLE, UNDECIDED
from outrider.experiments.papers.commands import PAPERS
from outrider.experiments.report.values import NOTHING, Table, print_tables, rounded, table_of

NEAR = 0.2  # of the paper's size, in the count of sizes
_SHOWN = 4  # values of a row; of more, the lowest and the highest are shown
_WORST = (NOT_MEASURED, FAILS, UNDECIDED, NOT_TESTABLE, DIRECTION_ONLY, HELD)  # a row has the first verdict of its statements
_HEADER = ("paper", "statement", "paper says", "tokens a step here", "priced on its GPU", "measured here", "verdict", "why")

Claims = Sequence[Mapping[str, Any]]


def newest(folder: Path = RESULTS) -> list[Path]:
    """Return the newest record of each paper.

    Raises:
        ValueError: a paper has none.
    """
    found = []
    for key in PAPERS:
        records = sorted(folder.glob(f"*-bench-paper-{key}*.json"), key=lambda path: (path.name[:10], len(path.name), path.name))
        if not records:
            raise ValueError(f"{folder} has no record of {key}: run outrider bench paper {key}")
        found.append(records[-1])
    return found


def screen(*records: Mapping[str, Any]) -> Table:
    """Return the table of all headlines, those that fail first, from the results of a record of each paper."""
    rows = []
    for results in records:
        paper = PAPERS[results["paper"]["name"]]
        for headline in paper.headlines:
            claims = [claim for claim in results["claims"] if claim.get("headline") == headline]
            verdict = min((claim["verdict"] for claim in claims), key=_WORST.index, default=NOT_MEASURED)
            why = paper.explained.get(headline, "") if verdict != HELD else ""
            said = [claim.size for claim in paper.claims if claim.headline == headline and claim.size]
            values = (_said(said), *(_values(claims, name) for name in ("tokens_per_step", "priced", "measured")))
            rows.append((_WORST.index(verdict), (paper.key, headline, *values, verdict, why)))
    return table_of("", _HEADER, [row for _, row in sorted(rows, key=lambda row: row[0])])


def summary(*records: Mapping[str, Any]) -> str:
    """Count the rows that hold in direction, and those whose sizes are within ``NEAR`` of the paper's."""
    rows = [
        [claim for claim in results["claims"] if claim.get("headline") == headline]
        for results in records
        for headline in PAPERS[results["paper"]["name"]].headlines
    ]
    directed = sum(all(claim.get("direction") is True for claim in claims) for claims in rows if claims)
    sized = [[claim["size"]["of_paper"] for claim in claims if claim.get("size")] for claims in rows]
    near = sum(all(abs(of_paper - 1) <= NEAR for of_paper in own) for own in sized if own)
    return (
        f"direction: {directed} of {len(rows)} rows; size priced within {NEAR:.0%} of the paper's: {near} of "
        f"{sum(map(bool, sized))} rows that have one."
    )


def _said(sizes: Sequence[tuple[float, float]]) -> str:
    texts = [" to ".join(dict.fromkeys(rounded(end, 2) for end in size)) for size in sizes]
    if len(set(texts)) < 2:
        return texts[0] if texts else "yes"
    return _joined(texts, [end for size in sizes for end in size])


def _values(claims: Claims, name: str) -> str:
    """Return the ratios of a row; a priced row of another metric than speed has its own."""
    found = []
    for claim in claims:
        ratios = claim.get("ratios", {})
        value = claim.get("ratio") if name == "priced" and "J/token" in claim["metric"] else ratios.get(name)
        if value is not None:
            found.append(value)
    return _joined([rounded(value, 2) for value in found], found) if found else NOTHING


def _joined(texts: Sequence[str], values: Sequence[float]) -> str:
    return " / ".join(texts) if len(texts) <= _SHOWN else f"{rounded(min(values), 2)} to {rounded(max(values), 2)}"


def main(argv: Sequence[str]) -> int:
    """Print the screen; return 2 if a record is missing."""
    parser = argparse.ArgumentParser(prog="outrider bench papers", description=__doc__)
    parser.add_argument("--records", type=Path, default=RESULTS, metavar="FOLDER", help="default: experiments/results")
    args = parser.parse_args(argv)
    try:
        paths = newest(args.records)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    records = [json.loads(path.read_text(encoding="utf-8"))["results"] for path in paths]
    print_tables([screen(*records)])
    print(f"\n{summary(*records)}\nrecords: {', '.join(path.name for path in paths)}")
    return 0
