"""Adapters that cannot be served are refused before weights are read, each in one line that names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.engine.engine import Engine
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading import memory
from outrider.engine.loading import model as loading
from outrider.engine.loading.model import load_config, load_model
from outrider.engine.loading.weights.adapters import find_adapters
from tests.helpers.models import llama_config, save_adapter, save_model

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(save_model(tmp_path_factory.mktemp("m"), llama_config()))
    return model


@pytest.fixture
def load(stock: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """Looks at an adapter; it ends where weights would be read."""

    def unread(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "load_weights", unread)
    return lambda folder: load_model(ModelOptions(stock.name_or_path, adapters={"sql": str(folder)}, device="cpu"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"target_parameters": ["experts.w"]}, "target_parameters is"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"something_new": 1}, "something_new is 1"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "the rank of model.layers.0.self_attn.q_proj is 0"),
        ({"r": 8}, r"q_proj are \[4, 64\] and \[128, 4\]; the model and the rank 8 want \[8, 64\] and \[128, 8\]"),
        ({"rank_pattern": {"q_proj": 5}}, "the rank 5 want"),
        ({"rank_pattern": {"q_(proj": 5}}, "is not a valid regular expression"),
        ({"rank_pattern": 3}, "rank_pattern is 3"),
        ({"lora_alpha": "x"}, "lora_alpha of model.layers.0.self_attn.q_proj is 'x'"),
        ({"target_modules": ["q_proj", "v_proj", "wq"]}, "target_modules has 'wq' .* which the model does not have"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "target_modules has 'o_proj' .* has no tensors"),
    ],
)
def test_what_is_not_computed(
    stock: PreTrainedModel, tmp_path: Path, load: Callable[[Path], Any], changes: dict[str, Any], said: str
) -> None:
    folder = save_adapter(tmp_path / "a", stock, ("q_proj", "v_proj"), **changes)
    with pytest.raises(ModelLoadError, match=said) as raised:
        load(folder)
    assert str(raised.value).startswith(f"model.adapters.sql ({folder})") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({f"{Q}.lora_magnitude_vector": torch.ones(3)}, "lora_magnitude_vector, which is not supported"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 320)},
            "lora_embedding_A, which is not supported",
        ),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, "lm_head, which is not supported: embeddings"),
        (
            {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.ones(4, 64)},
            "layers.7.*the adapter is for another model",
        ),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}, "only one of lora_A and lora_B"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 60)}, r"q_proj are \[4, 60\] and \[128, 4\]; .* want \[4, 64\] and \[128, 4\]"),
    ],
)
def test_tensors_that_do_not_fit(
    stock: PreTrainedModel, tmp_path: Path, load: Callable[[Path], Any], tensors: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(ModelLoadError, match=said):
        load(save_adapter(tmp_path / "a", stock, ("q_proj",), tensors=tensors))


def test_files_that_are_not_there_or_broken(stock: PreTrainedModel, tmp_path: Path, load: Callable[[Path], Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"absent\) has no adapter_config.json"):
        load(tmp_path / "absent")
    folder = save_adapter(tmp_path / "a", stock, ("q_proj",))
    (folder / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 nothing")
    with pytest.raises(ModelLoadError, match=r"adapter_model.safetensors cannot be read"):
        load(folder)
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="has no tensors"):
        load(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"has no adapter_model.safetensors"):
        load(folder)
    folder = save_adapter(tmp_path / "b", stock, ("q_proj",))
    for text, said in (("{", "adapter_config.json cannot be read"), ("[]", r"peft_type is \[\]")):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=said):
            load(folder)


def test_scales_and_ranks_are_those_that_peft_computes(stock: PreTrainedModel, tmp_path: Path) -> None:
    patterns: dict[str, Any] = {"alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 3, "v_proj": 6}}
    plain = save_adapter(tmp_path / "a", stock, ("q_proj", "v_proj"), 4, ranks={"v_proj": 2}, **patterns)
    rooted = save_adapter(tmp_path / "b", stock, ("q_proj",), 16, use_rslora=True)
    everywhere = save_adapter(tmp_path / "c", stock, ("q_proj",), target_modules="all-linear")
    paths = {"a": str(plain), "b": str(rooted), "c": str(everywhere)}
    found = find_adapters(ModelOptions(stock.name_or_path, adapters=paths), load_config(stock.name_or_path))
    scales = [{module[13:]: scale for module, scale in each.scales.items()} for each in found]
    assert scales == [
        {"0.self_attn.q_proj": 2, "0.self_attn.v_proj": 3, "1.self_attn.q_proj": 0.75, "1.self_attn.v_proj": 3},
        {"0.self_attn.q_proj": 8, "1.self_attn.q_proj": 8},
        {"0.self_attn.q_proj": 2, "1.self_attn.q_proj": 2},
    ]
    read = found[0].read()
    own = tensors_of(plain)
    for module, factors in read.factors.items():
        down, up = (own[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        expected = scales[0][module[13:]] * (up @ down)
        assert torch.allclose((factors.down @ factors.up).t()[: len(up)], expected, atol=1e-5)
    assert sum(each.nbytes for factors in read.factors.values() for each in (factors.down, factors.up)) == found[0].nbytes
    assert found[1].read().revision != found[2].read().revision == found[2].read().revision


def test_the_older_names_of_tensors_are_read(stock: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", stock, ("q_proj",))
    tensors = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors_of(folder).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    options = ModelOptions(stock.name_or_path, adapters={"a": str(folder)})
    assert len(find_adapters(options, load_config(stock.name_or_path))[0].read().factors) == 2


def test_their_memory_counts(stock: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_adapter(tmp_path / "a", stock, ("q_proj",), 32)
    options = ModelOptions(stock.name_or_path, device="cpu", adapters={"a": str(folder)})
    need = memory.weight_bytes(stock.name_or_path, "auto", packed=False)
    monkeypatch.setattr(memory, "free_bytes", lambda: need)
    load_model(ModelOptions(stock.name_or_path, device="cpu"))
    with pytest.raises(ModelLoadError, match="GiB for its weights and adapters, and"):
        load_model(options)


def test_without_compiled_code_they_are_refused(stock: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", stock, ("q_proj",))
    options = ModelOptions(stock.name_or_path, dtype="float64", device="cpu", adapters={"a": str(folder)})
    with pytest.raises(ModelLoadError, match=r"model.adapters need compiled kernels, .* float64 .* model.dtype=float32"):
        Engine.load(options, EngineOptions(max_running=2), SpeculationOptions("autoregressive"))
