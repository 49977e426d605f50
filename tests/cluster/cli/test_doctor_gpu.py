"""``outrider doctor`` on machines with GPUs that torch cannot use, or that do not exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cluster.cli import doctor
from outrider.engine import accelerator, environment
from outrider.experiments.device_double.gpu import DoubleGpu
from outrider.experiments.device_double.guard import unavailable
from tests.cluster.commands import outrider
from tests.engine.loading.gpus.fake_gpus import GIB, FakeGpus
from tests.helpers.models import llama_config


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "list_gpus", lambda: ["NVIDIA A100-SXM4-80GB, 81920 MiB, 535.104"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def findings() -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in json.loads(outrider("doctor", "--json").stdout)["findings"]}


@pytest.mark.parametrize(
    ("cuda", "visible", "reason", "remedy"),
    [
        (None, None, "CPU build", "pip install --force-reinstall torch=="),
        ("13.0", None, "too old for CUDA 13.0", "update it"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES is ''", "unset it"),
    ],
    ids=["cpu-build", "old-driver", "hidden"],
)
@pytest.mark.usefixtures("gpu_machine")
def test_why_the_gpu_is_not_used(
    cuda: str | None, visible: str | None, reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = findings()
    assert found["gpu"]["status"] == "ok" and found["torch"]["status"] == "optional"
    assert reason in found["torch"]["found"] and found["torch"]["remedy"].startswith(remedy)


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "list_gpus", list)
    monkeypatch.setattr(environment, "nvidia_device_present", lambda: True)
    with accelerator.use(FakeGpus(why="the driver is gone: update it")):  # type: ignore[arg-type]
        found = findings()
    assert (found["gpu"]["status"], found["torch"]["remedy"]) == ("optional", "update it")
    assert "the driver is gone" in found["torch"]["found"] and found["gpu"]["remedy"]
    monkeypatch.setattr("outrider.engine.cuda.slot_attention.graph_fault", lambda device: None)
    with accelerator.use(FakeGpus(2)):  # type: ignore[arg-type]
        assert findings()["torch"]["status"] == "ok"


def told(folder: Path, config: Path, settings: str) -> dict[str, Any]:
    config.write_text(settings)
    run = outrider("doctor", "--json", "--model", folder, "--device", "cuda", "--config", config)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_it_tells_the_length_that_a_server_takes(tmp_path: Path) -> None:
    folder, config = tmp_path / "model", tmp_path / "service.yaml"
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    llama_config(num_hidden_layers=8, max_position_embeddings=131072, **heads).save_pretrained(folder)
    with accelerator.use(FakeGpus(total=40 * GIB, free=40 * GIB)):  # type: ignore[arg-type]
        whole = told(folder, config, "{}\n")
        half = told(folder, config, "server: {gpus_per_replica: 0.5}\n")
        ranks = told(folder, config, "parallelism: {mode: lookahead}\nserver: {replicas: 4}\n")
        shown = outrider("doctor", "--model", folder, "--device", "cuda", "--config", config).stdout
    assert (whole["ok"], whole["max_model_len"], whole["context_len"]) == (True, 65536, 131072)
    assert (half["ok"], half["max_model_len"], half["free_bytes"]) == (True, 32768, whole["free_bytes"] // 2)
    assert ranks["draft_rows"] == 4 * whole["draft_rows"] and ranks["kv_slots"] == 8
    assert f"{ranks['max_model_len']:,} tokens of the model's 131,072" in shown and "kept back" in shown


def test_it_captures_a_small_graph_on_each_gpu(gpu_machine: None) -> None:
    if unavailable() is not None:
        pytest.skip(str(unavailable()))
    gpu = DoubleGpu()
    with accelerator.use(gpu):
        assert findings()["cuda graphs"] == {"name": "cuda graphs", "status": "ok", "found": "captured on 2 GPUs", "remedy": ""}
        gpu.fail_at(6, torch.AcceleratorError("CUDA error: unspecified launch failure"))
        found = findings()["cuda graphs"]
    assert found["status"] == "optional" and found["found"].startswith("cuda:0: ") and "launch failure" in found["found"]
