"""KV slots on GPUs that do not exist: how long and how many they are, and what is kept back beside them."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from outrider.configs.schema import REPOSITORY, load_config
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.engine import accelerator
from outrider.engine.engine import runner_over
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward import runners
from outrider.engine.loading.footprint import Footprint, footprint
from outrider.engine.loading.model import LoadedModel
from outrider.engine.loading.slot_memory import LENGTHS, STRICT_ROWS, reserved
from tests.engine.loading.gpus.fake_gpus import A100_80, GIB, FakeGpus
from tests.helpers.models import llama_config

GPU = torch.device("cuda", 0)
# By their public config.json: layers, heads and sizes.
LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072, dtype="bfloat16",
)  # fmt: skip
QWEN3_8B = Qwen3Config(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, dtype="bfloat16",
)  # fmt: skip
MISTRAL_7B = MistralConfig(
    vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, sliding_window=None, dtype="bfloat16",
)  # fmt: skip
GEMMA2_9B = Gemma2Config(
    vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16,
    num_key_value_heads=8, head_dim=256, max_position_embeddings=8192, dtype="bfloat16",
)  # fmt: skip
DRAFTS = SpeculationOptions().most_draft_tokens
NONE = ParallelismOptions()


def told(config: PreTrainedConfig, folder: Path, gpus: FakeGpus, *overrides: str) -> Footprint:
    """What ``outrider doctor --model`` says with configs/single_gpu.yaml."""
    config.save_pretrained(folder)
    settings = load_config(REPOSITORY / "configs" / "single_gpu.yaml", [f"model.path={folder}", *overrides])
    with accelerator.use(gpus):  # type: ignore[arg-type]
        return footprint(settings.model, settings.engine, settings.speculation, settings.parallelism)


def served(
    config: PreTrainedConfig,
    gpus: FakeGpus,
    options: EngineOptions,
    length: int | None = None,
    world_size: int = 1,
    speculation: SpeculationOptions | None = None,
) -> tuple[int, int, EngineOptions]:
    """The context that an engine serves with a model on a GPU, the capacity of its slots, and what its runner is made with."""
    made: list[tuple[int, EngineOptions]] = []

    def make(model: Any, capacity: int, options: EngineOptions, *_: Any) -> Any:
        made.append((capacity, options))
        return SimpleNamespace(grammars=None, adapt=lambda adapters: None)

    model: Any = SimpleNamespace(config=config, dtype=torch.bfloat16, device=GPU)
    whole = int(config.max_position_embeddings)
    loaded = LoadedModel(model, None, "m", length or whole, (), may_shorten=length is None)  # type: ignore[arg-type]
    with accelerator.use(gpus):  # type: ignore[arg-type]
        loaded, _ = runner_over(loaded, options, speculation or SpeculationOptions(), world_size, make)
    return loaded.max_model_len, *made[0]


@pytest.mark.parametrize(
    ("config", "length"),
    [(LLAMA_8B, 8192), (QWEN3_8B, 8192), (MISTRAL_7B, 8192), (GEMMA2_9B, 4096)],
    ids=["llama-3.1-8b", "qwen3-8b", "mistral-7b", "gemma-2-9b"],
)
def test_the_usual_models_start_on_80_gb(config: PreTrainedConfig, length: int, tmp_path: Path) -> None:
    found = told(config, tmp_path, FakeGpus())
    assert found.fits and (found.max_model_len, found.context_len) == (length, config.max_position_embeddings)
    assert found.max_running == 32 and 32 <= found.kv_slots <= 96
    assert found.need_bytes <= found.free_bytes <= 0.9 * A100_80
    assert found.slot_bytes == found.kv_bytes_per_token * (length + DRAFTS)
    # The engine, whose weights are there, comes to the same.
    taken = found.weight_bytes
    options = EngineOptions(max_running=32, max_step_tokens=2048)
    served_length, capacity, made = served(config, FakeGpus(free=A100_80 - taken, taken=taken), options)
    assert (served_length, capacity, made.kv_slots) == (length, length + DRAFTS, found.kv_slots)


def test_the_whole_context_is_taken_where_it_fits(tmp_path: Path) -> None:
    assert told(QWEN3_8B, tmp_path, FakeGpus(), "engine.max_running=8").max_model_len == 40960
    assert told(LLAMA_8B, tmp_path, FakeGpus(), "engine.max_running=8").max_model_len == 32768
    assert tuple(1024 * count for count in (128, 64, 32, 16, 8, 4)) == LENGTHS


def test_a_shorter_context_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    weights = 15 * GIB
    length, _, _ = served(LLAMA_8B, FakeGpus(free=A100_80 - weights, taken=weights), EngineOptions(max_running=32))
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    said = line.getMessage()
    assert length == 8192 and "\n" not in said
    for figure in ("model.max_model_len is 8192", "131072", "512.2 GiB", "cuda:0"):  # 64 more tokens may be drafted
        assert figure in said
    caplog.clear()
    served(LLAMA_8B, FakeGpus(free=A100_80 - weights, taken=weights), EngineOptions(max_running=32), 4000)
    assert not caplog.records


def test_a_length_that_is_set_is_refused_where_it_does_not_fit() -> None:
    gpus, options = FakeGpus(free=A100_80 - 15 * GIB, taken=15 * GIB), EngineOptions(max_running=32)
    with pytest.raises(
        ModelLoadError, match=r"32 KV slots of 32768 tokens need 128\.\d GiB, and 5\d\.\d GiB are free"
    ) as refused:
        served(LLAMA_8B, gpus, options, 32768)
    fewer, shorter = (int(part.partition("=")[2]) for part in str(refused.value).partition("set ")[2].split(" or "))
    assert served(LLAMA_8B, gpus, dataclasses.replace(options, max_running=fewer), 32768)[0] == 32768
    assert served(LLAMA_8B, gpus, options, shorter)[0] == shorter
    with pytest.raises(ModelLoadError):
        served(LLAMA_8B, gpus, dataclasses.replace(options, max_running=fewer + 1), 32768)


def test_less_than_4096_tokens_are_refused() -> None:
    gpus = FakeGpus(total=24 * GIB, free=7 * GIB, taken=15 * GIB)
    assert served(LLAMA_8B, gpus, EngineOptions(max_running=8))[0] == 4096
    with pytest.raises(ModelLoadError, match=r"of 4096 tokens .* set engine\.max_running=\d+ or model\.max_model_len=\d+"):
        served(LLAMA_8B, gpus, EngineOptions(max_running=16))
    with pytest.raises(ModelLoadError, match=r"stop other processes that use it, set parallelism\.mode=tensor"):
        served(LLAMA_8B, FakeGpus(total=16 * GIB, free=GIB // 2, taken=14 * GIB), EngineOptions(max_running=16))


def test_running_requests_get_slots_first() -> None:
    gpus = FakeGpus(free=A100_80 - 15 * GIB, taken=15 * GIB)
    _, _, made = served(LLAMA_8B, gpus, EngineOptions(max_running=32))
    assert made.kv_slots is not None and 32 < made.kv_slots < 96 and made.kept_slots == made.kv_slots - 32
    assert served(LLAMA_8B, gpus, EngineOptions(max_running=4), 4096)[2].kv_slots == 12  # two for each at most
    assert served(LLAMA_8B, gpus, EngineOptions(max_running=32, prefix_caching=False))[2].kv_slots == 32
    assert served(LLAMA_8B, gpus, EngineOptions(max_running=32), world_size=2)[2].kv_slots == 32  # as other ranks have
    length, _, made = served(LLAMA_8B, gpus, EngineOptions(max_running=32, kv_slots=96))  # as it was asked for
    assert (length, made.kv_slots) == (4096, 96)


def test_slots_never_take_what_is_kept_back() -> None:
    """Not of what steps need, nor beyond the share of the GPU."""
    for exact in ("strict", "rounding"):
        options = EngineOptions(max_running=32, max_step_tokens=2048, exact=exact)  # type: ignore[arg-type]
        for taken in range(15 * GIB, 40 * GIB, 5 * GIB):
            _, capacity, made = served(LLAMA_8B, FakeGpus(free=A100_80 - taken, taken=taken), options)
            kv = (made.kv_slots or 0) * capacity * 128 * 1024  # bytes: two of 8 heads of 128 numbers in 32 layers
            with accelerator.use(FakeGpus()):  # type: ignore[arg-type]
                kept = reserved(LLAMA_8B, torch.bfloat16, GPU, options, capacity)
            assert taken + kv + kept.total <= 0.9 * A100_80


def test_what_is_kept_back_is_that_of_the_largest_forward() -> None:
    strict, rounding = EngineOptions(max_step_tokens=2048), EngineOptions(max_step_tokens=2048, exact="rounding")

    def kept(config: PreTrainedConfig, options: EngineOptions, capacity: int = 8256) -> int:
        with accelerator.use(FakeGpus()):  # type: ignore[arg-type]
            return reserved(config, torch.bfloat16, GPU, options, capacity).total

    assert kept(LLAMA_8B, strict) == kept(LLAMA_8B, dataclasses.replace(strict, max_step_tokens=64))
    logits = 2048 * LLAMA_8B.vocab_size * (2 + 4)  # once in bfloat16, once in float32
    assert kept(LLAMA_8B, rounding) - kept(LLAMA_8B, strict) > logits
    assert kept(GEMMA2_9B, rounding) > kept(LLAMA_8B, rounding)
    # States of 32 heads in splits of 256 positions: 128 numbers and 4 more, in float32. One more split for 256 more positions.
    for options, rows in ((strict, STRICT_ROWS), (rounding, 128)):
        assert kept(LLAMA_8B, options, 8448) - kept(LLAMA_8B, options, 8192) == rows * 32 * 132 * 4
    assert runners._FORMS["cuda"][0] == STRICT_ROWS


def test_a_draft_model_has_its_part(tmp_path: Path) -> None:
    llama_config(hidden_size=2048, head_dim=128, num_hidden_layers=16, num_key_value_heads=8).save_pretrained(tmp_path)
    gpus, options = FakeGpus(free=A100_80 - 15 * GIB, taken=15 * GIB), EngineOptions(max_running=32)
    speculation = SpeculationOptions("speculative", draft_model=str(tmp_path))
    length, _, alone = served(LLAMA_8B, gpus, options)
    with_draft, _, made = served(LLAMA_8B, gpus, options, speculation=speculation)
    assert (length, with_draft) == (8192, 8192) and (made.kv_slots or 0) < (alone.kv_slots or 0)
    per_token = (128 + 64) * 1024
    assert (made.kv_slots or 0) * (8192 + DRAFTS) * per_token < 0.9 * A100_80 - 15 * GIB


def test_replicas_of_a_gpu_that_share_it_come_to_the_same() -> None:
    """Whatever the other one has loaded when this one measures."""
    share = EngineOptions(max_running=8, gpu_memory_utilization=0.45)
    weights = 15 * GIB
    found = {
        served(LLAMA_8B, FakeGpus(free=A100_80 - weights - other, taken=weights), share)[:2]
        for other in (0, weights, int(0.45 * A100_80))
    }
    assert found == {(16384, 16384 + DRAFTS)}


def test_a_footprint_of_ranks_and_of_a_cpu_stays_as_it_was(tmp_path: Path) -> None:
    LLAMA_8B.save_pretrained(tmp_path)
    model, engine, speculation = ModelOptions(str(tmp_path), device="cuda"), EngineOptions(), SpeculationOptions()
    with accelerator.use(FakeGpus(8)):  # type: ignore[arg-type]
        parts = footprint(model, engine, speculation, ParallelismOptions("tensor", 8))
        ranks = footprint(model, engine, speculation, ParallelismOptions("lookahead", 8))
        cpu = footprint(dataclasses.replace(model, device="cpu"), engine, speculation, NONE)
    assert (parts.max_model_len, parts.reserved_bytes) == (131072, 0)
    assert (ranks.max_model_len, ranks.kv_slots, ranks.draft_rows) == (32768, 8, 8 * DRAFTS)
    assert (cpu.max_model_len, cpu.reserved_bytes, cpu.device) == (131072, 0, "cpu")
