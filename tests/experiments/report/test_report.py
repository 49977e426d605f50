"""The page of records: every record of the house, records of shapes that nobody knows, and what must not get through."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from experiments.report.cells import cell_of
from experiments.report.page import figures_beside, read_record, render
from experiments.report.paper import beside_paper, directions
from experiments.report.tables import headlines
from experiments.report.values import Block, Group, Table, blocks_of

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "experiments" / "results"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"><rect id="a" width="10" height="10"/></svg>'
_VOID = {"meta", "img", "input", "br", "wbr", "link"}


class Parsed(HTMLParser):
    """The elements of a page; fails where one is not closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a kind."""
        return [attributes for name, attributes in self.tags if name == tag]


def a_record(**parts: Any) -> dict[str, Any]:
    """A record as ``experiments.bench.record`` writes them."""
    return {
        "name": "unknown-bench",
        "started": "2026-11-22T01:02:03+00:00",
        "duration_s": 75.0,
        "git": {"revision": "0123456789abcdef", "dirty": True},
        "command": "python -m experiments.unknown --x",
        "config": {"model": "demo_model"},
        "seed": 7,
        "device": {"type": "cpu", "cpu": "Some CPU", "cores": 2, "torch_threads": 1},
        "results": {"a": {"x": 1.5, "y": [1.0, 3.0, 2.0]}, "b": {"x": 2.5, "y": [4.0, 4.0, 5.0]}},
    } | parts


def write(folder: Path, name: str, record: dict[str, Any]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def test_all_records_of_the_house_are_shown_on_one_page(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "experiments.bench", "report", "--all", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no known record in a form that its tables cannot take
    page = Parsed(out.read_text(encoding="utf-8"))
    names = {path.name for path in RESULTS.iterdir() if path.suffix in (".json", ".jsonl")}
    assert len(page.of("article")) == len(names)
    assert {attributes["href"] for attributes in page.of("a")} >= {f"#{attributes['id']}" for attributes in page.of("article")}
    pictures = {attributes["alt"] for attributes in page.of("img")}
    assert pictures == {path.name for path in RESULTS.glob("*.svg")}
    assert not page.of("script") and not page.of("link")
    assert all((attributes["src"] or "").startswith("data:image/svg+xml;base64,") for attributes in page.of("img"))


def test_a_page_has_machine_revision_command_seed_and_tables(tmp_path: Path) -> None:
    path = write(tmp_path, "day-unknown", a_record())
    page = " ".join(Parsed(render([(path, read_record(path))], "Mine")).text)
    for words in (
        "Mine",
        "Some CPU",
        "0123456789 and changes",
        "python -m experiments.unknown --x",
        "22 November 2026, 01:02 UTC",
    ):
        assert words in page
    assert "2 (1-3)" in page and "75 s" in page


def test_names_in_a_record_cannot_become_elements(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    record = a_record(command=bad, name=bad, results={bad: {bad: bad, "`" + bad + "`": [bad]}, "b": {bad: 1}})
    path = write(tmp_path, "day-bad", record)
    page = Parsed(render([(path, read_record(path))], bad))
    assert not page.of("script")
    assert "".join(page.text).count("alert(1)") >= 5


def test_nested_mappings_that_look_alike_are_one_table() -> None:
    servers = {
        "auto": {"ratio": [1.4, 1.6, 1.5], "ms": {"propose": 0.5, "forward": 4.0}},
        "none": {"ratio": [1.0, 1.0, 1.0], "ms": {}},
    }
    blocks = blocks_of("closed", {"1": {"requests": 8, "servers": servers}, "2": {"requests": 9, "servers": servers}})
    counts, ratios = blocks
    assert isinstance(counts, Table) and [[cell.text for cell in row] for row in counts.rows] == [["1", "8"], ["2", "9"]]
    assert isinstance(ratios, Table) and ratios.keys == 2
    assert ratios.header == (("", "closed"), ("", "servers"), ("", "ratio"), ("ms", "propose"), ("ms", "forward"))
    assert [cell.text for cell in ratios.rows[0]] == ["1", "auto", "1.5 (1.4-1.6)", "0.5", "4"]
    assert [cell.text for cell in ratios.rows[3]] == ["2", "none", "1", "", ""]
    assert ratios.scales == [0.0, 0.0, 1.6, 0.0, 0.0] and ratios.ratios[2]


def test_every_number_of_a_record_is_somewhere() -> None:
    """A shape with everything in it: scalars beside tables, lists of rows within rows, single keys, series, nothing."""
    value = {
        "n": 11, "none": None, "empty": [], "one": {"inner": {"k": 12, "rows": [{"q": 13}, {"q": 14, "w": [{"z": 15}]}]}},
        "runs": [{"at": 16, "of": {"p": {"u": 17}, "r": {"u": 18}}}, {"at": 19, "of": {"p": {"u": 20}}}],
        "series": list(range(21, 40)), "pairs": [[41, 42], [43, "x"]],
    }  # fmt: skip
    shown = " ".join(_texts(blocks_of("", value)))
    assert set(map(str, (*range(11, 21), 41, 42, 43))) <= set(re.findall(r"\d+", shown))
    assert "30 (21-39), 19 values" in shown


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
    ],
)
def test_values_as_fields(value: Any, text: str) -> None:
    cell = cell_of(value)
    assert cell is not None and cell.text == text


def test_figures_of_a_record_are_not_those_of_one_that_is_named_like_it(tmp_path: Path) -> None:
    for name in ("day-load", "day-load-all"):
        write(tmp_path, name, a_record())
    for name in ("day-load", "day-load-step", "day-load-all", "day-load-all-step", "day-loader"):
        (tmp_path / f"{name}.svg").write_text(SVG, encoding="utf-8")
    assert [figure.name for figure in figures_beside(tmp_path / "day-load.json")] == ["day-load.svg", "day-load-step.svg"]
    assert [figure.name for figure in figures_beside(tmp_path / "day-load-all.json")] == [
        "day-load-all.svg",
        "day-load-all-step.svg",
    ]


def test_statements_and_tables_of_a_paper_stand_beside_ours() -> None:
    said = {"dataset": "rag", "metric": "speed", "of": ["a", "b"]}
    results = {
        "paper": {"source": "arXiv 2304.04487", "title": "With Reference", "ran": "7B on one GPU"},
        "agree": 1,
        "told": 2,
        "notes": ["other data"],
        "tables": {
            "table 3": {"section": "3.4", "title": "speeds", "paper": {"7B": {"speed": 2.48}}, "here": {"demo": {"speed": 1.5}}}
        },
        "claims": [
            said | {"where": "figure 3", "paper": "n = 1 is faster", "here": [2, 1], "agree": True},
            said | {"where": "figure 4", "paper": "k = 15 is enough", "here": None, "agree": None},
        ],
    }
    found = beside_paper(results)
    assert found is not None and (found.agree, found.told, found.source) == (1, 2, "arXiv 2304.04487")
    table, statements = found.blocks
    assert isinstance(table, Table) and isinstance(statements, Table)
    assert [[cell.text for cell in row] for row in table.rows] == [["paper", "7B", "2.48"], ["here", "demo", "1.5"]]
    assert [row[5].text for row in statements.rows] == ["yes", "-"] and statements.rows[0][4].text == "a 2 | b 1"


def test_the_three_answers_to_a_statement_are_shown() -> None:
    said = {"dataset": "rag", "metric": "speed", "of": ["a", "b"], "where": "table 3", "paper": "a is 2 times as fast"}
    answered = said | {
        "here": [3, 2], "direction": True, "ratio": 1.5, "interval": [1.2, 1.9], "power": {"records": 9, "needed": 4},
        "size": {"paper": [2, 2], "of_paper": 0.75, "within": False}, "verdict": "direction only", "why": "smaller",
    }  # fmt: skip
    difference = said | {"here": [0, 3], "direction": False, "interval": [-4.0, -2.0], "power": {"records": 9, "needed": None}}
    claims = [answered, difference | {"verdict": "fails"}, said | {"here": None, "verdict": "not measured"}]
    verdicts = dict.fromkeys(("held", "direction only", "fails", "undecided", "not testable here", "not measured"), 0)
    verdicts |= {"direction only": 1, "fails": 1, "not measured": 1}
    results = {"paper": {"source": "arXiv 0", "title": "T"}, "tables": {}, "claims": claims, "verdicts": verdicts}
    found = beside_paper(results)
    assert found is not None and (found.agree, found.told) == (1, 2)
    (table,) = found.blocks
    assert isinstance(table, Table)
    assert [[cell.text for cell in row[5:]] for row in table.rows] == [
        ["2", "1.5 (1.2 to 1.9)", "0.75", "9 (4)", "direction only", "smaller"],
        ["-", "difference (-4 to -2)", "-", "9 (-)", "fails", ""],
        ["-", "-", "-", "-", "not measured", ""],
    ]
    assert directions(results).rows[0][1].text == "1 direction only, 1 fails, 1 not measured"


def test_a_known_record_in_another_form_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = a_record(name="bench-strategies")
    assert headlines(record) == []
    assert "bench-strategies" in capsys.readouterr().err
    path = write(tmp_path, "day-old", record)
    assert "2 (1-3)" in render([(path, read_record(path))], "t")


@pytest.mark.parametrize(("text", "words"), [("{", "is no JSON"), ("[1]", "is no record"), ('{"a": 1}', "it has no `results`")])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        read_record(path)


def _texts(blocks: Sequence[Block]) -> list[str]:
    found: list[str] = []
    for block in blocks:
        if isinstance(block, Group):
            found += _texts(block.blocks)
        elif isinstance(block, Table):
            found += [cell.text for row in block.rows for cell in row]
        else:
            found += [cell.text for _, cell in block.pairs]
    return found
