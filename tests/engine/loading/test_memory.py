"""Models that do not fit into memory are refused before they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.engine.engine import Engine
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading import memory
from tests.helpers.models import llama_config, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("memory") / "model", llama_config())


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system tells of the machine's memory."""
    monkeypatch.setattr(memory, "_MACHINE", tmp_path / "meminfo")
    return tmp_path / "meminfo"


def have_free(told: Path, size: int) -> None:
    told.write_text(f"MemTotal:       99999999 kB\nMemAvailable:   {size >> 10} kB\nHugePages_Total:       0\n")


def load(path: Path, dtype: str = "float32", **options: int) -> Engine:
    model = ModelOptions(str(path), dtype=dtype, threads=1)
    return Engine.load(model, EngineOptions(**options), SpeculationOptions("autoregressive"))


@pytest.mark.parametrize("dtype", ["float32", "float64", "auto"])
def test_weights_that_do_not_fit_are_refused(folder: Path, dtype: str, told: Path) -> None:
    stored = sum(part.stat().st_size for part in folder.glob("*.safetensors"))
    have_free(told, int(1.5 * stored) if dtype == "float64" else stored // 2)
    with pytest.raises(ModelLoadError, match=r"needs 0\.\d GiB for its weights, and 0\.\d GiB of memory are free: stop other"):
        load(folder, dtype)


def test_slots_that_do_not_fit_are_refused(folder: Path, told: Path) -> None:
    have_free(told, 2**24)
    assert load(folder, max_running=1).info.max_model_len
    with pytest.raises(ModelLoadError, match=r"KV slots need .* lower model\.max_model_len or engine\.max_running"):
        load(folder, max_running=200)


def test_a_container_s_limit_counts(tmp_path: Path, told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_free(told, 2**40)
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    assert memory.free_bytes() == 2**40
    for name, text in {"max": "1000000\n", "current": "400000\n", "stat": "anon 1\ninactive_file 5000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.free_bytes() == 605_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes() == 2**40


def test_a_system_that_does_not_tell(told: Path) -> None:
    assert not told.exists() and memory.free_bytes() > 2**24
