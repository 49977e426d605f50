"""Quantized checkpoints on a CPU: the weights that they stand for, to the bit, and every broken or unknown one in one line."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading import memory
from outrider.engine.loading.model import load_model, load_weights, model_revision
from outrider.engine.loading.weights.quantized import refuse_unusable
from outrider.experiments.gpu_suite.parts.quantized import Packing, packings, save_checkpoints
from tests.helpers.models import FAMILIES, run, save_model

FORMATS = packings(32)
Pair = tuple[Path, Path]  # the quantized checkpoint, and the ordinary one that it stands for


def make(source: Path, folder: Path, packing: Packing) -> Pair:
    pair = folder / "quantized", folder / "plain"
    save_checkpoints(*pair, AutoConfig.from_pretrained(source), load_file(source / "model.safetensors"), packing)
    for path in pair:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(source / name, path)
    return pair


@pytest.fixture(scope="module", params=FORMATS)
def pair(request: pytest.FixtureRequest, folder: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(Path(folder), tmp_path_factory.mktemp(request.param), FORMATS[request.param])


def same(pair: Pair) -> None:
    """Every weight has the bits of the ordinary checkpoint's, and so do the logits."""
    found, expected = (load_weights(str(path), "auto", "sdpa").eval() for path in pair)
    weights = dict(expected.named_parameters())
    assert {name for name, _ in found.named_parameters()} == set(weights)
    for name, weight in found.named_parameters():
        assert weight.dtype == weights[name].dtype and torch.equal(weight, weights[name]), name
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, expected(ids).logits)
    assert model_revision(found) == model_revision(expected)


def test_weights_are_those_that_the_numbers_stand_for(pair: Pair) -> None:
    same(pair)


@pytest.mark.parametrize("name", ["gptq", "w4a16-zeros", "fp8-blocks"])
def test_groups_and_blocks_may_be_smaller_at_the_edges(name: str, folder: str, tmp_path: Path) -> None:
    same(make(Path(folder), tmp_path, packings(40)[name]))


@pytest.mark.parametrize("name", ["gptq", "fp8-blocks"])
def test_experts_lie_in_a_file_one_by_one(name: str, tmp_path: Path) -> None:
    same(make(save_model(tmp_path / "source", FAMILIES["mixtral"]), tmp_path, packings(16)[name]))


def test_a_checkpoint_in_several_files(folder: str, tmp_path: Path) -> None:
    quantized, plain = make(Path(folder), tmp_path, FORMATS["awq"])
    tensors = load_file(quantized / "model.safetensors")
    (quantized / "model.safetensors").rename(quantized / "consolidated.safetensors")  # is not the model's
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, quantized / file, {"format": "pt"})
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    same((quantized, plain))


@pytest.mark.parametrize("name", ["w4a16", "w4a16-zeros", "w8a16", "w8a16-zeros", "fp8-tensor", "fp8-channel", "w8a8"])
def test_the_format_s_own_package_reads_the_same(name: str, folder: str, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="pip install 'outrider[quantized]'")
    from compressed_tensors.quantization import QuantizationScheme

    quantized, _ = make(Path(folder), tmp_path, FORMATS[name])
    settings = FORMATS[name].settings
    compressor = compressors.BaseCompressor.get_value_from_registry(settings["format"])
    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    tensors, found = load_file(quantized / "model.safetensors"), load_weights(str(quantized), "auto", "sdpa").state_dict()
    modules = [weight.removesuffix(".weight_scale") for weight in tensors if weight.endswith(".weight_scale")]
    assert len(modules) == 14
    for module in modules:
        parts = {end.removeprefix(f"{module}."): part for end, part in tensors.items() if end.startswith(f"{module}.")}
        assert torch.equal(compressor.decompress(parts, scheme)["weight"], found[f"{module}.weight"]), module


def test_transformers_dequantizes_blocks_to_the_same(folder: str, tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config

    quantized, _ = make(Path(folder), tmp_path, FORMATS["fp8-blocks"])
    theirs = AutoModelForCausalLM.from_pretrained(quantized, quantization_config=FineGrainedFP8Config(dequantize=True))
    found = load_weights(str(quantized), "auto", "sdpa").state_dict()
    assert all(torch.equal(weight, found[name]) for name, weight in theirs.state_dict().items())


def outputs(path: Path, dtype: Literal["auto", "float32"]) -> list[list[int]]:
    """Greedy answers, with drafts."""
    model = ModelOptions(str(path), dtype=dtype, device="cpu", threads=1)
    engine = Engine.load(model, EngineOptions(max_running=4), SpeculationOptions("llma", max_draft_tokens=16))
    assert engine.info.exact
    prompts = [np.tile(np.arange(3 + number, 40, 2 + number, np.int32), 2) for number in range(3)]
    requests = [Request(str(number), prompt, SamplingParams(max_tokens=24)) for number, prompt in enumerate(prompts)]
    return run(engine, *requests)


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "w4a16-zeros", "fp8-blocks"])
def test_answers_are_those_of_the_ordinary_checkpoint(name: str, folder: str, tmp_path: Path) -> None:
    quantized, plain = make(Path(folder), tmp_path, FORMATS[name])
    found = outputs(quantized, "auto")
    assert found == outputs(plain, "auto") and all(found)


