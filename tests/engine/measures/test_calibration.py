"""The curve on disk: kept, read back, and measured anew when the file is of no use."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.engine.cuda.static_runner import StaticRunner
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.measures.calibration import Calibration, CalibrationFile
from tests.helpers.attention_reference import ReferenceAttention
from tests.helpers.models import CONTEXT, VOCAB, tiny_model

INFO = ModelInfo("m", CONTEXT, VOCAB, "float32", "cpu", 1, (0,), "auto", True, "0123456789abcdef0123", "none")


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return tiny_model("llama", "float32").runner


@pytest.fixture(scope="module")
def measured(runner: ModelRunner, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    return replace(CalibrationFile(tmp_path_factory.mktemp("unused"), runner, INFO).measure(), spread=1.0)


@pytest.fixture
def kept(runner: ModelRunner, measured: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalibrationFile:
    """A file with a curve; measuring gives the same numbers again and is counted in ``measures``."""
    file = CalibrationFile(tmp_path / "made" / "when needed", runner, INFO)
    assert file.save(measured)
    monkeypatch.setattr(CalibrationFile, "measure", lambda self: self.measures.append(1) or measured)
    monkeypatch.setattr(CalibrationFile, "measures", [], raising=False)
    return file


def measures(file: CalibrationFile) -> int:
    return len(file.measures)  # type: ignore[attr-defined]


def test_what_was_measured_is_read_back(runner: ModelRunner, kept: CalibrationFile, measured: Calibration) -> None:
    assert CalibrationFile(kept.path.parent, runner, INFO).curve() == measured.curve
    assert measures(kept) == 0
    assert [path.name for path in kept.path.parent.iterdir()] == [kept.path.name]  # nothing else is left behind
    assert kept.path.name.startswith("latency-0123456789abcdef-")


@pytest.mark.parametrize(
    "changed",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"context": ', '"context": "many'),
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace('"dtype": "float32"', '"dtype": "float16"'),
        lambda text: text.replace('"covers": [', '"covers": ["'),
        lambda text: text.replace('"covers": [', '"covers": [1, '),
        lambda text: text.replace('"entry_s"', '"entries_s"'),
        lambda text: re.sub(r'("rows_s": \[\s*)', r"\1-", text),
        lambda text: re.sub(r'("rows_s": \[\s*)', r"\1NaN, ", text),
        lambda text: re.sub(r'("context": )', r"\g<1>" + "9" * 400, text),
        lambda text: "[1, 2]",
        lambda text: "\udcff\udcfe",
        lambda text: "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_measured_again(
    kept: CalibrationFile, measured: Calibration, changed: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    before = kept.path.read_text()
    text = changed(before)
    assert text != before
    kept.path.write_bytes(text.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert kept.curve() == measured.curve
    assert measures(kept) == 1
    assert "cannot be used and is measured again" in caplog.text and str(kept.path) in caplog.text
    assert kept.curve() == measured.curve and measures(kept) == 1  # the new file is good


def test_a_folder_in_place_of_the_file(kept: CalibrationFile, measured: Calibration, caplog: pytest.LogCaptureFixture) -> None:
    kept.path.unlink()
    kept.path.mkdir()
    assert kept.curve() == measured.curve
    assert "cannot be used" in caplog.text and "could not be saved" in caplog.text
    assert not kept.save(measured)
    assert [path.name for path in kept.path.parent.iterdir()] == [kept.path.name]


def test_more_slots_than_were_measured(kept: CalibrationFile, runner: ModelRunner) -> None:
    more = ModelRunner(runner.model, 8, runner.cache.capacity)
    assert CalibrationFile(kept.path.parent, more, INFO).path == kept.path
    CalibrationFile(kept.path.parent, more, INFO).curve()
    assert measures(kept) == 1
    assert json.loads(kept.path.read_text())["covers"][0] == 8
    kept.curve()  # fewer slots than were measured
    assert measures(kept) == 1


def test_forwards_of_another_form_have_another_file(tmp_path: Path) -> None:
    usual = tiny_model("qwen3", "float32").runner
    slots, capacity = usual.cache.slots, usual.cache.capacity
    runners = [
        usual,
        ModelRunner(deepcopy(usual.model), slots, capacity, fixed_rows=16),
        StaticRunner(deepcopy(usual.model), slots, capacity, attention=ReferenceAttention),
        StaticRunner(deepcopy(usual.model), slots, capacity, 8, attention=ReferenceAttention),
        ModelRunner(deepcopy(usual.model), slots, capacity),
    ]
    for layer in runners[-1].model.model.layers:
        layer.compile(backend="eager")
    assert len({CalibrationFile(tmp_path, runner, INFO).path for runner in runners}) == len(runners)


def test_another_model_dtype_or_number_of_threads_has_another_file(runner: ModelRunner, tmp_path: Path, threads: None) -> None:
    infos = [INFO, replace(INFO, model_revision="f" * 32), replace(INFO, dtype="bfloat16")]
    paths = {CalibrationFile(tmp_path, runner, info).path for info in infos}
    paths.add(CalibrationFile(tmp_path, tiny_model("llama", "float64").runner, replace(INFO, dtype="float64")).path)
    assert len(paths) == 4
    same = [replace(INFO, strategy="trie", served_name="other", lossless=False), replace(INFO, tokenizer_revision="1")]
    assert {CalibrationFile(tmp_path, runner, info).path for info in same} <= paths
    torch.set_num_threads(2 if torch.get_num_threads() == 1 else 1)
    assert CalibrationFile(tmp_path, runner, INFO).path not in paths


def test_times_of_a_busy_machine_are_used_and_not_kept(
    runner: ModelRunner, measured: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CalibrationFile, "measure", lambda self: replace(measured, spread=1.6))
    file = CalibrationFile(tmp_path, runner, INFO)
    assert file.curve() == measured.curve
    assert not file.path.exists() and "busy machine" in caplog.text
