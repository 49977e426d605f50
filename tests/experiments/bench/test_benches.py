"""``outrider bench strategies``, ``load`` and ``profile`` from end to end on a tiny model."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from outrider.experiments.bench import load, strategies
from outrider.experiments.bench.__main__ import main
from outrider.experiments.bench.engines.contestants import Prompt
from outrider.experiments.bench.engines.models import Workload, fitting
from outrider.experiments.bench.engines.phases import PHASES
from outrider.experiments.bench.options import SIZES

SENTENCE = "The quick brown fox jumps over the lazy dog. "
OURS = ("autoregressive", "llma:copy_length=4", "prompt_lookup")
CHOSEN = [part for name in OURS for part in ("--strategy", name)]


def run(folder: Path, name: str, *arguments: object, code: int = 0) -> dict[str, Any]:
    """Run a command; return the results of its record."""
    assert main([name, *map(str, arguments), "--out", str(folder / "out")]) == code
    results: dict[str, Any] = json.loads(next((folder / "out").glob("*.json")).read_text())["results"]
    return results


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the error of a command that exits with code 2."""
    try:
        code: object = main([str(argument) for argument in arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths: list[Path] = []
    words = (SENTENCE + "A request travels from the door to the engine").split()
    for name in ("a", "b"):
        lines = [{"id": f"{name}/{i}", "prompt": " ".join(words[i : i + 6])} for i in range(3)]
        words.reverse()
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def test_all_contestants_give_the_same_outputs(tiny_model: Path, workloads: Path, tmp_path: Path) -> None:
    paths, small = (workloads / "a.jsonl", workloads / "b.jsonl"), ("--max-tokens", 16, "--dtype", "float64", "--repeats", 2)
    results = run(tmp_path, "strategies", "--model", tiny_model, "--prompts", *paths, *small, *CHOSEN)
    assert [(own["records"], own["too_long"]) for own in results["workloads"].values()] == [(2, 0), (1, 1)]
    assert list(results["overall"]) == ["generate", "generate + lookup", *OURS]
    for name, row in results["overall"].items():
        assert (row["identical"], row["records"]) == (3, 3), name
        assert len(row["ratio"]) == len(row["decode_ratio"]) == len(row["ratio_to_lookup"]) == 2
        assert row["tokens_per_step"] >= 1.0 and row["ms"]["forward"] > 0 and row["ms"]["prefill"] > 0
    assert results["overall"]["generate"]["ratio"] == [1.0, 1.0]
    rows = results["workloads"]["a"]["contestants"]
    assert rows["autoregressive"]["tokens_per_step"] == 1.0 and rows["autoregressive"]["drafted_per_step"] == 0.0
    assert rows["generate + lookup"]["ms"]["propose"] is None and rows[OURS[1]]["ms"]["propose"] > 0


def test_random_models_of_several_families_follow_known_outputs_in_turns(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "num_key_value_heads": 2}
    monkeypatch.setitem(SIZES, "tiny-lfm2", {**SIZES["tiny"], "model_type": "lfm2", "hidden_size": 128, **layers})
    path = tmp_path / "known.jsonl"
    path.write_text(json.dumps({"id": "k/1", "prompt": SENTENCE, "output": SENTENCE * 2}) + "\n")
    models = ("--random-model", "tiny", "tiny-lfm2", "--prompts", path)
    more = ("--tokenizer", tiny_model, "--dtype", "float32", "--repeats", 2)
    results = run(tmp_path, "strategies", *models, *more, *CHOSEN)
    (workload,) = results["workloads"].values()
    assert list(results["models"]) == list(results["gains"]) == ["tiny", "tiny-lfm2"] and len(workload["contestants"]) == 6
    for name in results["models"]:
        plain, drafted = (workload["contestants"][f"{name}, {strategy}"] for strategy in ("plain", OURS[1]))
        assert (plain["speedup"], plain["tokens_per_step"], plain["differing"]) == ([1.0, 1.0], 1.0, 0)
        assert drafted["tokens_per_step"] > 1.5 and drafted["drafted_per_step"] > 1 and drafted["differing"] == 0
    first, other = (results["gains"][name][OURS[1]] for name in results["models"])
    assert first["of_first"] == [1.0, 1.0]
    for speedup, base, share in zip(other["speedup"], first["speedup"], other["of_first"], strict=True):
        assert share == pytest.approx(speedup / base, rel=0.02)
    alone = refusal(capsys, "strategies", *models, "--tokenizer", tiny_model, "--strategy", "autoregressive")
    assert "needs a --strategy besides autoregressive" in alone
    assert "--random-model needs --tokenizer" in refusal(capsys, "strategies", *models)


def test_only_exact_dtypes_must_be_identical() -> None:
    rows = {"llma:copy_length=2": {"identical": 1, "records": 2}, "prompt_lookup": {"identical": 2, "records": 2}}
    results = {"overall": rows, "lossless": list(rows), "differing": {"llma:copy_length=2": 1, "prompt_lookup": 0}}
    for unfaithful in (strategies.unfaithful, load.unfaithful):
        (line,) = unfaithful(results, Namespace(dtype="float32"))
        assert line.startswith("llma:copy_length=2") and unfaithful(results, Namespace(dtype="bfloat16")) == []


def test_records_must_fit_the_context() -> None:
    prompts = [Prompt(str(n), [1] * n, []) for n in (3, 4, 5)]
    cut = fitting(Workload("w", prompts, 0), 6, 10)
    assert ([prompt.id for prompt in cut.prompts], cut.too_long) == (["3", "4"], 1)
    with pytest.raises(ValueError, match="no record of w fits"):
        fitting(Workload("w", prompts, 0), 8, 10)


def test_strategies_under_load_give_plain_outputs(tiny_model: Path, files: list[Path], tmp_path: Path) -> None:
    model = ("--model", tiny_model, "--dtype", "float64", "--budget", 8, "--max-tokens", 12, "--prompts", *files)
    small = ("--concurrency", "1,2", "--load", "0.8", "--requests", 3, "--repeats", 2)
    results = run(tmp_path, "load", *model, *small, "--strategy", "auto", "--strategy", "llma:copy_length=4")
    ours = ["autoregressive", "auto", "llma:copy_length=4"]  # the baseline first
    for cell in (*results["closed"].values(), *results["open"].values()):
        tokens = cell["servers"]["autoregressive"]["repeats"][0]["output_tokens"]
        assert cell["requests"] == 3 and list(cell["servers"]) == ours
        for row in cell["servers"].values():
            assert len(row["ratio"]) == 2 and row["tokens_per_s"] > 0 and row["ttft_ms"]["p99"] >= row["ttft_ms"]["p50"] > 0
            assert {one["output_tokens"] for one in row["repeats"]} == {tokens}
        plain = cell["servers"]["autoregressive"]
        assert (set(plain["ratio"]), plain["tokens_per_step"], plain["drafted_per_step"]) == ({1.0}, 1.0, 0.0)
    assert results["open"]["0.8"]["requests_per_s"] == pytest.approx(0.8 * results["capacity"], abs=1e-2)
    assert results["differing"] == dict.fromkeys(ours, 0)


def test_invalid_options_are_refused(
    tiny_model: Path, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", tiny_model, "--prompts")
    twice = tmp_path / "twice.jsonl"
    twice.write_text(files[0].read_text())
    one, small = ("--concurrency", 1), ("--concurrency", 1, "--max-tokens", 5)
    assert "must be numbers with commas" in refusal(capsys, "load", "--prompts", "p", "--concurrency", "1,x")
    assert "must name no number twice" in refusal(capsys, "load", "--prompts", "p", "--concurrency", "4,4")
    assert "6 prompts fit, 32 are needed" in refusal(capsys, "load", *model, *files)
    assert "did you mean 'trie'" in refusal(capsys, "load", *model, *files, *one, "--strategy", "trei")
    assert "two records of --prompts have one id" in refusal(capsys, "load", *model, *files, twice, *small)
    assert "could not be read" in refusal(capsys, "load", *model, tmp_path / "absent.jsonl")


def test_the_phases_of_a_step_are_profiled(tiny_model: Path, tmp_path: Path) -> None:
    options = ("--model", tiny_model, "--dtype", "float32", "--context", 24, "--max-tokens", 12, "--budget", 8)
    cases = run(tmp_path, "profile", *options, "--batch", 1, 3, "--steps", 6)["cases"]
    assert [(case["strategy"], case["batch"], case["sampled"]) for case in cases] == [
        (strategy, batch, sampled) for sampled in (False, True) for strategy in ("autoregressive", "auto") for batch in (1, 3)
    ]
    for case in cases:
        assert case["steps"] == 6 and tuple(case["ms"]) == PHASES and 0 < case["around"] < 1
        assert case["ms"]["forward"] > 0 and case["ms"]["pack"] > 0 and case["ms"]["verify"] > 0
        assert case["step_ms"] == pytest.approx(sum(case["ms"].values()), abs=1e-3)
        if case["strategy"] == "autoregressive":
            assert case["drafted"] == 0 and case["tokens_per_step"] == 1
