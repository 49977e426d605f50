"""``outrider bench draft-models`` from end to end on tiny models, and its comparison with the paper."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from configs.slices import ModelOptions
from engine.loading.model import load_model
from engine.measures.energy import measure_idle, open_meter
from experiments.bench import arguments, main
from experiments.contestants import Prompt
from experiments.draft_models import unfaithful
from experiments.draft_models_agreement import (
    EQUAL,
    batches_agree,
    beams_agree,
    better,
    compared,
    methods_agree,
    summed,
    thresholds_agree,
)
from experiments.draft_models_batches import BatchRuns
from experiments.draft_models_figures import draft_models_figures
from experiments.draft_models_methods import methods_of
from experiments.draft_models_paper import METHODS, METRICS, TABLE_1, TABLE_2, TABLE_3, Figure
from experiments.draft_models_tables import lines, tables
from tests.models import llama_config, save_model

REPOSITORY = Path(__file__).resolve().parents[2]
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


def pair(*figures: tuple[float, float]) -> tuple[Figure, Figure]:
    first, second = (Figure(*figure) for figure in figures)
    return first, second


def test_all_methods_beside_each_other(
    tiny_model: Path, draft: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    small = ("--requests", 2, "--repeats", 2, "--max-tokens", 8, "--dtype", "float64", "--turn", 2, "--beams", 3)
    models = ("--model", tiny_model, "--draft-model", draft, "--prompts", prompts)
    assert (
        bench(*models, *small, "--draft-free", "llma", "jacobi", "--batch-sizes", "1,2", "--runs", 4, "--out", out, "--json") == 0
    )
    results = json.loads(capsys.readouterr().out)
    record = record_of(out)
    assert record["results"] == results and record["seed"] == 0
    rows = results["methods"]
    assert list(rows) == [*DEFAULTS, "llma", "jacobi"]
    assert results["prompts"] == {"prompts": 2, "too_long": 0, "finished_by_all": 2}
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
    assert list(results["batches"]) == ["1", "2"] and all(len(row["s_per_run"]) == 2 for row in results["batches"].values())
    assert all(runs >= 4 for row in results["batches"].values() for runs in row["runs"])
    told = [entry for entry in results["paper"]["comparisons"]["table 2"] if entry["metric"] == "speed"]
    assert len(told) == 6 * 10 and all(entry["agree"] is not None for entry in told)
    assert len(list(out.glob("*.svg"))) == 2


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
    assert {row["agree"] for row in results["paper"]["comparisons"]["figure 4"]} <= {True, False}
    assert "paper, Table 2" in shown.out and "n/a" in shown.out and "comparisons go as in arXiv 2407.09722" in shown.out
    pictures = sorted(path.name for path in out.glob("*.svg"))
    assert len(pictures) == 2 and pictures[0].endswith("-ablations.svg")


def test_a_limit_leaves_prompts_out_of_every_methods_perplexity(
    tiny_model: Path, draft: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ("--model", tiny_model, "--draft-model", draft, "--prompts", prompts, "--draft-free", "--strategy", "mjsd")
    small = ("--repeats", 1, "--max-tokens", 4, "--dtype", "float64", "--turn", 1, "--limit", 1e-6)
    assert bench(*models, *small, "--out", tmp_path / "out") == 0
    results = record_of(tmp_path / "out")["results"]
    assert results["prompts"] == {"prompts": 4, "too_long": 0, "finished_by_all": 1}
    assert [row["tokens"] <= 4 for row in results["methods"].values()] == [True, True]


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
        (["--limit", "0"], "--limit must be above 0 seconds"),
        (["--batch-sizes", "1,1"], "--batch-sizes names a number twice"),
        (["--guided"], "unrecognized arguments: --guided"),
    ],
)
def test_options_that_make_no_sense_end_at_once(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench("--prompts", "p.jsonl", *options)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_defaults_are_the_papers() -> None:
    methods = {method.label: method for method in methods_of(arguments(["draft-models", "--prompts", "p.jsonl", "--draft-free"]))}
    assert tuple(methods) == DEFAULTS
    paper = {label: method.paper for label, method in methods.items() if method.paper is not None}
    assert paper == {
        "sampled": "plain",
        "speculative rejection": "speculative",
        "spectr": "spectr",
        "bild": "bild",
        "mjsd": "mjsd",
    }
    assert methods["mjsd"].choice.options == {"num_draft_tokens": 4, "beams": 8, "threshold": 0.1}
    assert methods["mjsd, greedy"].greedy and methods["mjsd, greedy"].choice.options == methods["mjsd"].choice.options
    assert methods["bild"].choice.options == {"variant": "mjsd", "num_draft_tokens": 10, "fallback": 0.9, "rollback": 2.0}


def test_the_papers_tables_are_whole_and_consistent() -> None:
    """Columns of a table that can be computed from others, and what the paper's text says of the winner."""
    for batch, row in TABLE_1.items():
        assert row["j_per_input"] * batch == pytest.approx(row["j_per_run"], rel=0.01)
        assert row["s_per_input"] * batch == pytest.approx(row["s_per_run"], rel=0.03)
        assert row["joules"] / row["j_per_run"] == pytest.approx(row["seconds"] / row["s_per_run"], rel=0.01)
    assert len(TABLE_2) == 6
    for column, metrics in TABLE_2.items():
        assert set(metrics) == set(METRICS) and all(set(row) == set(METHODS) for row in metrics.values())
        assert max(metrics["speed"], key=lambda name: metrics["speed"][name].mean) == "mjsd", column
        for metric in ("energy", "perplexity"):
            assert min(metrics[metric], key=lambda name: metrics[metric][name].mean) == "mjsd", column
    assert all(list(rows) == [2, 4, 6, 8] for rows in TABLE_3.values())


