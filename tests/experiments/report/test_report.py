"""The page and the tables of records of any shape."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from outrider.experiments.bench.__main__ import main
from outrider.experiments.report.page import figures_beside, read_record, render
from outrider.experiments.report.tables import beside_paper, directions, headlines
from outrider.experiments.report.values import blocks_of, text_of

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "experiments" / "results"
SAID = {"dataset": "rag", "metric": "speed", "of": ["a", "b"], "where": "table 3", "paper": "a is 2 times as fast"}


class Parsed(HTMLParser):
    """Elements and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str, attribute: str) -> list[str | None]:
        return [attributes.get(attribute) for name, attributes in self.tags if name == tag]


def write(folder: Path, stem: str, **parts: Any) -> Path:
    """Write a record as ``experiments.bench.record`` does."""
    record = {
        "name": "unknown-bench", "started": "2026-11-22T01:02:03+00:00", "command": "python -m experiments.unknown", "seed": 7,
        "git": {"revision": "0123456789abcdef", "dirty": True}, "device": {"type": "cpu", "cpu": "Some CPU"},
        "results": {"a": {"x": 1.5, "y": [1.0, 3.0, 2.0]}, "b": {"x": 2.5, "y": [4.0, 4.0, 5.0]}},
    } | parts  # fmt: skip
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def test_all_records_and_their_figures_are_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--all", "--out", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().err == ""  # no known record has an unknown format
    page = Parsed((tmp_path / "report.html").read_text(encoding="utf-8"))
    records = [path for path in RESULTS.iterdir() if path.suffix in (".json", ".jsonl")]
    assert len(page.of("article", "id")) == len(records)
    assert set(page.of("a", "href")) == {f"#{anchor}" for anchor in page.of("article", "id")}
    assert set(page.of("img", "alt")) == {path.name for path in RESULTS.glob("*.svg")}
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link"})


def test_figures_are_small() -> None:
    assert [path.name for path in RESULTS.glob("*.svg") if path.stat().st_size > 200_000] == []


def test_names_in_a_record_cannot_become_elements(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    path = write(tmp_path, "day-bad", command=bad, name=bad, results={bad: {bad: bad, "`" + bad + "`": [bad]}, "b": {bad: 1}})
    page = Parsed(render([(path, read_record(path))], bad))
    assert not page.of("script", "src") and page.text.count("alert(1)") >= 5
    assert "Some CPU" not in bad and "Some CPU" in page.text and "0123456789 and changes" in page.text


def test_nested_mappings_that_look_alike_are_one_table() -> None:
    servers = {
        "auto": {"ratio": [1.4, 1.6, 1.5], "ms": {"propose": 0.5, "forward": 4.0}}, "none": {"ratio": [1.0, 1.0, 1.0], "ms": {}}
    }  # fmt: skip
    counts, ratios = blocks_of("closed", {"1": {"requests": 8, "servers": servers}, "2": {"requests": 9, "servers": servers}})
    assert counts.rows == (("1", "8"), ("2", "9"))
    assert ratios.header == ("closed", "servers", "ratio", "ms: propose", "ms: forward", "ms")
    assert ratios.rows[0] == ("1", "auto", "1.5 (1.4-1.6)", "0.5", "4", "") and ratios.rows[3][:3] == ("2", "none", "1")


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


def test_figures_of_a_record_are_not_those_of_one_with_a_longer_name(tmp_path: Path) -> None:
    for name in ("day-load", "day-load-all"):
        write(tmp_path, name)
    for name in ("day-load", "day-load-step", "day-load-all", "day-load-all-step", "day-loader"):
        (tmp_path / f"{name}.svg").touch()
    assert [path.stem for path in figures_beside(tmp_path / "day-load.json")] == ["day-load", "day-load-step"]
    assert [path.stem for path in figures_beside(tmp_path / "day-load-all.json")] == ["day-load-all", "day-load-all-step"]


def test_statements_and_tables_of_a_paper_stand_beside_this_run() -> None:
    answered = SAID | {
        "here": [3, 2], "direction": True, "ratio": 1.5, "interval": [1.2, 1.9], "power": {"records": 9, "needed": 4},
        "size": {"paper": [2, 2], "of_paper": 0.75, "within": False}, "verdict": "direction only", "why": "smaller",
    }  # fmt: skip
    difference = SAID | {"here": [0, 3], "interval": [-4.0, -2.0], "power": {"records": 9, "needed": None}, "verdict": "fails"}
    claims = [answered, difference, SAID | {"here": None, "verdict": "not measured"}, SAID | {"here": [2, 1], "agree": True}]
    shown = {"section": "3.4", "title": "speeds", "paper": {"7B": {"speed": 2.48}}, "here": {"demo": {"speed": 1.5}}}
    results = {
        "paper": {"source": "arXiv 0", "title": "T"}, "tables": {"table 3": shown}, "claims": claims,
        "verdicts": {"held": 0, "direction only": 1, "fails": 1, "not measured": 1},
    }  # fmt: skip
    table, statements = beside_paper(results)
    assert table.title == "table 3, speeds, section 3.4" and table.rows == (("paper", "7B", "2.48"), ("here", "demo", "1.5"))
    assert [row[4:] for row in statements.rows] == [
        ("a 3 | b 2", "2", "1.5 (1.2 to 1.9)", "0.75", "9 (4)", "direction only", "smaller"),
        ("a 0 | b 3", "-", "difference (-4 to -2)", "-", "9 (-)", "fails", ""),
        ("not measured", "-", "-", "-", "-", "not measured", ""),
        ("a 2 | b 1", "-", "-", "-", "-", "agrees in sign", ""),
    ]
    assert directions(results).rows == (("arXiv 0 T", "1 direction only, 1 fails, 1 not measured"),)
    assert beside_paper({"claims": []}) == []


def test_a_known_record_in_another_format_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "day-old", name="bench-strategies")
    assert headlines(read_record(path)) == [] and "bench-strategies" in capsys.readouterr().err
    assert "2 (1-3)" in render([(path, read_record(path))], "t")


@pytest.mark.parametrize(("text", "words"), [("{", "is no JSON"), ("[1]", "is no record"), ('{"a": 1}', "it has no `results`")])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        read_record(tmp_path / "x.json")
