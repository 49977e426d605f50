"""The papers' numbers beside a run's: the data, the statements, the law, and each command from end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from decoding.request import Acceptance
from decoding.tree import DraftTree
from experiments.bench.__main__ import main
from experiments.bench.engines.contestants import Prompt
from experiments.papers.beside import Found, beside, judged
from experiments.papers.commands import PAPERS
from experiments.papers.jacobi import compression, expected_tokens, fitted
from experiments.papers.llma import counted
from experiments.papers.ngrammys import Seen, shares
from experiments.papers.numbers.published import Claim, Figure, Paper, PaperTable

SENTENCE = "The quick brown fox jumps over the lazy dog. "


def number(value: Any) -> float:
    return value.mean if isinstance(value, Figure) else value


def table(paper: str, name: str) -> dict[str, dict[str, float]]:
    (found,) = [table for table in PAPERS[paper].tables if table.name == name]
    return {row: {column: number(value) for column, value in columns.items()} for row, columns in found.rows.items()}


def test_the_papers_numbers_agree_with_each_other() -> None:
    for name in ("table 3", "table 4"):
        for row in table("llma", name).values():
            assert row["plain s"] / row["LLMA s"] == pytest.approx(row["speed-up"], abs=0.011)
            assert row["LLMA tokens/s"] / row["plain tokens/s"] == pytest.approx(row["speed-up"], abs=0.03)
    for name, pairs in (
        ("table 4", (("AntRAG, AntGLM-10B", "AntRAG, speed-up"), ("Dolly, Llama2-13B", "Dolly, speed-up"))),
        ("table 8", (("batch 2, tokens/s", "batch 2, speed-up"), ("batch 4, tokens/s", "batch 4, speed-up"))),
    ):
        rows = table("trie", name)
        for speed, speedup in pairs:
            for method, ratio in rows[speedup].items():
                assert rows[speed][method] / rows[speed]["plain"] == pytest.approx(ratio, abs=0.006)
    for row in table("trie", "table 7").values():
        assert row["plain"] / row["hierarchical"] == pytest.approx(row["speed-up"], abs=0.011)


@pytest.mark.parametrize("key", PAPERS)
def test_statements_name_datasets_and_tables_of_their_paper(key: str) -> None:
    paper = PAPERS[key]
    assert paper.source.startswith("arXiv ") and len({table.name for table in paper.tables}) == len(paper.tables)
    for claim in paper.claims:
        assert claim.dataset in {*paper.datasets, "device", "all"}, claim
        assert claim.where.split()[0] in ("table", "figure") and claim.better != claim.worse and claim.words


def test_a_statement_is_judged_by_both_values() -> None:
    def agree(better: Figure, worse: Figure, **settings: Any) -> bool:
        claim = Claim("table 1", "d", "m", "a", "b", "words", otherwise="because", **settings)
        (row,) = judged([claim], {"d": {"a": {"m": better}, "b": {"m": worse}}})
        assert ("why" in row) == (not row["agree"])
        agrees: bool = row["agree"]
        return agrees

    assert agree(Figure(2.0), Figure(1.0)) and not agree(Figure(1.0), Figure(2.0))
    assert agree(Figure(1.0), Figure(2.0), lower=True) and not agree(Figure(2.0), Figure(1.0), lower=True)
    assert not agree(Figure(1.01), Figure(1.0)) and agree(Figure(1.01), Figure(1.0), tolerance=0.0)
    assert not agree(Figure(1.5, 0.3), Figure(1.0, 0.3))  # closer than their spreads
    assert agree(Figure(1.01), Figure(1.0), equal=True) and not agree(Figure(1.1), Figure(1.0), equal=True)
    (absent,) = judged([Claim("table 1", "d", "m", "a", "b", "words")], {"d": {"a": {"m": Figure(1.0)}}})
    assert absent["here"] is None and absent["agree"] is None


def test_results_hold_both_sides_of_a_table() -> None:
    paper = Paper(
        "p", "arXiv 0", "Title", "ran", {"d": "data"},
        (PaperTable("table 1", "3", "speeds", {"7B": {"speed-up": Figure(2.5, 0.1)}}),),
        (Claim("table 1", "d", "speedup", "a", "b", "a is faster"), Claim("table 1", "d", "speedup", "b", "c", "not measured")),
    )  # fmt: skip
    measures = {"d": {"a": {"speedup": Figure(1.5)}, "b": {"speedup": Figure(1.0)}}}
    results = beside(paper, Found(measures, {"table 1": {"demo": {"speed-up": 1.5}}}), {"model": "demo"})
    entry = results["tables"]["table 1"]
    assert entry["paper"] == {"7B": {"speed-up": {"mean": 2.5, "spread": 0.1}}} and entry["here"] == {"demo": {"speed-up": 1.5}}
    assert (results["agree"], results["told"], len(results["claims"])) == (1, 1, 2)
    assert json.loads(json.dumps(results)) == results


def test_the_scaling_law_is_the_papers_and_its_fit_finds_it_again() -> None:
    assert expected_tokens(0.5, 1, 1) == 1.5
    assert expected_tokens(0.5, 1, 3) == pytest.approx((1 - 0.5**4) / (1 - 0.5))  # equation 4
    assert compression(0.425, 3.106, 15, 5) == pytest.approx(1.96, abs=0.03)  # what the paper measured (table 3)
    measured = {(window, ngram): compression(0.425, 3.106, window, ngram) for window in (1, 5, 10, 15) for ngram in (3, 5, 7)}
    assert fitted(measured) == pytest.approx((0.425, 3.106), abs=0.002)
    with pytest.raises(ValueError, match="no fit"):
        fitted({(1, 3): 1.0})


def test_accepted_rows_are_counted_by_source_and_rank() -> None:
    seen = Seen()
    context, bigram = 4, 5  # of SOURCES
    tree = DraftTree(
        np.array([9, 1, 2, 3, 4, 5, 6], np.int32), np.array([-1, 0, 1, 0, 3, 0, 5], np.int32),
        np.array([0, context, context, bigram, bigram, bigram, bigram], np.int8), 7,
    )  # fmt: skip
    seen.add(tree, Acceptance((5, 6), 7))
    seen.add(tree, Acceptance((), 7))
    assert seen.rows == {"context": [1, 1], "bigram": [2, 2]}
    assert seen.lengths == {"bigram": [2]} and seen.ranks == {"bigram": [1]}
    assert shares({"context": [1, 1, 3]}) == {"context": {"0": 0.0, "1": 0.6667, "2": 0.0, "3": 0.3333}}


def test_copies_are_counted_as_in_figure_4() -> None:
    prompt = Prompt("1", [3, 4], [[5, 6, 7, 8, 9]], [5, 6, 7, 2, 8, 9])
    # 5 by the prefill; 6 7 copied and 2; no match of 2: 8; 9 copied is the last token, which takes the step's bonus.
    short, long = (counted([prompt], 16, 1, k) for k in (1, 3))
    assert {key: value.mean for key, value in long.items()} == {"triggers": 1.0, "accepted": 2.0, "steps": 4.0}
    assert short["triggers"].mean == 2.0 and short["accepted"].mean == 1.0 and short["steps"].mean == 5.0


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of known outputs."""
    paths = []
    for name in ("first", "second"):
        text = SENTENCE if name == "first" else "A request travels from the door to the engine and back again. "
        records = [
            {"id": str(number), "prompt": f"{text}{number}", "references": [text], "output": f"{text}So {number}."}
            for number in range(2)
        ]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(record) + "\n" for record in records))
    return paths


