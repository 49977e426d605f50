"""``outrider doctor --model FOLDER --gpu CARD``: what a model comes to on a GPU that is not here, from its config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.experiments.gpu_suite.plan_table import CONFIGS
from tests.cluster.commands import error_line, outrider

LLAMA = CONFIGS / "Llama-3.1-8B"


def test_a_plan_from_a_configuration_alone() -> None:
    assert [path.name for path in LLAMA.iterdir()] == ["config.json"]
    run = outrider("doctor", "--model", LLAMA, "--gpu", "a100-80", "--json")
    said = json.loads(run.stdout)
    assert run.returncode == 0 and not run.stderr and said["ok"] and not said["has_weights"]
    assert (said["card"]["name"], said["exact"], said["graphs"]) == ("A100-80", True, [64])
    assert (said["max_running"], said["kv_slots"], said["max_model_len"]) == (8, 13, 32768)
    assert said["memory"]["weights"] == 2 * said["parameters"] and said["memory"]["kv_slots"] == 13 * said["slot_bytes"]
    assert said["computed_step_ms"].keys() == {"1", "64"} and said["computed_prefill_ms"].keys() == {"2048", "8192"}


def test_a_plan_says_what_is_computed_and_not_measured(tmp_path: Path) -> None:
    run = outrider("doctor", "--model", LLAMA, "--gpu", "L40S")
    assert run.returncode == 0
    told = " ".join(run.stdout.replace("│", " ").split())
    for words in ("memory: weights", "memory: kv slots", "memory: activations", "CUDA graphs", "not measured", "allowance"):
        assert words in told, run.stdout
    config = tmp_path / "service.yaml"
    config.write_text("engine: {exact: rounding, max_running: 4}\n")
    run = outrider("doctor", "--model", CONFIGS / "Phi-4-mini", "--gpu", "L40S", "--config", config)
    told = " ".join(run.stdout.replace("│", " ").split())
    assert run.returncode == 0 and "without CUDA graphs" in told and "rope depends on the length" in told


def test_a_refusal_is_one_line_with_what_to_do() -> None:
    assert "engine.exact=rounding" in error_line(outrider("doctor", "--model", CONFIGS / "Phi-4-mini", "--gpu", "H100"), 1)
    run = outrider("doctor", "--model", CONFIGS / "Llama-3.3-70B", "--gpu", "H100", "--json")
    said = json.loads(run.stdout)
    assert run.returncode == 1 and not said["ok"] and "parallelism.mode=tensor" in said["reason"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", LLAMA, "--gpu", "B1000"), "A100-80"),
        (("--model", LLAMA, "--gpu", "L4", "--device", "cpu"), "--device"),
        (("--gpu", "L4"), "--gpu"),
    ],
)
def test_options_that_do_not_go_together(options: tuple[object, ...], words: str) -> None:
    assert words in error_line(outrider("doctor", *options), 2)
