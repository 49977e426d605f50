"""What ``experiments.parity`` counts, by parameter, and the table that it writes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from experiments.parity_answers import Answer, differences
from experiments.parity_cases import Case


@dataclass(slots=True)
class Row:
    """A line of the table."""

    values: set[str] = field(default_factory=set)
    compared: int = 0  # answers with speculation, each against the one without
    refused: int = 0  # of these, errors of the client, the same with and without
    mismatches: int = 0
    gap: float = 0.0  # largest between two log-probabilities
    drafted: int | None = None  # None where the server does not tell
    accepted: int | None = None


@dataclass(slots=True)
class Table:
    """What came out, by parameter."""

    rows: dict[str, Row] = field(default_factory=dict)
    mismatches: list[dict[str, Any]] = field(default_factory=list)

    def note(self, case: Case, body: Mapping[str, Any], expected: Answer, got: Answer) -> None:
        """Counts a comparison."""
        row = self.rows.setdefault(case.field, Row())
        row.values.add(case.value)
        wrong, gap = differences(expected, got)
        row.compared += 1
        row.refused += got.status == expected.status == 400
        row.gap = max(row.gap, gap)
        if expected.status not in (200, 400):
            wrong = [f"status {expected.status}", *wrong]
        if wrong:
            row.mismatches += 1
            shown = {"field": case.field, "differs": wrong, "body": dict(body), "expected": asdict(expected), "got": asdict(got)}
            self.mismatches.append(shown)

    def markdown(self) -> str:
        """The table as text."""
        lines = [
            "| parameter | values | answers compared | refused alike | drafted | accepted | mismatches |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, row in self.rows.items():
            counts = (len(row.values), row.compared, row.refused, row.drafted, row.accepted, row.mismatches)
            lines.append(f"| `{name}` | " + " | ".join("n/a" if count is None else str(count) for count in counts) + " |")
        return "\n".join(lines) + "\n"
