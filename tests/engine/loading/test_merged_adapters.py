"""The folder of an adapter is a model: what it says is what the model says whose weights somebody merged by hand."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.actors.sharded.group import whole_model
from outrider.actors.sharded.rank import load_whole
from outrider.cluster.cli.launch.preflight import LaunchError, check_model
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.model import load_model
from outrider.engine.loading.weights.gguf import load_gguf_model
from outrider.engine.text.tokenizer import load_tokenizer, load_tokenizer_alone
from tests.cluster.commands import error_line, lines, outrider
from tests.helpers.gguf_files import save_gguf
from tests.helpers.models import FAMILIES, llama_config, save_adapter, save_model
from tests.helpers.ranks import loaded_group

CONFIGS = {"llama": llama_config(tie_word_embeddings=True), "gpt2": FAMILIES["gpt2"]}
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
    base = save_model(folder / "base", CONFIGS[family], seed=4)
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


def same(first: PreTrainedModel, second: PreTrainedModel) -> bool:
    theirs = dict(second.named_parameters())
    return all(torch.equal(weight, theirs.pop(name)) for name, weight in first.named_parameters()) and not theirs


def name_base(adapter: Path, base: str | None, **fields: Any) -> None:
    """Has an adapter be one of another model, or of none, and say further things of itself."""
    file = adapter / "adapter_config.json"
    told = json.loads(file.read_text()) | fields | {"base_model_name_or_path": base}
    file.write_text(json.dumps(told))


def said_by(engine: Engine) -> list[int]:
    assert engine.tokenizer is not None
    request = Request("r", engine.tokenizer.encode(PROMPT), SamplingParams(24))
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.output_ids.tolist()


def ids(path: Path, *arguments: object) -> list[int]:
    run = outrider("generate", "--model", path, "--prompt", PROMPT, "--max-tokens", 24, "--device", "cpu", "--json", *arguments)
    records, _ = lines(run)
    found: list[int] = records[0]["output_token_ids"]
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", CONFIGS)
def test_it_is_the_merged_model(tmp_path: Path, family: str, dtype: Any) -> None:
    base, adapter, merged = make(tmp_path, family)
    first, second = (load_model(ModelOptions(str(path), dtype=dtype, device="cpu")) for path in (adapter, merged))
    assert same(first.model, second.model) and first.served_name == "lora"
    said = [ids(path, "--dtype", dtype) for path in (adapter, merged, base)]
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_files_in_16_bits_and_quantized_after_it(tmp_path: Path, dtype: Any) -> None:
    base, adapter, merged = make(tmp_path)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    merge(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).save_pretrained(merged)
    for weights in ("auto", "int8", "int4"):
        options = ModelOptions(str(adapter), dtype=dtype, device="cpu", weights=weights)  # type: ignore[arg-type]
        by_hand = load_model(dataclasses.replace(options, path=str(merged)))
        assert same(load_model(options).model, by_hand.model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gguf_file_is_dequantized_for_it(folders: tuple[Path, Path, Path], tmp_path: Path, dtype: Any) -> None:
    base, adapter, _ = folders
    file = save_gguf(tmp_path / "base.gguf", AutoModelForCausalLM.from_pretrained(base), base)
    own = tmp_path / "lora"
    shutil.copytree(adapter, own)
    name_base(own, str(file))
    options = ModelOptions(str(own), dtype=dtype, device="cpu", weights="dequantized")
    expected = merge(load_gguf_model(str(file), torch.float32, "eager"), adapter).to(getattr(torch, dtype))
    found = load_model(options)
    assert same(found.model, expected)
    assert load_tokenizer(str(own)).get_vocab() == load_tokenizer(str(base)).get_vocab()
    with pytest.raises(ModelLoadError, match=r"cannot be merged into its quantized blocks: set model.weights=dequantized"):
        load_model(dataclasses.replace(options, weights="auto"))
    run = outrider("doctor", "--model", own, "--dtype", dtype, "--device", "cpu")
    assert "set model.weights=dequantized" in error_line(run, 1)


def test_ranks_and_draft_models_have_it(folders: tuple[Path, Path, Path]) -> None:
    _, adapter, merged = folders
    options = ModelOptions(str(adapter), dtype="bfloat16", device="cpu")
    by_hand = load_model(dataclasses.replace(options, path=str(merged)))
    assert same(load_whole(whole_model(options)), by_hand.model)  # of parts, which are cut out of it
    speculation = SpeculationOptions("speculative", 4, draft_model=str(adapter))
    drafted = Engine.load(options, EngineOptions(max_running=1), speculation)
    expected = ids(merged, "--dtype", "bfloat16")
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


@pytest.mark.parametrize("load", [load_tokenizer, load_tokenizer_alone])
def test_the_tokenizer_and_its_template_are_its_own_or_those_of_its_base(
    folders: tuple[Path, Path, Path], tmp_path: Path, load: Any
) -> None:
    base, adapter, _ = folders
    assert load(str(adapter)).get_vocab() == load(str(base)).get_vocab()
    own = load(str(base))
    own.chat_template = "{{ messages[0].content }} of the adapter"
    shutil.copytree(adapter, tmp_path / "lora")
    own.save_pretrained(tmp_path / "lora")
    found = load(str(tmp_path / "lora")).apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert found == "hi of the adapter"


def test_doctor_tells_of_its_model(folders: tuple[Path, Path, Path]) -> None:
    base, adapter, _ = folders
    first, second = (json.loads(outrider("doctor", "--json", "--model", path).stdout) for path in (base, adapter))
    told = ("architecture", "parameters", "has_weights", "dtype", "weight_bytes", "ok")
    assert [first[name] for name in told] == [second[name] for name in told] and first["ok"]


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("/nowhere/base", "base_model_name_or_path in its adapter_config.json: model path '/nowhere/base' does not exist"),
        (None, "its adapter_config.json has no base_model_name_or_path"),
        ("nowhere.gguf", "adapter of 'nowhere.gguf' (base_model_name_or_path in adapter_config.json), which does not exist"),
        ("itself", "(base_model_name_or_path in adapter_config.json), which is an adapter itself"),
    ],
)
def test_a_base_that_is_none_is_refused_by_every_command(
    folders: tuple[Path, Path, Path], tmp_path: Path, base: str | None, said: str
) -> None:
    adapter = tmp_path / "lora"
    shutil.copytree(folders[1], adapter)
    name_base(adapter, str(adapter) if base == "itself" else base)
    for line in (
        error_line(outrider("generate", "--model", adapter, "--prompt", "a"), 1),
        error_line(outrider("doctor", "--model", adapter), 1),
        error_line(outrider("serve", adapter), 1),
    ):
        assert f"model '{adapter}' is an adapter" in line and said in line
    with pytest.raises(LaunchError, match="is an adapter"):
        check_model(str(adapter), "speculation.draft_model")


def test_a_base_on_a_hub_that_cannot_be_had_is_named(
    folders: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tmp_path / "lora"
    shutil.copytree(folders[1], adapter)
    name_base(adapter, "nobody/no-model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = error_line(outrider("generate", "--model", adapter, "--prompt", "a"), 1)
    assert f"model 'nobody/no-model' (base_model_name_or_path of the adapter '{adapter}') could not be found" in line


@pytest.mark.parametrize(
    ("fields", "without", "said"),
    [
        ({"use_dora": True}, "", "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "", "modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 5}}, "", "the rank 5 want"),
        ({"target_modules": ["wq"]}, "", "target_modules has 'wq'"),
        ({}, "adapter_model.safetensors", "has no adapter_model.safetensors"),
    ],
)
def test_what_is_not_computed_beside_a_model_is_not_added_to_it(
    folders: tuple[Path, Path, Path], tmp_path: Path, fields: dict[str, Any], without: str, said: str
) -> None:
    adapter = tmp_path / "lora"
    shutil.copytree(folders[1], adapter)
    name_base(adapter, str(folders[0]), **fields)
    if without:
        (adapter / without).unlink()
    for line in (
        error_line(outrider("generate", "--model", adapter, "--prompt", "a"), 1),
        error_line(outrider("doctor", "--model", adapter), 1),
    ):
        assert line.startswith(f"error: model '{adapter}'") and said in line


def test_of_another_model_and_with_adapters_beside_it(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    adapter = tmp_path / "lora"
    shutil.copytree(folders[1], adapter)
    name_base(adapter, str(save_model(tmp_path / "wide", llama_config(hidden_size=96))))
    line = error_line(outrider("generate", "--model", adapter, "--prompt", "a"), 1)
    assert "the model and the rank 4 want [4, 96]" in line
    with pytest.raises(ModelLoadError, match=r"model.adapters needs a base model, but .*lora' is an adapter: set model.path to"):
        load_model(ModelOptions(str(folders[1]), device="cpu", adapters={"other": str(folders[1])}))