def test_in_float32_nothing_is_rounded_to_the_file_s_type(folder: str, tmp_path: Path) -> None:
    quantized, plain = make(Path(folder), tmp_path, FORMATS["gptq"])
    wide, narrow = (load_weights(str(path), torch.float32, "sdpa") for path in (quantized, plain))
    ours, theirs = (model.model.layers[0].mlp.up_proj.weight for model in (wide, narrow))
    assert ours.dtype == torch.float32 and torch.equal(ours.half().float(), theirs) and not torch.equal(ours, theirs)
    for name in ("config.json", "model.safetensors"):
        (plain / name).unlink()
    wide.save_pretrained(plain)
    found = outputs(quantized, "float32")
    assert found == outputs(plain, "float32") and all(found)


def test_a_line_says_what_it_takes_and_it_has_to_fit(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = make(Path(folder), tmp_path, FORMATS["w4a16"])
    need = sum(weight.nbytes for weight in load_file(plain / "model.safetensors").values())
    assert (quantized / "model.safetensors").stat().st_size < need
    monkeypatch.setattr(memory, "free_bytes", lambda: need)
    with caplog.at_level(logging.WARNING):
        assert load_model(ModelOptions(str(quantized), device="cpu")).model.dtype == torch.bfloat16
    said = r"model '.*' is quantized with compressed-tensors: dequantized to bfloat16 for the CPU, 0\.\d\d GiB instead of 0\.\d\d"
    assert [bool(re.fullmatch(said, record.getMessage())) for record in caplog.records] == [True]
    monkeypatch.setattr(memory, "free_bytes", lambda: need - 1)
    refused(quantized, r"needs 0\.0 GiB for its weights")


def refused(path: Path, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said) as error:
        load_model(ModelOptions(str(path), device="cpu"))
    assert "\n" not in str(error.value) and path.name in str(error.value), error.value


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]
UP = "model.layers.1.mlp.up_proj"


def drop(end: str) -> Change:
    return lambda tensors, settings: tensors.pop(f"{UP}.{end}")


def cut(end: str) -> Change:
    return lambda tensors, settings: tensors.update({f"{UP}.{end}": tensors[f"{UP}.{end}"][:-1].clone()})


def cast(end: str, dtype: torch.dtype) -> Change:
    return lambda tensors, settings: tensors.update({f"{UP}.{end}": tensors[f"{UP}.{end}"].to(dtype)})


def put(**values: object) -> Change:
    return lambda tensors, settings: settings.update(values)


def weights(**values: object) -> Change:
    return lambda tensors, settings: settings["config_groups"]["group_0"]["weights"].update(values)


