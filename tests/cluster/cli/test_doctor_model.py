"""``outrider doctor --model`` as a user meets it: what a model takes of this machine, or why it is not served, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, DeepseekV3Config, Gemma3TextConfig, PreTrainedConfig

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.engine.engine import load_runner
from outrider.engine.loading import memory
from tests.cluster.commands import error_line, outrider
from tests.helpers.gguf_files import save_gguf
from tests.helpers.models import HYBRIDS, VOCAB, llama_config, save_model

LATENT = DeepseekV3Config(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=16, q_lora_rank=24,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, max_position_embeddings=128, first_k_dense_replace=1,
)  # fmt: skip
WINDOWS = Gemma3TextConfig(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=256, sliding_window=12,
)  # fmt: skip


def told(*arguments: object) -> dict[str, Any]:
    run = outrider("doctor", "--json", "--model", *arguments)
    said: dict[str, Any] = json.loads(run.stdout)
    assert run.returncode == (0 if said["ok"] else 1) and not run.stderr, run.stderr
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [llama_config(), LATENT, WINDOWS, HYBRIDS["qwen3_5"]], ids=["llama", "latent", "windows", "states"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_tells_what_the_server_takes(config: PreTrainedConfig, dtype: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny", config)
    said = told(folder, "--dtype", dtype, "--device", "cpu")
    options = ModelOptions(str(folder), dtype=dtype, device="cpu")  # type: ignore[arg-type]
    loaded, runner = load_runner(options, EngineOptions(), SpeculationOptions(), 1)
    assert said["ok"] and said["has_weights"] and said["dtype"] == dtype
    assert said["parameters"] == loaded.model.num_parameters()
    assert said["weight_bytes"] == said["parameters"] * loaded.model.dtype.itemsize
    assert said["kv_bytes_per_token"] == runner.cache.shape.bytes_per_token()
    assert said["max_model_len"] + said["draft_rows"] == runner.cache.capacity and said["kv_slots"] == runner.cache.slots
    assert said["max_running"] == runner.sequences == 8 and said["kv_slots"] == 24
    assert said["need_bytes"] == said["weight_bytes"] + said["kv_slots"] * said["slot_bytes"]
    states, slots = runner.cache.states, said["max_running"]
    of_states = 0 if states is None else states.bytes_of(states.sites, slots) // slots
    assert said["slot_bytes"] == said["kv_bytes_per_token"] * runner.cache.capacity + of_states
    assert bool([line for line in said["advice"] if "bfloat16" in line]) == (dtype == "float32")


def test_a_table_for_a_folder_without_weights(tmp_path: Path) -> None:
    WINDOWS.save_pretrained(tmp_path)
    run = outrider("doctor", "--model", tmp_path)
    assert run.returncode == 0, run.stderr
    for words in ("Gemma3", "no weights in the folder", "per 1,000 tokens", "256 tokens and 64 drafted", "requests that fit"):
        assert words in run.stdout, run.stdout


def test_a_gguf_file(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny", llama_config())
    model = AutoModelForCausalLM.from_pretrained(folder)
    file = tmp_path / "tiny.gguf"
    save_gguf(file, model, folder)
    said = told(file)
    assert said["ok"] and said["has_weights"] and (said["dtype"], said["max_model_len"]) == ("bfloat16", 256)
    assert said["weight_bytes"] == 2 * model.num_parameters()
    file.write_bytes(file.read_bytes()[:-100])
    assert "is truncated" in told(file)["reason"]


def test_weights_that_are_quantized_at_load(tmp_path: Path) -> None:
    folder, config = save_model(tmp_path / "tiny", llama_config(hidden_size=64, intermediate_size=128)), tmp_path / "service.yaml"
    plain = told(folder, "--dtype", "bfloat16")
    for weights, times in (("int8", 17 / 32), ("int4", 10 / 32)):
        config.write_text(f"model: {{weights: {weights}}}\n")
        said = told(folder, "--dtype", "bfloat16", "--config", config)
        assert said["weights"] == weights and said["weight_bytes"] == pytest.approx(plain["weight_bytes"] * times, rel=0.05)
    assert any(line.startswith("model.weights=int8|int4 (changes the outputs)") for line in plain["advice"])


def test_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "tiny", llama_config())
    config = tmp_path / "service.yaml"
    config.write_text("engine: {max_running: 4}\n")
    whole = told(tmp_path / "tiny", "--config", config, "--dtype", "bfloat16")
    assert whole["ok"] and (whole["max_running"], whole["kv_slots"]) == (4, 12)
    weights, slot = whole["weight_bytes"], whole["slot_bytes"]
    monkeypatch.setattr(memory, "free_bytes", lambda: weights + 12 * slot)  # a quarter of the eight beside the four
    assert told(tmp_path / "tiny", "--config", config, "--dtype", "bfloat16")["kv_slots"] == 6
    monkeypatch.setattr(memory, "free_bytes", lambda: weights + 2 * slot + 100)
    said = told(tmp_path / "tiny", "--config", config, "--dtype", "bfloat16")
    assert not said["ok"] and said["slots_that_fit"] == 2 and said["reason"].startswith("it needs ")
    *_, fewer, shorter = said["advice"]
    assert fewer.startswith("engine.max_running=2: ")
    tokens = int(shorter.removeprefix("model.max_model_len=").partition(":")[0])
    for setting in (
        "engine: {max_running: 2}\nmodel: {path: x}\n",
        f"engine: {{max_running: 4}}\nmodel: {{path: x, max_model_len: {tokens}}}\n",
    ):
        config.write_text(setting)
        assert told(tmp_path / "tiny", "--config", config, "--dtype", "bfloat16")["ok"], setting
    monkeypatch.setattr(memory, "free_bytes", lambda: 1000)
    run = outrider("doctor", "--model", tmp_path / "tiny")
    assert run.returncode == 1 and "missing" in run.stdout


def test_what_is_not_served_says_why(tmp_path: Path) -> None:
    contents = {
        "broken": ("{not json", "could not be found or read"), "empty": (None, "could not be found or read"),
        "unknown": ('{"model_type": "unheard-of"}', "could not be found or read"),
        "vit": ('{"model_type": "vit"}', "not a causal"),
        "bloom": (BloomConfig(hidden_size=32, n_layer=1, n_head=2).to_json_string(), "AttentionInterface"),
    }  # fmt: skip
    for name, (content, reason) in contents.items():
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "config.json").write_text(content)
        assert reason in error_line(outrider("doctor", "--model", tmp_path / name), 1)
        said = told(tmp_path / name)
        assert said.keys() == {"ok", "reason"} and reason in said["reason"] and "\n" not in said["reason"]
    assert "does not exist" in told("./no/where/at-all")["reason"]
    if not torch.cuda.is_available():
        llama_config().save_pretrained(tmp_path / "llama")
        assert "no GPU can be used" in told(tmp_path / "llama", "--device", "cuda")["reason"]
