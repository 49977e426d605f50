"""Models whose weights stay quantized: those of a GGUF file as they are, others rounded at load; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from outrider.configs.schema import ConfigError, load_config
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.cpu.linear import has_kernels
from outrider.engine.cpu.packed_weight import PackedWeight
from outrider.engine.engine import Engine
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading import memory
from outrider.engine.loading.model import load_model, model_revision
from tests.helpers.models import llama_config, run, save_model

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tests.helpers.gguf_files import save_gguf  # noqa: E402

pytestmark = pytest.mark.skipif(not has_kernels(torch.device("cpu"), torch.bfloat16), reason="numba is not installed")

KINDS = gguf.GGMLQuantizationType


def file_of(folder: str, path: Path, kind: str = "Q4_1", **given: Any) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return save_gguf(path, model, folder, KINDS[kind], **given)


@pytest.fixture(scope="module")
def file(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return file_of(folder, Path(tmp_path_factory.mktemp("packed")) / "tiny.gguf")


def options(path: Path | str, weights: Any = "auto", **given: Any) -> ModelOptions:
    return ModelOptions(str(path), **{"device": "cpu", "dtype": "bfloat16", "weights": weights, **given})


def engine_of(path: Path | str, weights: Any = "auto", strategy: str = "auto", **given: Any) -> Engine:
    speculation = SpeculationOptions(strategy, max_draft_tokens=12, **given)
    return Engine.load(options(path, weights, threads=1), EngineOptions(max_running=4), speculation)


def outputs(engine: Engine, strategy: str | None = None, seeds: Sequence[int | None] = (None, None, 5)) -> list[list[int]]:
    """Of greedy and drawn requests, all at once."""
    prompts = [np.random.default_rng(number).integers(1, 300, 20 + number).tolist() for number in range(len(seeds))]
    made = []
    for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        params = SamplingParams(max_tokens=24, temperature=0.0 if seed is None else 0.9, seed=seed or 0, ignore_eos=True)
        made.append(Request(str(number), prompt + prompt[:10], params, strategy=strategy))
    return run(engine, *made)


def test_a_file_s_weights_stay_as_they_are_and_say_the_same(file: Path) -> None:
    kept, unpacked = (load_model(options(file, weights)) for weights in ("auto", "dequantized"))
    matrices = [module.weight for module in kept.model.modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding)]
    assert len(matrices) == 2 * 7 + 2 and {type(weight) for weight in matrices} == {PackedWeight}
    assert (kept.weights, unpacked.weights) == ("Q4_1", "bfloat16") and kept.info("auto", True).weights == "Q4_1"
    assert model_revision(kept.model) == model_revision(unpacked.model)
    for name, parameter in unpacked.model.named_parameters():
        own = kept.model.get_parameter(name)
        assert torch.equal(own.plain() if type(own) is PackedWeight else own, parameter), name
    held = sum(parameter.nbytes for parameter in kept.model.parameters())
    assert held < 0.45 * sum(parameter.nbytes for parameter in unpacked.model.parameters())
    one, other = (engine_of(file, weights, "autoregressive") for weights in ("auto", "dequantized"))
    assert one.info.exact and outputs(one) == outputs(other)


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_every_strategy_says_what_plain_decoding_says(file: Path, folder: str, weights: str) -> None:
    path = file if weights == "auto" else folder
    others = ("autoregressive", "llma", "jacobi", "speculative", "recycling")
    engine = engine_of(path, weights, "auto", strategies=others, draft_model="self:int4")
    assert engine.info.exact and engine.info.lossless
    expected = outputs(engine, "autoregressive")
    assert all(outputs(engine, name) == expected for name in ("auto", *others[1:]))
    assert [outputs(engine, "auto", (seed,))[0] for seed in (None,)] == expected[:1]  # alone as beside others


def test_rounded_models_are_others_and_close(folder: str) -> None:
    found = {weights: load_model(options(folder, weights)) for weights in ("auto", "int8", "int4")}
    assert [one.weights for one in found.values()] == [
        "bfloat16", "int8 (quantized at load as Q8_0)", "int4 (quantized at load as Q4_1)",
    ]  # fmt: skip
    assert len({model_revision(one.model) for one in found.values()}) == 3
    assert len({one.info("auto", True).num_parameters for one in found.values()}) == 1
    weight = found["auto"].model.lm_head.weight.float()
    for weights, most in (("int8", 0.01), ("int4", 0.1)):
        own = found[weights].model.lm_head.weight
        assert type(own) is PackedWeight and (own.float() - weight).norm() < most * weight.norm()


def test_a_draft_model_of_the_target_itself(folder: str) -> None:
    engine = engine_of(folder, strategy="speculative", draft_model="self:int8")
    assert outputs(engine) == outputs(engine_of(folder, strategy="autoregressive"))
    drafter = engine._drafter.draft_model
    assert drafter is not None and {type(layer.mlp.up_proj.weight) for layer in drafter.runner.model.model.layers} == {
        PackedWeight
    }


def refused(said: str, path: Path | str, weights: Any = "auto", **given: Any) -> None:
    with pytest.raises(ModelLoadError, match=said) as error:
        load_model(options(path, weights, **given))
    assert "\n" not in str(error.value)


def test_files_whose_weights_cannot_be_used(file: Path, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(file.read_bytes())
    reader = gguf.GGUFReader(file)
    found = {tensor.name: tensor for tensor in reader.tensors}
    broken = bytearray(data)
    at = int(found["blk.1.ffn_up.weight"].data_offset)
    broken[at : at + 2] = np.array([np.nan], np.float16).tobytes()
    path = tmp_path / "broken.gguf"
    path.write_bytes(broken)
    refused(r"broken\.gguf.*model\.layers\.1\.mlp\.up_proj\.weight is corrupt: it contains scales that are not finite", path)
    unknown = bytearray(data)
    at = bytes(data).index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight") + 4 + 16
    assert unknown[at] == KINDS.Q4_1
    unknown[at] = 250
    path.write_bytes(unknown)
    refused("could not be read: it is corrupt or of an unknown format: 250", path)
    unknown[at], unknown[at - 16] = KINDS.Q4_1, 48  # rows of as many numbers
    path.write_bytes(unknown)
    refused("has rows of 48 numbers, which is not a multiple of the Q4_1 block size 32", path)
    unknown[at - 16] = 32
    path.write_bytes(unknown)
    refused("broken.gguf", path)


def test_types_without_a_product_are_held_in_the_type(folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wide = save_model(tmp_path / "wide", llama_config(hidden_size=256, intermediate_size=256))
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32)
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (256, 84), dtype=np.uint8)
    raw[:, 80:] = np.array([0.01, 0.01], np.float16).view(np.uint8)

    def quantize(weight: Any, kind: Any) -> Any:
        return raw if weight.shape == (256, 256) else np.asarray(gguf_quantize(weight, KINDS.F32))

    gguf_quantize = gguf.quantize
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gguf, "quantize", quantize)
        patched.setattr("tests.helpers.gguf_files.gguf.GGUFWriter.add_tensor", _as_it_is(KINDS.Q2_K))
        path = save_gguf(tmp_path / "a.gguf", model, str(wide), KINDS.Q2_K)
    loaded = load_model(options(path))
    assert loaded.weights == "bfloat16" and "weights in Q2_K are stored as bfloat16, for which" in caplog.text


def _as_it_is(kind: Any) -> Any:
    add = gguf.GGUFWriter.add_tensor

    def made(self: Any, name: str, data: Any, raw_dtype: Any = None) -> None:
        add(self, name, data, raw_dtype=kind if data.dtype == np.uint8 else None)

    return made


def test_what_cannot_be_quantized_is_refused(folder: str, tmp_path: Path) -> None:
    refused("model.weights=int8 does not support .* model.dtype=float64: it needs a CPU, numba", folder, "int8", dtype="float64")
    config = GPT2Config(vocab_size=320, n_embd=48, n_layer=2, n_head=4, n_positions=64, eos_token_id=0, bos_token_id=None)
    other = save_model(tmp_path / "other", config)
    refused("model.weights=int4 does not support this GPT2LMHeadModel: only 0 of its", other, "int4")
    for given in ("parallelism.mode=tensor", "baseline.kind=pipeline"):
        with pytest.raises(ConfigError, match=f"{given.replace('=', ' is ')}, where model.weights=int4 is not supported"):
            load_config(None, ["model.weights=int4", given, "parallelism.world_size=2"])
    with pytest.raises(ConfigError, match=r"model\.weights"):
        load_config(None, ["model.weights=int3"])


def test_what_fits_into_memory_is_known_before(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = load_model(options(file)).model
    held = sum(parameter.nbytes for parameter in kept.parameters())
    monkeypatch.setattr(memory, "free_bytes", lambda: int(1.1 * held))
    assert load_model(options(file)).weights == "Q4_1"
    refused("needs 0.0 GiB for its weights", file, "dequantized")
    monkeypatch.setattr(memory, "free_bytes", lambda: int(0.9 * held))
    refused("needs 0.0 GiB for its weights", file)
