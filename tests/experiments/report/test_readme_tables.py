"""The README's tables of measurements are what their records say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments.report.cells import rounded
from experiments.report.readme_tables import DOCUMENTS, RESULTS, filled, main, markdown

ROOT = Path(__file__).resolve().parents[3]
RECORDS = ROOT / "experiments" / "results"


def test_the_documents_say_what_the_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--check"])
    assert code == 0, capsys.readouterr().out  # python -m experiments.report.readme_tables writes it anew


def test_a_figure_that_was_changed_is_found_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    readme = tmp_path / "experiments" / "results" / "README.md"
    text = readme.read_text(encoding="utf-8")
    right = markdown(RESULTS["rank-faults"].build(_results("rank-faults"))).splitlines()[2]
    wrong = right.replace("| 16 |", "| 61 |")
    assert wrong != right
    readme.write_text(text.replace(right, wrong), encoding="utf-8")
    assert main(["--check", "--root", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert f"-{wrong}" in shown and f"+{right}" in shown
    assert main(["--root", str(tmp_path)]) == 0
    assert readme.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- table: nothing -->\n<!-- end -->", "no table is called 'nothing'"),
        ("<!-- table: forms -->\n| a |", "has no <!-- end --> behind it"),
        ("<!-- table: forms -->\n<!-- table: forms -->\n<!-- end -->", "has no <!-- end --> before"),
        ("no markers", "forms: markers must stand in the text once"),
        ("<!-- table: forms -->\n<!-- end -->\n<!-- table: forms -->\n<!-- end -->", "markers must stand in the text once"),
    ],
)
def test_markers_that_are_wrong_are_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        filled(text, RECORDS, {"forms": RESULTS["forms"]})


def test_what_stands_around_a_table_stays() -> None:
    text = "before\n\n<!-- table: rank-faults -->\nold\n<!-- end -->\n\nafter\n"
    made = filled(text, RECORDS, {"rank-faults": RESULTS["rank-faults"]})
    assert made.startswith("before\n\n<!-- table: rank-faults -->\n| | runs |") and made.endswith("|\n<!-- end -->\n\nafter\n")
    assert filled(made, RECORDS, {"rank-faults": RESULTS["rank-faults"]}) == made


@pytest.mark.parametrize(
    ("value", "digits", "text"), [(0.835, 2, "0.84"), (0.985, 2, "0.99"), (2.325, 2, "2.33"), (9.475, 1, "9.5"), (196, 0, "196")]
)
def test_halves_are_rounded_away_from_zero(value: float, digits: int, text: str) -> None:
    assert rounded(value, digits) == text


def _results(name: str) -> dict[str, object]:
    from experiments.report.page import read_record

    results: dict[str, object] = read_record(RECORDS / RESULTS[name].records[0])["results"]
    return results
