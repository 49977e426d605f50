"""The generated tables of the documents equal their records."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from outrider.decoding.drafters.options import OPTIONS
from outrider.experiments.report.readme_tables import DOCUMENTS, filled, main
from outrider.experiments.report.values import rounded

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "experiments" / "results"
RAG = "docs/rag.md"


def test_the_documents_have_the_numbers_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--check"])
    assert code == 0, capsys.readouterr().out  # python -m experiments.report.readme_tables rewrites them


def test_every_option_of_every_strategy_is_documented() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    for strategy, options in OPTIONS.items():
        if options:
            table = page.partition(f"<!-- table: options-{strategy} -->")[2].partition("<!-- end -->")[0]
            assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(options), strategy


def test_a_changed_number_is_found_and_corrected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    page = tmp_path / "experiments" / "results" / "README.md"
    text = page.read_text(encoding="utf-8")
    right = next(line for line in text.splitlines() if line.startswith("| follower, `kill -9` | 16 |"))
    wrong = right.replace("| 16 |", "| 61 |")
    page.write_text(text.replace(right, wrong), encoding="utf-8")
    assert main(["--check", "--root", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert f"-{wrong}" in shown and f"+{right}" in shown
    assert main(["--root", str(tmp_path)]) == 0 and page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("<!-- table: rag-pairs -->\n<!-- end -->\n<!-- table: other -->\n<!-- end -->", "other"),
        ("<!-- table: rag-pairs -->\n| a |", "rag-pairs"),
        ("<!-- table: rag-pairs -->\n<!-- table: rag-pairs -->\n<!-- end -->", "rag-pairs"),
        ("no markers", "rag-pairs"),
        ("<!-- table: rag-pairs -->\n<!-- end -->\n<!-- table: rag-pairs -->\n<!-- end -->", "rag-pairs"),
    ],
)
def test_wrong_markers_are_named(text: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected the markers"):
        filled(RAG, text)


@pytest.mark.parametrize(
    ("value", "digits", "text"), [(0.835, 2, "0.84"), (0.985, 2, "0.99"), (2.325, 2, "2.33"), (9.475, 1, "9.5"), (196, 0, "196")]
)
def test_halves_are_rounded_away_from_zero(value: float, digits: int, text: str) -> None:
    assert rounded(value, digits) == text


def test_records_that_documents_name_exist() -> None:
    pages = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "experiments").rglob("*.md"), *ROOT.glob("demo*/*.md"))
    record = re.compile(r"\d{4}-\d\d-\d\d-[\w.-]+\.(?:jsonl?|svg)")
    named = {name for page in pages for name in record.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 50 and sorted(name for name in named if not (RESULTS / name).exists()) == []
