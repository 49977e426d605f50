"""Results of the exactness check that are kept on disk: used for the same setting only, and checked again if damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.configs.slices import EngineOptions
from outrider.engine.forward import exactness, kept_checks
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.kept_checks import kept_runner
from tests.helpers.models import llama_config

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
    monkeypatch.setattr(kept_checks, "cache_folder", lambda: tmp_path)
    return found


def test_a_check_is_not_repeated_for_the_same_setting(
    checks: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert kept_runner(tiny(), 64, OPTIONS, 8).exact and len(checks) == 1
    assert kept_runner(tiny(), 64, OPTIONS, 8).exact and len(checks) == 1
    assert "is not repeated" in caplog.text
    kept_runner(tiny(), 96, OPTIONS, 8)  # larger slots
    changed = tiny()
    changed.lm_head.weight.data[0, 0] += 1  # other weights
    kept_runner(changed, 64, OPTIONS, 8)
    assert len(checks) == 3 and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b'{"rows": null}', b"x" * 100])
def test_a_damaged_file_is_not_used(checks: list[Any], tmp_path: Path, damage: bytes) -> None:
    kept_runner(tiny(), 64, OPTIONS, 8)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert kept_runner(tiny(), 64, OPTIONS, 8).exact and len(checks) == 2
    kept_runner(tiny(), 64, OPTIONS, 8)  # it was written again
    assert len(checks) == 2
