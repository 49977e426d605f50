"""``outrider bench strategies`` from end to end on a tiny model, and transformers' assisted generation beside it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from experiments.bench.__main__ import main
from experiments.bench.engines.competition import Tally, decode_ratios, where_time_goes
from experiments.bench.engines.contestants import Prompt, Run
from experiments.bench.engines.models import Workload, fitting
from experiments.bench.engines.stock_generate import StockAssisted, StockGenerate
from experiments.bench.options import SIZES
from experiments.bench.strategies import unfaithful
from tests.helpers.models import llama_config, save_model

OURS = ("autoregressive", "llma:copy_length=4", "prompt_lookup")
SENTENCE = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def stock(tiny_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture
def known(tmp_path: Path) -> Path:
    records = [
        {"id": "k/1", "prompt": SENTENCE, "output": SENTENCE * 2},
        {"id": "k/2", "prompt": "Who?", "output": "Nobody."},
        {"id": "k/3", "prompt": SENTENCE * 40, "output": "too long for the tiny model"},
    ]
    path = tmp_path / "known.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def bench(*arguments: object, code: int = 0) -> None:
    strategies = [part for name in OURS for part in ("--strategy", name)]
    assert main(["strategies", *(str(argument) for argument in arguments), *strategies, "--repeats", "2"]) == code


def record_of(folder: Path) -> dict[str, Any]:
    path, picture = sorted(folder.iterdir())
    assert path.suffix == ".json" and ElementTree.parse(picture).getroot().tag.endswith("svg")
    record: dict[str, Any] = json.loads(path.read_text())
    assert record["name"] == "bench-strategies" and "revision" in (record["git"] or {"revision": ""})
    return record


def test_all_contestants_give_the_same_outputs(
    tiny_model: Path, workloads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = (workloads / "a.jsonl", workloads / "b.jsonl")
    out = tmp_path / "out"
    bench("--model", tiny_model, "--prompts", *files, "--max-tokens", 16, "--dtype", "float64", "--out", out, "--json")
    printed = json.loads(capsys.readouterr().out)
    record = record_of(out)
    assert record["results"] == printed
    assert (record["seed"], record["config"]["dtype"]) == (0, "float64")
    assert [(w["records"], w["too_long"]) for w in printed["workloads"].values()] == [(2, 0), (1, 1)]
    assert list(printed["overall"]) == ["generate", "generate + lookup", "generate + early exit 1", *OURS]
    for name, row in printed["overall"].items():
        assert (row["identical"], row["records"]) == (3, 3), name
        assert len(row["ratio"]) == len(row["decode_ratio"]) == len(row["ratio_to_lookup"]) == 2
        assert row["tokens_per_step"] >= 1.0 and row["ms"]["forward"] > 0 and row["ms"]["prefill"] > 0
    assert printed["overall"]["generate"]["ratio"] == [1.0, 1.0]
    rows = printed["workloads"]["a"]["contestants"]
    assert rows["autoregressive"]["tokens_per_step"] == 1.0 and rows["autoregressive"]["drafted_per_step"] == 0.0
    assert rows["generate + lookup"]["ms"]["propose"] is None and rows["llma:copy_length=4"]["ms"]["propose"] > 0


def test_assisted_generation_gives_the_tokens_of_generate(stock: PreTrainedModel, tmp_path: Path) -> None:
    other = save_model(tmp_path / "assistant", llama_config(num_hidden_layers=1), seed=1)
    assistant = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    prompts = [Prompt("one", [5, 6, 7, 8] * 4, []), Prompt("two", [9, 10], [])]
    expected = [StockGenerate(stock, 12, ()).run([prompt]).outputs[0] for prompt in prompts]
    for helper, name in ((1, "generate + early exit 1"), (assistant, "generate + assistant")):
        contestant = StockAssisted(stock, 12, (), helper)
        run = contestant.run(prompts)
        assert (contestant.name, run.outputs) == (name, expected)
        assert 2 <= run.steps <= 24 and run.accepted_by_source == {"assistant": 24 - run.steps}
    assert run.propose_s is not None and run.propose_s > 0
    assert stock.config.num_hidden_layers == 2


def test_a_fault_of_transformers_leaves_the_others_running(
    tiny_model: Path, known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: StockAssisted, prompts: list[Prompt]) -> Run:
        raise ValueError("no early exit here")

    monkeypatch.setattr(StockAssisted, "run", broken)
    bench("--model", tiny_model, "--prompts", known, "--records", 1, "--max-tokens", 3, "--out", tmp_path / "out")
    results = record_of(tmp_path / "out")["results"]
    assert results["skipped"] == {"generate + early exit 1": "transformers could not run it: no early exit here"}
    assert list(results["overall"]) == ["generate", "generate + lookup", *OURS]


def test_times_of_a_step_leave_out_the_prefill() -> None:
    base, own = Tally.empty(2), Tally.empty(2)
    for repeat in range(2):
        base.add(repeat, Run([[1] * 11], 11, 1.0, 9.0, 0.0, 0), 11.0)
        own.add(repeat, Run([[1] * 11], 6, 1.0, 2.0, 0.5, 20, {"llma": 5}), 5.0)
    assert decode_ratios(own, base) == [2.5, 2.5]
    assert where_time_goes(own, prefills=2) == {"propose": 100.0, "forward": 400.0, "rest": 300.0, "prefill": 1000.0}
    assert (own.drafted, own.accepted_by_source) == (40, {"llma": 10})
    own.add(0, Run([[1]], 1, 1.0, 0.0), 1.0)
    assert own.drafted is None and where_time_goes(own, prefills=3)["propose"] is None


def test_only_exact_runs_must_be_identical() -> None:
    rows = {"llma:copy_length=2": {"identical": 1, "records": 2}, "prompt_lookup": {"identical": 2, "records": 2}}
    results = {"overall": rows, "lossless": list(rows)}
    wrong = ["llma:copy_length=2 is not identical to plain decoding"]
    assert unfaithful(results, Namespace(dtype="float32")) == wrong
    assert unfaithful(results, Namespace(dtype="bfloat16")) == []


def test_workloads_without_a_usable_record_are_refused() -> None:
    prompt = Prompt("x", [1] * 9, [])
    with pytest.raises(ValueError, match="no record of w fits the context of 10 tokens"):
        fitting(Workload("w", [prompt], 0), 2, 10)
    with pytest.raises(ValueError, match="two records of w have one id"):
        fitting(Workload("w", [prompt, prompt], 0), 1, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--budget", "-1"], "--budget must be at least 0"),
        (["--prompts", "a/x.jsonl", "b/x.jsonl"], "two files of --prompts have one name"),
    ],
)
def test_options_that_do_not_go_together_end_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["strategies", *([] if "--prompts" in arguments else ["--prompts", "p.jsonl"]), *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_bad_names_are_one_line(tiny_model: Path, known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["strategies", "--model", str(tiny_model), "--out", str(tmp_path / "out"), "--prompts"]
    assert main([*arguments, str(known), "--strategy", "llam"]) == 2
    assert main([*arguments, str(tmp_path / "absent.jsonl")]) == 2
    assert main([*arguments, str(known), "--records", "1", "--assistant", str(tmp_path / "absent")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert ["did you mean 'llma'" in errors[0], "could not be read" in errors[1], "--assistant" in errors[2]] == [True] * 3
    assert not (tmp_path / "out").exists()


def test_random_models_of_several_families_follow_known_outputs_in_turns(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "num_key_value_heads": 2}
    monkeypatch.setitem(SIZES, "tiny-lfm2", {**SIZES["tiny"], "model_type": "lfm2", "hidden_size": 128, **layers})
    path, out = tmp_path / "known.jsonl", tmp_path / "out"
    path.write_text(json.dumps({"id": "k/1", "prompt": SENTENCE, "output": SENTENCE * 2}) + "\n")
    models = ("--random-model", "tiny", "tiny-lfm2", "--prompts", path)
    bench(*models, "--tokenizer", tiny_model, "--dtype", "float32", "--out", out)
    results = record_of(out)["results"]
    assert list(results["models"]) == list(results["gains"]) == ["tiny", "tiny-lfm2"]
    assert all(list(model["step_ms"]) == ["1", "8", "16"] for model in results["models"].values())
    (workload,) = results["workloads"].values()
    assert workload["records"] == 1 and len(workload["contestants"]) == 6
    for name in results["models"]:
        plain, drafted = (workload["contestants"][f"{name}, {strategy}"] for strategy in ("plain", OURS[1]))
        assert (plain["speedup"], plain["tokens_per_step"], plain["differing"]) == ([1.0, 1.0], 1.0, 0)
        assert drafted["tokens_per_step"] > 1.5 and drafted["drafted_per_step"] > 1 and drafted["differing"] == 0
        assert list(results["gains"][name]) == [*OURS[1:]]
    first, other = (results["gains"][name][OURS[1]] for name in results["models"])
    assert first["of_first"] == [1.0, 1.0]
    for speedup, base, share in zip(other["speedup"], first["speedup"], other["of_first"], strict=True):
        assert share == pytest.approx(speedup / base, rel=0.02)
    assert "tiny-lfm2" in capsys.readouterr().out
    alone = ["--tokenizer", str(tiny_model), "--strategy", "autoregressive"]
    assert main(["strategies", *map(str, models), *alone, "--out", str(tmp_path)]) == 2
    assert "needs a --strategy besides autoregressive" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        bench(*models, code=2)
    assert "--random-model needs --tokenizer" in capsys.readouterr().err
