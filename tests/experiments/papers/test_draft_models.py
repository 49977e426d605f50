"""``outrider bench draft-models`` from end to end on tiny models."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.__main__ import main
from experiments.bench.run import arguments
from experiments.papers.draft_models.bench import BENCH, unfaithful
from experiments.papers.draft_models.methods import methods_of
from experiments.papers.numbers.mjsd import METHODS, METRICS, TABLE_2, TABLE_3
from tests.helpers.models import llama_config, save_model

DEFAULTS = (
    "sampled", "greedy", "speculative greedy", "speculative coupled", "speculative rejection", "spectr", "bild", "mjsd",
    "mjsd, greedy", "mjgd",
)  # fmt: skip


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "draft", llama_config(num_hidden_layers=1), seed=3)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    texts = ("The quick brown fox", "A request travels from the door", "lazy dog", "to the engine and back again. The quick")
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"id": f"p/{at}", "prompt": text}) + "\n" for at, text in enumerate(texts)))
    return path


def bench(*options: object) -> int:
    return main(["draft-models", *map(str, options)])


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(next(folder.glob("*.json")).read_text())
    assert record["name"] == "bench-draft-models"
    return record


def test_all_methods_in_turns(
    tiny_model: Path, draft: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    small = ("--requests", 2, "--repeats", 2, "--max-tokens", 8, "--dtype", "float64", "--turn", 2, "--beams", 3)
    models = ("--model", tiny_model, "--draft-model", draft, "--prompts", prompts)
    assert bench(*models, *small, "--draft-free", "llma", "jacobi", "--out", out, "--json") == 0
    results = json.loads(capsys.readouterr().out)
    record = record_of(out)
    assert record["results"] == results and record["seed"] == 0
    rows = results["methods"]
    assert list(rows) == [*DEFAULTS, "llma", "jacobi"]
    assert results["prompts"] == {"prompts": 2, "too_long": 0}
    for label, row in rows.items():
        assert len(row["tokens_per_s"]) == len(row["speedup"]) == len(row["perplexity"]) == (1 if label == "mjgd" else 2), label
        assert all(value > 1.0 for value in row["perplexity"]) and row["tokens_per_step"] >= 1.0, label
        assert row["ms"]["target"] > 0, label
    assert rows["mjsd"]["ms"]["draft"] > 5 * rows["sampled"]["ms"]["draft"] and rows["mjgd"]["ms"]["draft"] == 0.0
    assert rows["sampled"]["speedup"] == [1.0, 1.0]
    seeded = ("sampled", "greedy", "speculative greedy", "speculative coupled", "llma", "jacobi")
    assert {label for label, row in rows.items() if row["identical"] is not None} == set(seeded)
    assert all(rows[label]["identical"] == {"same": 4, "of": 4} for label in seeded)
    assert rows["sampled"]["perplexity"] == rows["speculative coupled"]["perplexity"] == rows["jacobi"]["perplexity"]
    assert [label for label, row in rows.items() if not row["lossless"]] == ["bild", "mjsd", "mjsd, greedy", "mjgd"]
    # What beam search is for: no method's text is likelier than the likeliest blocks, up to what blocks hide from each other.
    assert rows["mjgd"]["perplexity"][0] < rows["sampled"]["perplexity"][0]
    assert rows["mjgd"]["perplexity"][0] < rows["speculative rejection"]["perplexity"][0]
    assert len(list(out.glob("*.svg"))) == 1


def test_ablations_are_more_variants_of_mjsd(
    tiny_model: Path, draft: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    small = ("--requests", 1, "--repeats", 1, "--max-tokens", 6, "--dtype", "float64", "--draft-free")
    models = ("--model", tiny_model, "--draft-model", draft, "--prompts", prompts)
    chosen = ("--strategy", "mjsd:num_draft_tokens=4,beams=8,threshold=0.1", "--strategy", "bild:variant=original,greedy=true")
    chosen += ("--strategy", "greedy", "--strategy", "spectr:greedy=true,sequences=2")
    assert bench(*models, *small, *chosen, "--ablations", "--out", out) == 0
    shown = capsys.readouterr()
    results = record_of(out)["results"]
    assert {int(beams) for beams in results["ablations"]["beams"]} == {1, 2, 4, 8, 16}
    assert list(results["ablations"]["thresholds"]) == ["0.0", "0.01", "0.1", "0.3", "0.5", "0.9", "1.0"]
    assert len(results["methods"]) == 1 + 4 + 4 + 6  # the chosen mjsd is one of both
    assert results["methods"]["spectr:greedy=true,sequences=2"]["identical"] == {"same": 1, "of": 1}
    all_refused = results["methods"][results["ablations"]["thresholds"]["1.0"]]
    assert all_refused["tokens_per_step"] == 1.0 and all_refused["acceptance"] == 0.0
    assert all_refused["perplexity"] == results["methods"]["sampled"]["perplexity"]
    assert "`spectr:greedy=true,sequences=2`" in shown.out and "the seed's, 1 of 1" in shown.out


def test_mistakes_are_one_line(
    tiny_model: Path, draft: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["--model", tiny_model, "--prompts", prompts, "--out", tmp_path / "out", "--max-tokens", 4]
    assert bench(*models, "--draft-model", tmp_path / "absent") == 2
    assert bench(*models, "--draft-model", draft, "--strategy", "mjds") == 2
    assert bench(*models, "--draft-model", draft, "--strategy", "mjgd:width=3") == 2
    assert bench(*models, "--draft-model", draft, "--strategy", "greedy:beams=3") == 2
    assert bench(*models, "--draft-model", draft, "--strategy", "spectr:greedy=1") == 2
    assert bench(*models, "--draft-model", draft, "--draft-free", "llma", "llma") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    expected = (
        "absent", "did you mean 'mjsd'", "mjgd has the options block, beams", "greedy has no options",
        "greedy must be true or false", "asked for twice",
    )  # fmt: skip
    assert [part in line for part, line in zip(expected, errors, strict=True)] == [True] * 6
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gamma", "0"], "--gamma must be at least 1"),
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--guided"], "unrecognized arguments: --guided"),
    ],
)
def test_options_that_make_no_sense_end_at_once(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench("--prompts", "p.jsonl", *options)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_defaults_are_the_papers() -> None:
    methods = {method.label: method for method in methods_of(arguments(BENCH, ["--prompts", "p.jsonl", "--draft-free"]))}
    assert tuple(methods) == DEFAULTS
    assert methods["mjsd"].choice.options == {"num_draft_tokens": 4, "beams": 8, "threshold": 0.1}
    assert methods["mjsd, greedy"].greedy and methods["mjsd, greedy"].choice.options == methods["mjsd"].choice.options
    assert methods["bild"].choice.options == {"variant": "mjsd", "num_draft_tokens": 10, "fallback": 0.9, "rollback": 2.0}


def test_the_papers_tables_are_whole_and_consistent() -> None:
    """Columns of a table that can be computed from others, and what the paper's text says of the winner."""
    assert len(TABLE_2) == 6
    for column, metrics in TABLE_2.items():
        assert set(metrics) == set(METRICS) and all(set(row) == set(METHODS) for row in metrics.values())
        assert max(metrics["speed"], key=lambda name: metrics["speed"][name].mean) == "mjsd", column
        for metric in ("energy", "perplexity"):
            assert min(metrics[metric], key=lambda name: metrics[metric][name].mean) == "mjsd", column
    assert all(list(rows) == [2, 4, 6, 8] for rows in TABLE_3.values())


def test_texts_that_must_be_equal_and_are_not_are_named() -> None:
    rows = {"a": {"identical": {"same": 2, "of": 3}}, "b": {"identical": None}, "c": {"identical": {"same": 3, "of": 3}}}
    assert unfaithful({"methods": rows}, Namespace(dtype="float32")) == ["a: 2 of 3 texts as plain"]
    assert unfaithful({"methods": rows}, Namespace(dtype="bfloat16")) == []