def test_who_is_better() -> None:
    assert better("perplexity", *pair((3.74, 0.14), (3.64, 0.11))) == 0
    assert better("perplexity", *pair((2.06, 0.06), (3.74, 0.14))) == 1
    assert better("energy", *pair((11.7, 1.56), (6.62, 0.91))) == -1
    assert better("speed", *pair((63.0, 0.2), (45.1, 1.32))) == 1
    there = pair((63.0, 0.2), (45.1, 1.32))
    same = compared("speed", ("mjsd", "spectr"), there, pair((9.0, 0.1), (5.0, 0.1)))
    assert same == {"metric": "speed", "of": ["mjsd", "spectr"], "paper": "mjsd", "here": "mjsd", "agree": True}
    assert compared("speed", ("mjsd", "spectr"), there, pair((5.0, 1.0), (5.5, 1.0)))["here"] == EQUAL
    unknown = compared("energy", ("mjsd", "spectr"), there, (None, None))
    assert (unknown["here"], unknown["agree"]) == (None, None)


def test_directions_over_the_columns_of_the_paper() -> None:
    here = {
        "speed": {"plain": Figure(10.0, 0.1), "bild": Figure(12.0, 0.1), "spectr": Figure(11.0, 0.1)},
        "energy": {"plain": None, "bild": None},
    }
    rows = methods_agree(here)  # type: ignore[arg-type]
    merged = {(row["metric"], *row["of"]): row for row in summed(rows)}
    assert len(rows) == 6 * (3 + 1) and set(merged) == {
        ("speed", "plain", "bild"), ("speed", "plain", "spectr"), ("speed", "bild", "spectr"), ("energy", "plain", "bild"),
    }  # fmt: skip
    assert merged["speed", "plain", "bild"]["agree"] == 6
    # SpecTr is the faster one on the short prompts alone; there the paper's spreads overlap in none of the two.
    assert merged["speed", "bild", "spectr"]["paper"] == {"spectr": 2, "bild": 4}
    assert merged["speed", "bild", "spectr"]["agree"] == 4
    assert merged["energy", "plain", "bild"]["agree"] is None


def test_directions_of_the_ablations_and_of_the_batch_sizes() -> None:
    def mjsd(speed: float, ppl: float) -> dict[str, Figure | None]:
        return {"speed": Figure(speed), "energy": None, "perplexity": Figure(ppl)}

    beams = beams_agree({1: mjsd(1, 9), 2: mjsd(50, 3), 4: mjsd(55, 2.5), 8: mjsd(52, 2.4)})
    assert [(row["of"], row["agree"]) for row in beams if row["metric"] == "speed" and row["column"] == "OPT"] == [
        (["2 beams", "4 beams"], True), (["4 beams", "8 beams"], False),
    ]  # fmt: skip
    thresholds = thresholds_agree({0.0: mjsd(60, 2.2), 0.1: mjsd(50, 2.0), 1.0: mjsd(55, 4.0)})
    assert [(row["metric"], row["here"], row["agree"]) for row in thresholds] == [
        ("speed", "threshold 0", True), ("perplexity", "threshold 0.1", True), ("perplexity", "threshold 0", True),
    ]  # fmt: skip
    own = {
        size: {"j_per_run": None, "j_per_input": None, "s_per_run": Figure(size), "s_per_input": Figure(1.0)} for size in (1, 4)
    }
    batches = {row["metric"]: row for row in batches_agree(own)}
    assert batches["s_per_run"]["agree"] is True and batches["j_per_run"]["agree"] is None
    assert (batches["s_per_input"]["paper"], batches["s_per_input"]["here"]) == ("batch 4", EQUAL)