def record_of(folder: Path, key: str) -> dict[str, Any]:
    path, picture = sorted(folder.iterdir())
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    record: dict[str, Any] = json.loads(path.read_text())
    assert record["name"] == f"bench-paper-{key}"
    results: dict[str, Any] = record["results"]
    assert results["paper"]["source"] == PAPERS[key].source and results["ran"]["model"]
    return results


@pytest.mark.parametrize("key", PAPERS)
def test_each_paper_runs_from_end_to_end(key: str, tiny_model: Path, files: list[Path], tmp_path: Path) -> None:
    names = {
        "llma": ("retrieval", "cache"),
        "trie": ("antrag", "dolly"),
        "ngrammys": ("gsm8k", "mt_bench"),
        "jacobi": ("mt_bench", "cnn"),
    }
    prompts = [f"{name}={path}" for name, path in zip(names[key], files, strict=True)]
    guided = ["--random-model", "tiny", "--tokenizer", str(tiny_model)] if key in ("llma", "trie") else ["--max-tokens", "12"]
    options = ["--model", str(tiny_model), "--dtype", "float32", "--repeats", "1", "--out", str(tmp_path / "out"), *guided]
    assert main(["paper", key, "--prompts", *prompts, *options]) == 0
    results = record_of(tmp_path / "out", key)
    assert {name: entry["stands_in"] for name, entry in results["ran"]["datasets"].items()} == {
        names[key][0]: ["first"], names[key][1]: ["second"],
    }  # fmt: skip
    ours = {name for name, entry in results["tables"].items() if entry["here"]}
    assert (
        ours
        >= {
            "llma": {"table 1", "table 2", "table 3", "table 4"},
            "trie": {"table 4", "table 5", "table 6", "table 8"},
            "ngrammys": {"table 1"},
            "jacobi": {"table 2", "table 3", "table 4", "figure 5", "figure 8"},  # figure 4 needs a model that repeats itself
        }[key]
    )
    told = [claim for claim in results["claims"] if claim["dataset"] == names[key][0] and claim["where"] != "figure 1"]
    assert told and all(claim["agree"] is not None for claim in told if not claim["metric"].startswith("accepted "))
    for labels in results["measures"].values():
        assert all(row.get("differing", 0.0) == 0.0 for row in labels.values())
    if key == "llma":
        rows = results["measures"]["retrieval"]
        assert rows["plain"]["tokens_per_step"] == 1.0 < rows["n=1 k=10"]["tokens_per_step"]


def test_the_tables_of_mjsd_are_those_of_draft_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["paper", "mjsd", "--help"])
    assert "MJSD, arXiv" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["elsewhere=a.jsonl"], "must be NAME=FILE with a NAME of retrieval, cache"),
        (["a.jsonl"], "must be NAME=FILE"),
        (["retrieval=x/a.jsonl", "cache=y/a.jsonl"], "two files of --prompts have one name"),
    ],
)
def test_prompts_must_say_what_they_stand_for(prompts: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["paper", "llma", "--prompts", *prompts])
    assert message in capsys.readouterr().err
