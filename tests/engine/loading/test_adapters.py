"""Adapters: those that cannot be served are refused before weights are read; an adapter's folder is the merged model."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.actors.sharded.group import whole_model
from outrider.actors.sharded.rank import load_whole
from outrider.cluster.cli.launch.preflight import LaunchError, check_model
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading import memory
from outrider.engine.loading import model as loading
from outrider.engine.loading.model import load_config, load_model
from outrider.engine.loading.weights.adapters import find_adapters
from outrider.engine.loading.weights.gguf import load_gguf_model
from outrider.engine.text.tokenizer import load_tokenizer, load_tokenizer_alone
from tests.cluster.commands import error_line, lines, outrider
from tests.helpers.gguf_files import save_gguf
from tests.helpers.models import FAMILIES, llama_config, run, save_adapter, save_model
from tests.helpers.ranks import loaded_group

MODEL = "base_model.model.model"
Q = f"{MODEL}.layers.0.self_attn.q_proj"


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"target_parameters": ["experts.w"]}, "target_parameters is"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"something_new": 1}, "something_new is 1"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, r"the rank of model\.layers\.0\.self_attn\.q_proj is 0"),
        ({"r": 8}, r"q_proj are \[4, 64\] and \[128, 4\]; the model and the rank 8 want \[8, 64\] and \[128, 8\]"),
        ({"rank_pattern": {"q_proj": 5}}, "the rank 5 want"),
        ({"rank_pattern": {"q_(proj": 5}}, "is not a valid regular expression"),
        ({"rank_pattern": 3}, "rank_pattern is 3"),
        ({"lora_alpha": "x"}, r"lora_alpha of model\.layers\.0\.self_attn\.q_proj is 'x'"),
        ({"target_modules": ["q_proj", "v_proj", "wq"]}, "target_modules has 'wq'"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "target_modules has 'o_proj'"),
        ({"tensors": {f"{Q}.lora_magnitude_vector": torch.ones(3)}}, "lora_magnitude_vector, which is not supported"),
        ({"tensors": {f"{MODEL}.embed_tokens.lora_embedding_A": torch.ones(4, 320)}}, "lora_embedding_A, which is not supported"),
        ({"tensors": {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}}, "lm_head, which is not supported"),
        ({"tensors": {f"{MODEL}.layers.7.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}}, r"layers\.7.*another model"),
        ({"tensors": {f"{MODEL}.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}}, "only one of lora_A and lora_B"),
        ({"tensors": {f"{Q}.lora_A.weight": torch.ones(4, 60)}}, r"\[4, 60\] and \[128, 4\]; .* want \[4, 64\] and \[128, 4\]"),
    ],
    ids=range(24),
)
def test_fields_and_tensors_that_cannot_be_served(
    stock: PreTrainedModel, tmp_path: Path, load: Callable[[Path], Any], changes: dict[str, Any], said: str
) -> None:
    folder = save_adapter(tmp_path / "a", stock, ("q_proj", "v_proj"), **changes)
    with pytest.raises(ModelLoadError, match=said) as raised:
        load(folder)
    assert str(raised.value).startswith(f"model.adapters.sql ({folder})") and "\n" not in str(raised.value)


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
    older = save_adapter(tmp_path / "d", stock, ("q_proj",))
    own, renamed = (load_file(folder / "adapter_model.safetensors") for folder in (plain, older))
    renamed = {name.replace(".weight", ".default.weight"): tensor for name, tensor in renamed.items()}  # an older PEFT's names
    save_file(renamed, older / "adapter_model.safetensors")
    paths = {"a": str(plain), "b": str(rooted), "c": str(everywhere), "d": str(older)}
    found = find_adapters(ModelOptions(stock.name_or_path, adapters=paths), load_config(stock.name_or_path))
    scales = [{module[13:]: scale for module, scale in each.scales.items()} for each in found]
    assert scales == [
        {"0.self_attn.q_proj": 2, "0.self_attn.v_proj": 3, "1.self_attn.q_proj": 0.75, "1.self_attn.v_proj": 3},
        {"0.self_attn.q_proj": 8, "1.self_attn.q_proj": 8},
        *[{"0.self_attn.q_proj": 2, "1.self_attn.q_proj": 2}] * 2,
    ]
    read = found[0].read()
    for module, factors in read.factors.items():
        down, up = (own[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        expected = scales[0][module[13:]] * (up @ down)
        assert torch.allclose((factors.down @ factors.up).t()[: len(up)], expected, atol=1e-5)
    assert sum(each.nbytes for factors in read.factors.values() for each in (factors.down, factors.up)) == found[0].nbytes
    assert found[1].read().revision != found[2].read().revision == found[2].read().revision
    assert len(found[3].read().factors) == 2


def test_adapters_need_memory_and_compiled_code(stock: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_adapter(tmp_path / "a", stock, ("q_proj",), 32)
    options = ModelOptions(stock.name_or_path, device="cpu", adapters={"a": str(folder)})
    with pytest.raises(ModelLoadError, match=r"model\.adapters need compiled kernels, .* model\.dtype=float32"):
        Engine.load(dataclasses.replace(options, dtype="float64"), EngineOptions(), SpeculationOptions("autoregressive"))
    need = memory.weight_bytes(stock.name_or_path, "auto", packed=False)
    monkeypatch.setattr(memory, "free_bytes", lambda: need)
    load_model(ModelOptions(stock.name_or_path, device="cpu"))
    with pytest.raises(ModelLoadError, match="GiB for its weights and adapters, and"):
        load_model(options)


MERGED_CONFIGS = {"llama": llama_config(tie_word_embeddings=True), "gpt2": FAMILIES["gpt2"]}
DTYPES: tuple[Any, ...] = ("float32", "bfloat16")
PROMPT = "The quick brown fox jumps over the lazy dog. The quick"


@torch.no_grad()
def merge(model: PreTrainedModel, adapter: Path, scale: float = 2.0) -> PreTrainedModel:
    """``W + scale * B @ A`` in float32, with the scale of ``save_adapter``."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in (name for name in tensors if "lora_A" in name):
        module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        added = scale * (tensors[name.replace("lora_A", "lora_B")] @ tensors[name])
        module.weight.copy_(module.weight + (added.t() if isinstance(module, Conv1D) else added))
    return model


