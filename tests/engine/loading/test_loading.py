"""Loading: memory, revisions, and models whose layers keep states."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
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
from outrider.configs.schema import REPOSITORY
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.engine.engine import Engine
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward import runner
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.kv.state_cache import StateCache, StateSite
from outrider.engine.loading import hybrids, memory, outline
from outrider.engine.loading.model import load_model, model_revision
from outrider.engine.text.chat import render_chat
from outrider.engine.text.tokenizer import load_tokenizer, tokenizer_revision
from tests.helpers.models import FAMILIES, HYBRIDS, llama_config, save_model, tiny_model


@pytest.fixture
def meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's account of the machine's memory."""
    monkeypatch.setattr(memory, "_MACHINE", tmp_path / "meminfo")
    return tmp_path / "meminfo"


def test_weights_and_slots_that_do_not_fit_are_refused(folder: str, meminfo: Path) -> None:
    def load(dtype: str, running: int) -> Engine:
        model = ModelOptions(folder, dtype=dtype, threads=1)
        return Engine.load(model, EngineOptions(max_running=running), SpeculationOptions("autoregressive"))

    stored = sum(part.stat().st_size for part in Path(folder).glob("*.safetensors"))
    for dtype in ("float32", "float64", "auto"):
        have_free(meminfo, int(1.5 * stored) if dtype == "float64" else stored // 2)
        with pytest.raises(ModelLoadError, match=r"needs 0\.\d GiB for its weights, and 0\.\d GiB of memory are free"):
            load(dtype, 1)
    have_free(meminfo, 2**24)
    assert load("float32", 1).info.max_model_len
    with pytest.raises(ModelLoadError, match=r"KV slots need .* model\.max_model_len or engine\.max_running"):
        load("float32", 200)


def have_free(meminfo: Path, size: int) -> None:
    meminfo.write_text(f"MemTotal:       99999999 kB\nMemAvailable:   {size >> 10} kB\nHugePages_Total:       0\n")


def test_a_container_s_limit_counts(tmp_path: Path, meminfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not meminfo.exists() and memory.free_bytes() > 2**24  # a system without the file
    have_free(meminfo, 2**40)
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    assert memory.free_bytes() == 2**40
    for name, text in {"max": "1000000\n", "current": "400000\n", "stat": "anon 1\ninactive_file 5000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.free_bytes() == 605_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes() == 2**40


def test_revisions_are_of_the_contents(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, seeded = (str(save_model(tmp_path / str(seed), llama_config(), seed)) for seed in (0, 1))
    loaded, again, other = (load_model(ModelOptions(path)) for path in (folder, elsewhere, seeded))
    half = load_model(ModelOptions(folder, dtype="bfloat16"))
    for limit in (0, 2**28):  # sampled, and hashed whole
        monkeypatch.setattr("outrider.engine.loading.model._HASH_WHOLE_BYTES", limit)
        own = model_revision(loaded.model)
        assert own == model_revision(again.model)
        assert len({own, model_revision(other.model), model_revision(half.model)}) == 3
    with torch.no_grad():
        loaded.model.lm_head.weight[5, 7] += 0.001
    assert model_revision(loaded.model) != own
    again.model.config.rope_parameters["rope_theta"] = 5000.0
    assert model_revision(again.model) != own
    tokenizer = load_tokenizer(folder)
    own = tokenizer_revision(tokenizer)
    assert own == tokenizer_revision(load_tokenizer(seeded))
    tokenizer.add_tokens(["<new>"])
    assert len({own, tokenizer_revision(tokenizer), tokenizer_revision(None)}) == 3


ALONE = """
import sys
from outrider.engine.text.chat import render_chat
from outrider.engine.text.tokenizer import load_tokenizer_alone, tokenizer_revision
tokenizer = load_tokenizer_alone(sys.argv[1])
print(tokenizer_revision(tokenizer), render_chat(tokenizer, [{"role": "user", "content": "hi"}]), {"torch"} & set(sys.modules))
"""


def test_a_process_without_torch_has_the_same_tokenizer(folder: str) -> None:
    command = [sys.executable, "-c", ALONE, folder]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    tokenizer = load_tokenizer(folder)
    expected = f"{tokenizer_revision(tokenizer)} {render_chat(tokenizer, [{'role': 'user', 'content': 'hi'}])} set()\n"
    assert (run.stdout, run.stderr) == (expected, "")


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
def test_other_rules_of_states_are_refused_by_name(config: PreTrainedConfig, rule: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)  # there are no weights
    with pytest.raises(ModelLoadError, match=f"ForCausalLM cannot be served: .* {rule}") as error:
        load_model(ModelOptions(str(tmp_path)))
    assert "\n" not in str(error.value)


def test_states_are_refused_where_they_are_not_computed(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HYBRIDS["lfm2"].save_pretrained(tmp_path)  # without weights
    options = ModelOptions(str(tmp_path))
    speculation = SpeculationOptions("speculative", draft_model=str(tmp_path))
    cases: list[tuple[str, Callable[[], object]]] = [
        (r"float64.* set model\.dtype", lambda: load_model(dataclasses.replace(options, dtype="float64"))),
        (r"parallelism\.mode tensor or pipeline does not support Lfm2ForCausalLM", lambda: whole_model(options)),
        (r"on cuda.* set model\.device", lambda: hybrids.refuse_place(HYBRIDS["lfm2"], "cuda", "auto")),
        (
            r"speculation\.draft_model .* does not support Lfm2ForCausalLM",
            lambda: Engine.load(ModelOptions(folder, dtype="float32"), EngineOptions(max_running=2), speculation),
        ),
    ]
    for message, attempt in cases:
        with pytest.raises(ModelLoadError, match=message):
            attempt()
    monkeypatch.setattr(hybrids, "NATIVE", False)
    with pytest.raises(ModelLoadError, match="without numba"):
        load_model(options)


def test_a_hybrid_from_a_folder_is_exact(tmp_path: Path) -> None:
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


def test_an_outline_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is read again with its states and layers, and determined again for other code or a damaged file."""
    found: list[PreTrainedConfig] = []
    determined = outline._determined

    def counting(config: PreTrainedConfig) -> outline.Outline:
        found.append(config)
        return determined(config)

    def again(config: PreTrainedConfig) -> outline.Outline:
        outline._outline.cache_clear()
        return outline.outline(config)

    monkeypatch.setattr(outline, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(outline, "_determined", counting)
    configs = [FAMILIES["gemma2"], FAMILIES["mixtral"], next(iter(HYBRIDS.values()))]
    first = [again(config) for config in configs]
    assert [again(config) for config in configs] == first and len(found) == len(list(tmp_path.iterdir())) == 3
    assert first[2].states and first[1].routed and first[0].layers[0] != first[0].layers[1]
    monkeypatch.setattr(outline, "code_digest", lambda: "other")
    assert again(configs[0]) == again(configs[0]) == first[0] and len(found) == 4
    for path in tmp_path.iterdir():
        path.write_bytes(b'{"layers": []}')
    assert again(configs[0]) == first[0] and len(found) == 5 and "is determined again" in caplog.text