def test_energy_is_drawn_and_told_where_it_was_metered(tmp_path: Path) -> None:
    def row(paper: str | None, joules: list[float]) -> dict[str, Any]:
        return {
            "strategy": "x", "paper": paper, "lossless": True, "tokens_per_s": [9.0, 10.0], "decode_tokens_per_s": [10.0, None],
            "speedup": [1.0, 1.1], "tokens_per_step": 1.5, "acceptance": None, "perplexity": [2.0, 2.1], "identical": None,
            "ms": {"draft": 1.0, "target": 2.0, "rest": 0.1, "prefill": 3.0}, "energy_coarse": True,
            "energy": {"j_per_token": joules, "net_j_per_token": joules},
        }  # fmt: skip

    batches = {str(n): {key: [0.5 * n] for key in ("j_per_run", "s_per_run", "j_per_input", "s_per_input")} for n in (1, 2)}
    results = {
        "baseline": "sampled", "energy_source": "nvml", "ablations": {}, "batches": batches,
        "methods": {"sampled": row("plain", [3.0, 3.5]), "mjsd": row("mjsd", [1.0, 1.5])}, "paper": {"comparisons": {}},
    }  # fmt: skip
    first, second = draft_models_figures(results, tmp_path / "a.svg"), draft_models_figures(results, tmp_path / "b.svg")
    assert [path.name for path in first] == ["a.svg", "a-batches.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in first)
    methods = tables(results)[0]
    assert list(methods.columns[8].cells) == ["3.250 (coarse)", "1.250 (coarse)"]
    unmetered = results | {"methods": {"sampled": row("plain", ["n/a", "n/a"])}}  # type: ignore[list-item]
    assert draft_models_figures(unmetered, tmp_path / "c.svg")[0].read_bytes() != first[0].read_bytes()
    assert list(tables(unmetered)[0].columns[8].cells) == ["n/a"]


def test_lines_say_what_drafts_cost_and_which_text_is_likelier() -> None:
    def row(paper: str | None, draft: float, ppl: list[float]) -> dict[str, Any]:
        return {"paper": paper, "perplexity": ppl, "ms": {"draft": draft, "target": 3.0, "rest": 1.0}}

    results = {
        "baseline": "sampled", "energy_source": "n/a", "parameters": {"target": 1000, "draft": 150},
        "prompts": {"prompts": 3, "too_long": 0, "finished_by_all": 2},
        "paper": {"agree": 1, "told": 2, "source": "the paper"},
        "methods": {
            "sampled": row("plain", 0.0, [3.0, 4.0]), "greedy": row(None, 0.0, [2.0]), "mjsd": row("mjsd", 2.0, [2.5, 2.5]),
            "mjsd, greedy": row(None, 2.0, [1.5]),
        },
    }  # fmt: skip
    assert lines(results) == [
        "target 1,000 parameters, draft model 150 (15%)",
        "drafting for a step, in steps of plain decoding: mjsd 0.50",
        "perplexity: mjsd 2.5 ± 0, sampled 3.5 ± 0.71; mjsd, greedy 1.5, greedy 2",
        "3 prompts, perplexity over the 2 that all methods finished",
        "energy: n/a",
        "1 of 2 comparisons go as in the paper",
    ]


def test_batches_book_what_a_counter_says(tiny_model: Path, tmp_path: Path) -> None:
    """A folder like the kernel's, whose counter goes on by 5 mJ a forward, and all the time before."""
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text(f"{10**12}\n")
    (zone / "energy_uj").write_text("0\n")

    def consume() -> None:
        used = int((zone / "energy_uj").read_text()) + 5_000
        (zone / "next").write_text(f"{used}\n")
        (zone / "next").replace(zone / "energy_uj")

    meter = open_meter(["cpu"], tmp_path)
    over = threading.Event()

    def idle() -> None:
        while not over.wait(0.001):
            consume()

    device = threading.Thread(target=idle)
    device.start()
    try:
        idle_w = measure_idle(meter, 0.2)
    finally:
        over.set()
        device.join()
    assert meter.source == "rapl" and idle_w is not None and idle_w > 0
    loaded = load_model(ModelOptions(str(tiny_model), dtype="float64"))
    batches = BatchRuns(loaded, [Prompt("x", [5, 6, 7, 8], []), Prompt("y", [9] * 6, [])], 2, 5)
    loaded.model.register_forward_hook(lambda *_: consume())
    told = batches.run(2, 7, {}, 0, meter)
    assert told["runs"] == 8  # of four forwards each, after the first token
    seconds = told["seconds"]
    assert seconds is not None and told["joules"] == pytest.approx(8 * 5e-3)
    assert told["net_joules"] == pytest.approx(8 * 5e-3 - idle_w * seconds, abs=0.05 * idle_w)
    assert told["j_per_run"] == pytest.approx(5e-3) and told["j_per_input"] == pytest.approx(5e-3 / 2)
    assert told["s_per_input"] == pytest.approx(seconds / 16)


def test_texts_that_must_be_equal_and_are_not_are_named() -> None:
    rows = {"a": {"identical": {"same": 2, "of": 3}}, "b": {"identical": None}, "c": {"identical": {"same": 3, "of": 3}}}
    assert unfaithful({"methods": rows}) == ["a"]


def test_the_command_hands_its_options_to_the_experiment() -> None:
    command = [sys.executable, "-m", "cluster.cli.main", "bench", "draft-models", "--prompts", "p.jsonl", "--turn", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert done.returncode == 2
    assert "outrider bench draft-models: error: --turn must be at least 1, got 0" in done.stderr