def make(folder: Path, family: str = "llama") -> tuple[Path, Path, Path]:
    """A model, an adapter of it, and the two merged, each in a folder."""
    base = save_model(folder / "base", MERGED_CONFIGS[family], seed=4)
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    targets = ("c_attn", "c_fc") if family == "gpt2" else ("q_proj", "v_proj", "down_proj")
    adapter = save_adapter(folder / "lora", stock, targets, base_model_name_or_path=str(base))
    merged = folder / "merged"
    shutil.copytree(base, merged)
    merge(stock, adapter).save_pretrained(merged)
    return base, adapter, merged


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return make(tmp_path_factory.mktemp("models"))


@pytest.fixture
def own(folders: tuple[Path, Path, Path], tmp_path: Path) -> Path:
    """A copy of the adapter, to be changed."""
    return shutil.copytree(folders[1], tmp_path / "lora")


def same(first: PreTrainedModel, second: PreTrainedModel) -> bool:
    theirs = dict(second.named_parameters())
    return all(torch.equal(weight, theirs.pop(name)) for name, weight in first.named_parameters()) and not theirs


def name_base(adapter: Path, base: str | None, **fields: Any) -> None:
    """Has an adapter be one of another model, or of none, and say further things of itself."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields | {"base_model_name_or_path": base}))


def ids(path: Path, dtype: str) -> list[int]:
    arguments = ("--prompt", PROMPT, "--max-tokens", 24, "--device", "cpu", "--json", "--dtype", dtype)
    found: list[int] = lines(outrider("generate", "--model", path, *arguments))[0][0]["output_token_ids"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", MERGED_CONFIGS)
def test_an_adapter_s_folder_is_the_merged_model(tmp_path: Path, family: str, dtype: Any) -> None:
    base, adapter, merged = make(tmp_path, family)
    first, second = (load_model(ModelOptions(str(path), dtype=dtype, device="cpu")) for path in (adapter, merged))
    assert same(first.model, second.model) and first.served_name == "lora"
    said = [ids(path, dtype) for path in (adapter, merged, base)]
    assert said[0] == said[1] != said[2]
    if family == "gpt2":
        return
    # Of files in 16 bits, and quantized after it.
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    merge(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).save_pretrained(merged)
    for weights in ("auto", "int8", "int4"):
        options = ModelOptions(str(adapter), dtype=dtype, device="cpu", weights=weights)  # type: ignore[arg-type]
        by_hand = load_model(dataclasses.replace(options, path=str(merged)))
        assert same(load_model(options).model, by_hand.model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gguf_file_is_dequantized_for_it(folders: tuple[Path, Path, Path], own: Path, tmp_path: Path, dtype: Any) -> None:
    base, adapter, _ = folders
    file = save_gguf(tmp_path / "base.gguf", AutoModelForCausalLM.from_pretrained(base), base)
    name_base(own, str(file))
    options = ModelOptions(str(own), dtype=dtype, device="cpu", weights="dequantized")
    expected = merge(load_gguf_model(str(file), torch.float32, "eager"), adapter).to(getattr(torch, dtype))
    assert same(load_model(options).model, expected)
    assert load_tokenizer(str(own)).get_vocab() == load_tokenizer(str(base)).get_vocab()
    with pytest.raises(ModelLoadError, match=r"set model\.weights=dequantized"):
        load_model(dataclasses.replace(options, weights="auto"))
    doctor = outrider("doctor", "--model", own, "--dtype", dtype, "--device", "cpu")
    assert "set model.weights=dequantized" in error_line(doctor, 1)


def test_ranks_and_draft_models_have_it(folders: tuple[Path, Path, Path]) -> None:
    _, adapter, merged = folders
    options = ModelOptions(str(adapter), dtype="bfloat16", device="cpu")
    by_hand = load_model(dataclasses.replace(options, path=str(merged)))
    assert same(load_whole(whole_model(options)), by_hand.model)  # of parts, which are cut out of it

    def said_by(engine: Engine) -> list[int]:
        return run(engine, Request("r", engine.tokenizer.encode(PROMPT), SamplingParams(24)))[0]

    speculation = SpeculationOptions("speculative", 4, draft_model=str(adapter))
    drafted = Engine.load(options, EngineOptions(max_running=1), speculation)
    expected = ids(merged, "bfloat16")
    assert said_by(drafted) == expected
    assert drafted.by_strategy()[0].accepted == drafted.by_strategy()[0].drafted > 8  # both are the one model
    with loaded_group(options, EngineOptions(max_running=1), SpeculationOptions("auto", 8), 2) as (leader, group):
        assert said_by(leader) == expected
        assert group.state(2).ready == (0, 1) and group.state(2).disagreements == 0


def test_it_is_another_model_than_its_base(folders: tuple[Path, Path, Path]) -> None:
    base, adapter, _ = folders
    infos = [load_model(ModelOptions(str(path), device="cpu")).info("auto", lossless=True) for path in (base, adapter)]
    assert infos[0].model_revision != infos[1].model_revision  # by which latency curves, texts and tables are kept
    assert [info.adapter_of for info in infos] == [None, (str(adapter), str(base))]
    first, second = (json.loads(outrider("doctor", "--json", "--model", path).stdout) for path in (base, adapter))
    alike = ("architecture", "parameters", "has_weights", "dtype", "weight_bytes", "ok")
    assert [first[name] for name in alike] == [second[name] for name in alike] and first["ok"]


@pytest.mark.parametrize("load", [load_tokenizer, load_tokenizer_alone])
def test_an_adapter_without_a_tokenizer_has_that_of_its_base(folders: tuple[Path, Path, Path], own: Path, load: Any) -> None:
    base, adapter, _ = folders
    tokenizer = load(str(base))
    assert load(str(adapter)).get_vocab() == tokenizer.get_vocab()
    tokenizer.chat_template = "{{ messages[0].content }} of the adapter"
    tokenizer.save_pretrained(own)
    found = load(str(own)).apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert found == "hi of the adapter"


def test_a_base_that_is_none_is_refused_by_every_command(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for base, said in (
        ("/nowhere/base", "model path '/nowhere/base' does not exist"),
        (None, "no base_model_name_or_path"),
        ("nowhere.gguf", "adapter of 'nowhere.gguf'"),
        (str(own), "which is an adapter itself"),
    ):
        name_base(own, base)
        for command in (("generate", "--prompt", "a", "--model"), ("doctor", "--model"), ("serve",)):
            line = error_line(outrider(*command, own), 1)
            assert f"model '{own}' is an adapter" in line and "base_model_name_or_path" in line and said in line
        with pytest.raises(LaunchError, match="is an adapter"):
            check_model(str(own), "speculation.draft_model")
    name_base(own, "nobody/no-model")
    line = error_line(outrider("generate", "--model", own, "--prompt", "a"), 1)
    assert f"model 'nobody/no-model' (base_model_name_or_path of the adapter '{own}') could not be found" in line


def test_an_adapter_that_cannot_be_merged_is_refused_by_every_command(
    folders: tuple[Path, Path, Path], own: Path, tmp_path: Path
) -> None:
    settings = (own / "adapter_config.json").read_text()
    for fields, said in (
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 5}}, "the rank 5 want"),
        ({"target_modules": ["wq"]}, "target_modules has 'wq'"),
        ({}, "has no adapter_model.safetensors"),
    ):
        (own / "adapter_config.json").write_text(settings)
        name_base(own, str(folders[0]), **fields)  # type: ignore[arg-type]
        if not fields:
            (own / "adapter_model.safetensors").rename(own / "elsewhere")
        for command in (("generate", "--prompt", "a", "--model"), ("doctor", "--model")):
            line = error_line(outrider(*command, own), 1)
            assert line.startswith(f"error: model '{own}'") and said in line
    (own / "elsewhere").rename(own / "adapter_model.safetensors")
    name_base(own, str(save_model(tmp_path / "wide", llama_config(hidden_size=96))))
    assert "the rank 4 want [4, 96]" in error_line(outrider("generate", "--model", own, "--prompt", "a"), 1)
    with pytest.raises(ModelLoadError, match=r"model\.adapters needs a base model, but .*lora' is an adapter"):
        load_model(ModelOptions(str(folders[1]), device="cpu", adapters={"other": str(folders[1])}))