def far(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    tensors[f"{UP}.g_idx"][3] = 9


def plainly(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    tensors[f"{UP}.novel"] = torch.ones(3, dtype=torch.int8)


def none_quantized(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    for name in [name for name in tensors if ".layers." in name]:
        del tensors[name]


BROKEN: list[tuple[str, Change, str]] = [
    ("awq", drop("scales"), f"{UP}.scales is missing beside qweight, qzeros: give whole files"),
    ("awq", drop("qweight"), f"unexpected tensor {UP}.qzeros of type I32 beside qzeros, scales"),
    ("awq", cut("scales"), f"{UP}.scales has the shape [1, 96], not [2, 96] (bits 4, group_size 32)"),
    ("awq", cast("scales", torch.int32), f"{UP}.scales is of type I32, not BF16 or F16 or F32 or F8_E8M0"),
    ("awq", put(group_size=16), "down_proj.qzeros has the shape [3, 8], not [6, 8] (bits 4, group_size 16)"),
    ("awq", put(group_size=36), "its group_size is 36, which does not divide the 96 columns of"),
    ("awq", put(group_size=None), "its group_size is None, and a number is needed"),
    ("awq", put(group_size=0), "its group_size is 0: a number of columns, or -1 for all, is needed"),
    ("awq", put(bits=3), "its bits is 3, and 4 is known"),
    ("awq", put(version="gemv"), "its version is gemv; only gemm is supported"),
    ("gptq", put(bits=3), "its bits is 3, and 4 and 8 are known"),
    ("gptq", put(bits=8), "down_proj.qzeros has the shape [3, 8], not [2, 16] (bits 8, group_size 32)"),
    ("gptq", put(checkpoint_format="marlin"), "its checkpoint_format is marlin; supported: gptq, gptq_v2"),
    ("gptq", cut("qzeros"), f"{UP}.qzeros has the shape [1, 12], not [2, 12]"),
    ("gptq", cast("qweight", torch.int64), f"{UP}.qweight is of type I64 and shape [8, 96], not a matrix of I32"),
    ("gptq-act-order", drop("g_idx"), f"{UP}.g_idx is missing, which desc_act=true requires"),
    ("gptq-act-order", far, f"{UP}.g_idx names group 9, and there are 2 (0 to 1)"),
    ("gptq-act-order", cut("g_idx"), f"{UP}.g_idx has the shape [63], not [64]"),
    ("w4a16", weights(num_bits=3), "its num_bits is 3, and 4 and 8 are known"),
    ("w4a16", weights(group_size=16), "which no blocks (1 x 16) of a weight [64, 96] give"),
    ("w4a16", cut("weight_packed"), f"{UP}.weight_packed has the shape [95, 8], which {UP}.weight_shape (96, 64) does not give"),
    ("w4a16", drop("weight_shape"), f"{UP}.weight_shape is missing beside weight_packed, weight_scale"),
    ("w4a16-zeros", drop("weight_zero_point"), f"{UP}.weight_zero_point is missing"),
    ("w4a16-zeros", cut("weight_zero_point"), f"{UP}.weight_zero_point has the shape [11, 2], not [12, 2]"),
    ("w4a16", put(config_groups={}), "its quantization_config has no config_groups"),
    ("w4a16", put(format="nvfp4-pack-quantized"), "its format is nvfp4-pack-quantized; supported: pack-, float-, int- "),
    ("w4a16", put(sparsity_config={"format": "sparse-24-bitmask"}), "its weights are also sparse, which is not supported"),
    ("w4a16", put(transform_config={"config_groups": {"u": {}}}), "its transform_config rotates inputs at run time"),
    ("fp8-channel", drop("weight_scale"), f"{UP}.weight_scale is missing beside weight"),
    ("fp8-channel", cut("weight_scale"), f"{UP}.weight_scale has the shape [95, 1], which no blocks (none) of a weight [96, 64]"),
    ("fp8-blocks", drop("weight_scale_inv"), f"{UP}.weight_scale_inv is missing beside weight"),
    ("fp8-blocks", put(weight_block_size=[64, 64]), "which no blocks (64 x 64) of a weight [64, 96] give"),
    ("fp8-blocks", put(fmt="e5m2"), "its fmt is e5m2; only e4m3 is supported"),
    ("fp8-blocks", cast("weight", torch.float8_e5m2), f"unexpected tensor {UP}.weight of type F8_E5M2"),
    ("fp8-blocks", plainly, f"unexpected tensor {UP}.novel of type I8 beside novel, weight, weight_scale_inv"),
    ("fp8-blocks", none_quantized, "has no quantized weights, but its config.json declares fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "said"), BROKEN, ids=[f"{name}-{said[:40]}" for name, _, said in BROKEN])
def test_what_is_broken_or_unknown_is_named(name: str, change: Change, said: str, folder: str, tmp_path: Path) -> None:
    quantized, _ = make(Path(folder), tmp_path, FORMATS[name])
    tensors, config = load_file(quantized / "model.safetensors"), json.loads((quantized / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    (quantized / "config.json").write_text(json.dumps(config))
    refused(quantized, re.escape(said))


def test_weights_that_are_not_there_at_all(folder: str, tmp_path: Path) -> None:
    quantized, plain = make(Path(folder), tmp_path, FORMATS["awq"])
    for path in (quantized, plain):
        kept = {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if UP not in name}
        save_file(kept, path / "model.safetensors", {"format": "pt"})
        refused(path, f"lacks 1 of its weights, {UP}.weight among them: download all of its files")
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]  # as older converters have it, which write a file of their own
    (quantized / "config.json").write_text(json.dumps(config))
    refused(quantized, "lacks 14 of its weights, .*: its weights are quantized, and config.json has no quantization_config")
    config["quantization_config"] = FORMATS["awq"].settings
    (quantized / "config.json").write_text(json.dumps(config))
    (quantized / "model.safetensors").rename(quantized / "pytorch_model.bin")
    refused(quantized, "is quantized and has no model.safetensors: dequantizing reads no other files")


OTHERS = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes_4bit"),
    ({"load_in_8bit": True}, "bitsandbytes_8bit"),
    *(({"quant_method": name}, name) for name in ("hqq", "aqlm", "modelopt", "torchao", "quanto")),
]


@pytest.mark.parametrize(("settings", "method"), OTHERS, ids=[method for _, method in OTHERS])
def test_formats_that_cannot_be_dequantized_are_refused_by_name(
    settings: dict[str, Any], method: str, folder: str, tmp_path: Path
) -> None:
    quantized, _ = make(Path(folder), tmp_path, Packing(settings, FORMATS["awq"].pack, torch.float16))
    known = "awq, gptq, compressed-tensors, fp8"
    refused(quantized, f"is quantized with {method}, which is not supported on a CPU .supported: {known}.: give the model in 16")


def test_on_a_gpu_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"awq": "gptqmodel", "gptq": "optimum", "compressed-tensors": "compressed-tensors", "fp8": "kernels"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for method, package in packages.items():
        said = f"is quantized with {method}, which requires {package}: pip install 'outrider.quantized.'$"
        with pytest.raises(ModelLoadError, match=said):
            refuse_unusable("m", {"quant_method": method}, on_cpu=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for method in packages:
        refuse_unusable("m", {"quant_method": method}, on_cpu=False)
    with pytest.raises(ModelLoadError, match="is quantized with modelopt, which transformers does not support: give"):
        refuse_unusable("m", {"quant_method": "modelopt"}, on_cpu=False)
