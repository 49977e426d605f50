"""Devices that cannot be used, and weights on their way to a GPU that does not exist."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.engine import accelerator, environment
from outrider.engine.engine import Engine
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.loading import memory
from outrider.engine.loading import model as module
from outrider.engine.loading.model import device_of, load_model, load_weights
from outrider.engine.measures.energy import meter_name
from tests.engine.loading.gpus.fake_gpus import GIB, FakeGpus
from tests.helpers.gguf_files import save_gguf
from tests.helpers.models import llama_config, save_model

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("gpu") / "model", llama_config())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What transformers is asked for; what it returns has no weights and cannot be moved."""
    calls: list[dict[str, Any]] = []

    def from_pretrained(files: str, **options: Any) -> tuple[Any, dict[str, Any]]:
        calls.append(options)
        return SimpleNamespace(device=GPU), {"missing_keys": [], "unexpected_keys": []}

    monkeypatch.setattr(module.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return calls


def refused(name: str, gpus: FakeGpus) -> str:
    with accelerator.use(gpus), pytest.raises(ModelLoadError) as caught:  # type: ignore[arg-type]
        device_of(name)
    said = str(caught.value)
    assert "\n" not in said and f"model.device is {name}" in said
    return said


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are() -> None:
    assert refused("cuda:7", FakeGpus(2)).endswith("sees 2 GPUs: give cuda:0 or cuda:1")
    assert refused("cuda:1", FakeGpus(1)).endswith("sees 1 GPU: give cuda:0")
    assert refused("cuda:8", FakeGpus(8)).endswith("sees 8 GPUs: give cuda:0 to cuda:7")
    with accelerator.use(FakeGpus(2)):  # type: ignore[arg-type]
        assert [device_of(name) for name in ("auto", "cuda", "cuda:1")] == [GPU, GPU, torch.device("cuda", 1)]
        with pytest.raises(ModelLoadError, match="is not known"):
            device_of("gpu")


@pytest.mark.parametrize(
    ("cuda", "visible", "reason", "remedy"),
    [
        (None, None, "CPU build of torch", f"pip install --force-reinstall torch=={torch.__version__.partition('+')[0]}"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES is ''", "unset it"),
        ("13.0", "-1", "CUDA_VISIBLE_DEVICES is '-1'", "unset it"),
        ("13.0", None, "the NVIDIA driver is missing or too old for CUDA 13.0", "update it"),
        ("13.0", "7", "CUDA_VISIBLE_DEVICES='7' names no GPU", "update it"),
    ],
    ids=["cpu-build", "hidden", "minus-one", "old-driver", "wrong-number"],
)
def test_why_no_gpu_can_be_used(
    cuda: str | None, visible: str | None, reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """``cuda`` is refused with it; where there is a GPU, ``auto`` says it before it takes the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ModelLoadError) as caught:
        device_of("cuda")
    assert reason in str(caught.value) and remedy in str(caught.value) and "model.device=cpu" in str(caught.value)
    monkeypatch.setattr(module, "nvidia_device_present", lambda: True)
    assert device_of("auto") == torch.device("cpu")
    (line,) = caplog.records
    assert line.levelno == logging.WARNING and reason in line.getMessage() and remedy in line.getMessage()
    caplog.clear()
    assert device_of("cpu") == torch.device("cpu")
    monkeypatch.setattr(module, "nvidia_device_present", lambda: False)
    assert device_of("auto") == torch.device("cpu") and not caplog.records


def test_serving_on_the_cpu_beside_a_gpu_is_said_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "nvidia_device_present", lambda: True)
    with accelerator.use(FakeGpus(why="the driver is too old: update it")):  # type: ignore[arg-type]
        load_model(ModelOptions(str(folder), dtype="float32", threads=1))
    assert "the driver is too old: update it" in caplog.records[0].getMessage()
    assert sum("the driver is too old" in record.getMessage() for record in caplog.records) == 1


def test_a_gpu_shows_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_DEVICES", tmp_path)
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "driver")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidiactl").touch()
    assert not environment.nvidia_device_present()
    for name in ("nvidia3", "driver", "nvidia-smi"):
        (tmp_path / name).touch(0o755)
        assert environment.nvidia_device_present(), name
        (tmp_path / name).unlink()


def test_names_of_gpus_are_asked_of_the_accelerator() -> None:
    with accelerator.use(FakeGpus(2)):  # type: ignore[arg-type]
        assert [meter_name(name) for name in ("cuda", "cuda:0", "cuda:1", "cpu")] == ["GPU-0", "GPU-0", "GPU-1", "cpu"]
        assert environment.device_name(torch.device("cuda:1")) == "a GPU, number 1"
    with accelerator.use(FakeGpus(why="none")):  # type: ignore[arg-type]
        assert meter_name("cuda") == "cuda"


def test_weights_go_straight_to_the_gpu(folder: Path, asked: list[dict[str, Any]]) -> None:
    with accelerator.use(FakeGpus()):  # type: ignore[arg-type]
        load_weights(str(folder), torch.bfloat16, TREE_ATTENTION, GPU)
    assert [options["device_map"] for options in asked] == [{"": GPU}]
    with accelerator.use(FakeGpus()):  # type: ignore[arg-type]
        load_weights(str(folder), torch.bfloat16, TREE_ATTENTION, torch.device("cpu"))
    assert "device_map" not in asked[1]


def test_weights_that_do_not_fit_a_gpu_are_refused_before_they_are_read(folder: Path, asked: list[dict[str, Any]]) -> None:
    stored = sum(part.stat().st_size for part in folder.glob("*.safetensors"))
    options, speculation = ModelOptions(str(folder), device="cuda"), SpeculationOptions("autoregressive")
    for gpus in (FakeGpus(free=stored - 1), FakeGpus(total=2 * stored, taken=int(0.8 * stored) + 1)):
        with (
            accelerator.use(gpus),
            pytest.raises(ModelLoadError, match=r"GiB of cuda:0 are free: stop other processes that use it, raise"),
        ):  # type: ignore[arg-type]
            Engine.load(options, EngineOptions(), speculation)
        assert not asked
    with accelerator.use(FakeGpus(free=stored)):  # type: ignore[arg-type]
        load_weights(str(folder), "auto", TREE_ATTENTION, GPU)
    assert len(asked) == 1


def test_a_gguf_file_has_to_fit_the_machine_and_the_gpu(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    save_gguf(tmp_path / "tiny.gguf", model, folder)
    need = 2 * model.num_parameters()
    read: list[object] = []
    moved = SimpleNamespace(to=lambda device: read.append(device) or SimpleNamespace(device=device))
    monkeypatch.setattr(module, "load_gguf_model", lambda *_: moved)
    with accelerator.use(FakeGpus(free=need - 1)), pytest.raises(ModelLoadError, match="of cuda:0 are free"):  # type: ignore[arg-type]
        load_weights(str(tmp_path / "tiny.gguf"), "auto", TREE_ATTENTION, GPU)
    assert not read
    with accelerator.use(FakeGpus(free=need)):  # type: ignore[arg-type]
        load_weights(str(tmp_path / "tiny.gguf"), "auto", TREE_ATTENTION, GPU)
        assert read == [GPU]
        monkeypatch.setattr(memory, "free_bytes", lambda: need - 1)
        with pytest.raises(ModelLoadError, match="of memory are free"):
            load_weights(str(tmp_path / "tiny.gguf"), "auto", TREE_ATTENTION, GPU)


def test_a_process_takes_its_share_of_a_gpu_and_never_more_than_is_free() -> None:
    total = 80 * GIB

    def left(utilization: float, free: int, taken: int = 0) -> int:
        with accelerator.use(FakeGpus(total=total, free=free, taken=taken)):  # type: ignore[arg-type]
            return memory.left_bytes(GPU, utilization)

    assert left(0.45, total) == left(0.45, total - 36 * GIB) == 36 * GIB  # the other one has loaded meanwhile
    assert left(0.45, total - 46 * GIB, taken=10 * GIB) == 26 * GIB
    assert left(0.9, 20 * GIB) == 20 * GIB and left(0.45, 40 * GIB, taken=40 * GIB) == 0
    with accelerator.use(FakeGpus()):  # type: ignore[arg-type]
        assert memory.left_bytes(torch.device("cuda", 1), 0.9) == 0
