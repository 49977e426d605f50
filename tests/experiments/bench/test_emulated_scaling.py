"""Strong scaling on emulated GPUs: rows, the check of dilation, the simulation beside it, and options that do not go together."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.cli.generate.prompt_file import PromptRecord
from outrider.configs.slices import EmulationOptions
from outrider.decoding.request import PLAIN
from outrider.engine.emulation.roofline import DeviceRoofline
from outrider.experiments.bench.run import arguments, run
from outrider.experiments.bench.scaling.command import BENCH, parted
from outrider.experiments.bench.scaling.emulated import dilation_rows, overall, settings_of, validated
from outrider.experiments.bench.scaling.results import Form
from outrider.experiments.report.speeds import emulated_validation, strong_scaling
from outrider.experiments.report.tables import headlines

FORMS = [Form("one", 1, 1), Form("tensor", 2, 1), Form("replicas", 2, 1)]


def cell(form: str, strategy: str, seconds: float, clients: int = 1, **changed: Any) -> dict[str, Any]:
    """Four requests of 30 tokens, each in 30 or 10 steps of its own, in so many emulated seconds."""
    request_steps = 120 if strategy == PLAIN else 40
    steps = request_steps // clients
    found = {
        "form": form, "strategy": strategy, "clients": clients, "dilation": 8.0, "delay_ms": 0.0, "repeat": 0, "requests": 4,
        "tokens": 120, "wall_s": 8 * seconds, "latency_s": 8 * seconds * clients, "hidden_s": 7 * seconds * clients,
        "cpu_s": seconds, "cores": 2, "differing": 0,
        "ratio": 1.001, "steps": steps, "request_steps": request_steps, "drafted": 0, "decode_s": seconds * clients,
        "ttft_s": 0.08, "device_s": 0.9 * seconds, "forwards": steps, "late": 0, "device_bytes": 100.0 * steps,
        "exchange_bytes": 0.0, "exchange_s": 0.0,
    }  # fmt: skip
    return found | changed


CELLS = [
    cell(form.label, strategy, seconds * (1 + repeat / 100), clients, repeat=repeat)
    for form, seconds in zip(FORMS, (1.4, 0.8, 1.4), strict=True)
    for strategy, seconds in ((PLAIN, seconds), ("llma", seconds / 3))
    for clients in (1, 4)
    for repeat in range(3)
]


def test_rows_are_in_emulated_seconds() -> None:
    rows = overall(FORMS, CELLS, 8.0)
    row = rows["TP 2 x 1, llma, 4 at once"]
    assert row["tokens_per_s"][0] == pytest.approx(120 / (0.8 / 3), rel=1e-3) and len(row["tokens_per_s"]) == 3
    assert row["speed_up"][0] == pytest.approx(3 * 1.4 / 0.8, rel=1e-3) and row["efficiency"] == pytest.approx(2.625, rel=1e-3)
    assert row["ttft_ms"][0] == 20.0 and row["tpot_ms"][0] == pytest.approx(1e3 * 4 * 0.8 / 3 / 116, rel=1e-3)
    assert (row["bytes"], row["tokens_per_step"], row["processor"], row["step_ratio"]) == (100.0, 3.0, 0.062, 1.001)
    assert row["interval"]["tokens_per_s"]["min"] < row["interval"]["tokens_per_s"]["max"]
    assert (
        rows["1 x 1, plain, 1 at once"]["speed_up"] == [1.0, 1.0, 1.0] and rows["replicas 2 x 1, plain, 1 at once"]["bytes"] == 0
    )
    wrong = overall(FORMS, [*CELLS, cell("1 x 1", PLAIN, 1.4, repeat=3, differing=2)], 8.0)
    assert parted({"overall": wrong}, Namespace(emulate="A100-80")) == [
        "1 x 1, plain, 1 at once: 2 outputs are not the known ones"
    ]


def test_dilations_agree_or_not() -> None:
    cells = [
        cell("1 x 1", PLAIN, seconds, dilation=dilation, delay_ms=delay_ms)
        for delay_ms, times in ((0.0, (1.0, 1.04)), (1.0, (1.2, 1.4)))
        for dilation, seconds in zip((1.0, 4.0), times, strict=True)
    ]
    rows = dilation_rows(cells)
    few, many = (rows[f"1 x 1, plain, 1 at once, drafter +{delay_ms} ms"]["tokens_per_s"] for delay_ms in (0, 1))
    assert few["agrees"] and few["difference"] == pytest.approx(1 / 1.04 - 1, abs=1e-3)
    assert not many["agrees"] and many["1"] == 100.0
    (table,) = headlines({"name": "bench-scaling", "results": {"emulated": {}, "dilation": rows}})
    assert len(table.rows) == 2 and table.rows[1][1].startswith("**100")


def test_the_simulation_is_compared_with_every_row(tiny_model: Path) -> None:
    roofline = DeviceRoofline.of(EmulationOptions("A100-80", "llama-3.1-8b", form="graphs"))
    records = [
        PromptRecord(str(at), "all", f"the quick brown fox {at}", (), " the lazy dog and the lazy dog" * 3) for at in range(4)
    ]
    step_s = roofline.step_s(1, 256, 256)
    cells = [
        cell("1 x 1", PLAIN, 120 * (step_s + 0.0005), 1, decode_s=116 * (step_s + 0.0005), device_s=120 * step_s),
        cell("1 x 1", PLAIN, 30 * (step_s + 0.002), 4, device_s=30 * step_s),
        cell("replicas 2 x 1", PLAIN, 15 * (step_s + 0.002), 4),
    ]
    args = Namespace(clients=[1, 4], strategy=[PLAIN], budget=None, max_tokens=30, time_dilation=8.0)
    rows = overall(FORMS, cells, 8.0)
    told = validated(FORMS, cells, rows, roofline, records, str(tiny_model), args)
    args.time_dilation = 1.0
    whole = validated(FORMS, cells, rows, roofline, records, str(tiny_model), args)["rows"]
    for name, row in told["rows"].items():  # dilation hides no second of the host's work for a request that is alone
        slower = whole[name]["predicted"] / row["predicted"]
        assert slower == pytest.approx(1.0, abs=0.005) if name.endswith("1 at once") else slower > 1.0, name
    assert told["rows"].keys() == rows.keys() and told["told"] == 3
    one = told["rows"]["1 x 1, plain, 1 at once"]
    (table,) = headlines({"name": "bench-scaling", "results": {"emulated": {}, "overall": rows, "prediction": told}})
    assert [row[0] for row in table.rows] == list(rows)
    results = {"overall": rows, "prediction": told}
    assert [row[0] for row in strong_scaling(results).rows] == ["1 x 1", "replicas 2 x 1"]
    assert [row[0] for row in emulated_validation(results).rows] == ["one GPU", "replicas", "all"]
    assert abs(one["error"]) < 0.1 and told["fitted"]["hosts"][PLAIN]["request_s"] == pytest.approx(0.0005, rel=0.01)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--emulate", "A100-80"], "--emulate needs --as"),
        (["--emulate", "X100", "--as", "llama-3.1-8b"], "invalid choice: 'X100'"),
        (["--as", "llama-3.1-8b"], "--as is for emulated GPUs: give --emulate"),
        (["--check-dilation"], "--check-dilation is for emulated GPUs"),
        (["--emulate", "L4", "--as", "llama-3.1-8b", "--time-dilation", "20"], "--time-dilation must be between 1 and 16"),
        (["--emulate", "L4", "--as", "llama-3.1-8b", "--form", "threads"], "--form threads is for a CPU"),
    ],
)
def test_options_that_do_not_go_together(given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "words.jsonl"
    prompts.write_text('{"prompt": "x", "output": "y"}\n')
    with pytest.raises(SystemExit) as ended:
        arguments(BENCH, ["--prompts", str(prompts), *given])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_prompts_need_outputs_and_servers_their_settings(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "words.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    given = [
        "--model",
        str(tiny_model),
        "--prompts",
        str(prompts),
        "--emulate",
        "L4",
        "--as",
        "llama-3.1-8b",
        "--out",
        str(tmp_path),
    ]
    assert run(BENCH, [*given, "--max-tokens", "4"]) == 2
    assert "has no output to follow" in capsys.readouterr().err
    args = arguments(BENCH, [*given, "--link", "ethernet", "--strategy", "llma", "--clients", "16"])
    settings = settings_of(args, Form("pipeline", 4, 1), 8.0, 1.0, tmp_path / "known.jsonl")
    wanted = {
        "emulation.device=L4", "emulation.link=ethernet", "emulation.time_dilation=8", "emulation.drafter_ms=1",
        "model.device=cpu", "engine.max_running=16", f"speculation.strategies={json.dumps(['llma'])}",
        "parallelism.mode=pipeline", "parallelism.world_size=4",
    }  # fmt: skip
    assert wanted <= {*settings} and not any("max_draft_tokens" in setting for setting in settings)
