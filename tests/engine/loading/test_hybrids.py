"""Models whose layers keep states: what is refused, in one line and before weights are read; how much memory the others take."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import (
    JambaConfig,
    KimiLinearConfig,
    MambaConfig,
    MiniMaxConfig,
    PreTrainedConfig,
    RecurrentGemmaConfig,
    ZayaConfig,
)

from outrider.actors.sharded.group import whole_model
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.engine.engine import Engine
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward import runner
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.kv.state_cache import StateCache, StateSite
from outrider.engine.loading import hybrids
from outrider.engine.loading.model import load_model
from tests.helpers.models import HYBRIDS, llama_config, save_model, tiny_model


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (MiniMaxConfig(), "lightning attention"),
        (RecurrentGemmaConfig(), "a gated linear recurrence"),
        (ZayaConfig(), "convolutions inside its attention"),
        (KimiLinearConfig(), "Kimi's delta rule"),
        (JambaConfig(), "the selective scan of Mamba-1"),
        (MambaConfig(), "the selective scan of Mamba-1"),
    ],
)
def test_other_rules_are_refused_by_name(config: PreTrainedConfig, rule: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)  # there are no weights
    with pytest.raises(ModelLoadError, match=f"ForCausalLM cannot be served: its layers keep a state by {rule}") as error:
        load_model(ModelOptions(str(tmp_path)))
    assert "\n" not in str(error.value)


def test_where_states_are_not_computed_they_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HYBRIDS["lfm2"].save_pretrained(tmp_path)
    options = ModelOptions(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"float64: its layers keep states of float32: set model.dtype to"):
        load_model(dataclasses.replace(options, dtype="float64"))
    with pytest.raises(ModelLoadError, match=r"parallelism.mode tensor or pipeline does not support Lfm2ForCausalLM"):
        whole_model(options)
    with pytest.raises(
        ModelLoadError, match=r"on cuda: its layers keep states, which are computed on CPUs only: set model.device"
    ):
        hybrids.refuse_place(HYBRIDS["lfm2"], "cuda", "auto")
    monkeypatch.setattr(hybrids, "NATIVE", False)
    with pytest.raises(ModelLoadError, match=r"without numba"):
        load_model(options)


def test_a_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    save_model(target, llama_config())
    HYBRIDS["lfm2"].save_pretrained(draft)
    speculation = SpeculationOptions("speculative", draft_model=str(draft))
    with pytest.raises(ModelLoadError, match=r"speculation.draft_model .* does not support Lfm2ForCausalLM, whose layers"):
        Engine.load(ModelOptions(str(target), dtype="float32"), EngineOptions(max_running=2), speculation)


def test_a_model_from_a_folder_is_exact(tmp_path: Path) -> None:
    save_model(tmp_path, HYBRIDS["qwen3_5"])
    engine = Engine.load(ModelOptions(str(tmp_path), dtype="bfloat16"), EngineOptions(max_running=2), SpeculationOptions("llma"))
    assert engine.info.exact


def test_states_and_snapshots_count_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("lfm2", "float32").runner
    states = model.cache.states
    assert states is not None
    # Three convolutions over 128 channels that see two rows before each; keys and values of one layer.
    sites = [StateSite(2 * 128 * 4, 128 * 4)] * 3
    assert list(states.sites) == sites
    assert StateCache.bytes_of(sites, 4) == 3 * 1024 * (4 + 15) + 3 * 512 * 4 * 65
    monkeypatch.setattr(
        runner, "free_bytes", lambda: model.cache.shape.bytes_per_token() * 4 * 144 + StateCache.bytes_of(sites, 4)
    )
    ModelRunner(model.model, 4, 144)
    monkeypatch.setattr(runner, "free_bytes", lambda: model.cache.shape.bytes_per_token() * 4 * 144)
    with pytest.raises(ModelLoadError, match=r"the KV slots and states need 0.0 GiB"):
        ModelRunner(model.model, 4, 144)


def test_snapshots_give_way_to_those_that_were_used_later() -> None:
    states = StateCache([StateSite(64, 64)], 1)
    tokens = torch.arange(400, dtype=torch.int32).numpy()
    texts = [tokens + at for at in range(8)]
    for at, text in enumerate(texts):
        states.request_snapshot(0, "a", text, 0, 250, 251)
        places = {place for _, place, _ in states._wanted[0]}
        assert len(places) == 2 and min(places) >= 1  # behind 128 tokens and behind the prompt's last but one
        for _, place, snapshot in states._wanted.pop(0):
            states._snapshot[place - 1] = snapshot
        if at >= 2:
            length, place = states.usable(0, "a", texts[0], 400)
            assert length == 250
            states.restore(0, place, length)  # which keeps it
            states.forget(0)
    assert states.usable(0, "a", texts[7], 249)[0] == 128 and states.usable(0, "a", texts[7], 300)[0] == 250
    assert states.usable(0, "b", texts[7], 300)[0] == states.usable(0, "a", texts[3], 300)[0] == 0
    with pytest.raises(RuntimeError, match=r"slot 0 holds no state, but a step computes rows from 5 on"):
        states.request_snapshot(0, "a", texts[0], 5, 6, 7)
    states.clear()
    assert states.usable(0, "a", texts[7], 300)[0] == 0
