"""The tables of records of any shape."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outrider.experiments.bench.__main__ import main
from outrider.experiments.bench.record import RESULTS
from outrider.experiments.report.page import read_record
from outrider.experiments.report.values import blocks_of, text_of


def test_all_records_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted(path for path in RESULTS.iterdir() if path.suffix in (".json", ".jsonl"))
    assert main(["report", *map(str, paths)]) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and shown.out.count("\n# ") == len(paths)  # no known record has an unknown format


def test_every_number_of_a_record_is_somewhere() -> None:
    value = {
        "n": 11, "none": None, "empty": [], "one": {"inner": {"k": 12, "rows": [{"q": 13}, {"q": 14, "w": [{"z": 15}]}]}},
        "runs": [{"at": 16, "of": {"p": {"u": 17}, "r": {"u": 18}}}, {"at": 19, "of": {"p": {"u": 20}}}],
        "series": list(range(21, 40)), "pairs": [[41, 42], [43, "x"]],
    }  # fmt: skip
    shown = " ".join(cell for table in blocks_of("", value) for row in table.rows for cell in row)
    assert set(map(str, (*range(11, 21), 43))) <= set(re.findall(r"\d+", shown))
    assert "30 (21-39), 19 values" in shown and "41.5 (41-42)" in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72552, "72,552"),
        (0.012345, "0.01235"),
        (True, "yes"),
        ({"median": 2.0, "lowest": 1.0, "highest": 3.5}, "2 (1-3.5)"),
        ({"p50": 4.0, "p99": 9.0}, "p50 4 (p99 9)"),
        ({"mean": 22.6, "spread": 0.03}, "22.6 ± 0.03"),
        (["a", "b"], "a, b"),
        ({"a": {}}, None),
    ],
)
def test_values_as_cells(value: Any, text: str | None) -> None:
    assert text_of(value) == text


@pytest.mark.parametrize(("text", "words"), [("{", "is no JSON"), ("[1]", "is no record"), ('{"a": 1}', "it has no `results`")])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        read_record(tmp_path / "x.json")
