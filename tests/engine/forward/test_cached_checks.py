"""Results of the exactness check that are kept on disk: used for the same setting only, and checked again if damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.actors.offline import OfflineEngine
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.engine.engine import Engine
from outrider.engine.forward import cached_checks, exactness
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.cached_checks import make_runner_with_cached_check
from tests.helpers.models import llama_config, save_model

OPTIONS = EngineOptions(max_running=2)


def tiny() -> PreTrainedModel:
    """A random model with tree attention, the same at each call."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(llama_config(), attn_implementation=TREE_ATTENTION)
    return model.eval()


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The checks that run; the files are in ``tmp_path``."""
    found: list[Any] = []
    check = exactness.check

    def counting(*arguments: Any) -> str | None:
        found.append(arguments)
        return check(*arguments)

    monkeypatch.setattr(exactness, "check", counting)
    monkeypatch.setattr(cached_checks, "cache_folder", lambda: tmp_path)
    return found


def test_a_check_is_not_repeated_for_the_same_setting(
    checks: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert make_runner_with_cached_check(tiny(), 64, OPTIONS, 8).exact and len(checks) == 1
    assert make_runner_with_cached_check(tiny(), 64, OPTIONS, 8).exact and len(checks) == 1
    assert "is not repeated" in caplog.text
    make_runner_with_cached_check(tiny(), 96, OPTIONS, 8)  # larger slots
    changed = tiny()
    changed.lm_head.weight.data[0, 0] += 1  # other weights
    make_runner_with_cached_check(changed, 64, OPTIONS, 8)
    assert len(checks) == 3 and len(list(tmp_path.iterdir())) == 3


def test_a_server_and_a_command_do_not_repeat_each_others_check(
    checks: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = ModelOptions(str(save_model(tmp_path_factory.mktemp("model"), llama_config())), dtype="float32")
    speculation = SpeculationOptions("llma")
    assert Engine.load(model, OPTIONS, speculation, defer_warmup=True).info.exact and len(checks) == 1
    engine = OfflineEngine(model, OPTIONS, speculation, brief=True)
    assert engine.info.exact and len(checks) == 1
    engine.close()


def test_a_slower_form_is_told_at_every_start(
    checks: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exactness, "check", lambda runner, _: None if runner.fixed_rows == 16 else "3 of 4 rows differ")
    assert make_runner_with_cached_check(tiny(), 64, OPTIONS, 8).fixed_rows == 16
    caplog.clear()
    assert make_runner_with_cached_check(tiny(), 64, OPTIONS, 8).fixed_rows == 16
    assert "limited to 16 rows" in caplog.text


@pytest.mark.parametrize("damage", [b"", b'{"rows": null}', b"x" * 100])
def test_a_damaged_file_is_not_used(checks: list[Any], tmp_path: Path, damage: bytes) -> None:
    make_runner_with_cached_check(tiny(), 64, OPTIONS, 8)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert make_runner_with_cached_check(tiny(), 64, OPTIONS, 8).exact and len(checks) == 2
    make_runner_with_cached_check(tiny(), 64, OPTIONS, 8)  # it was written again
    assert len(checks) == 2
