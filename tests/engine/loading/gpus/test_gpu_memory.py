"""GPUs that do not exist: device choice, weights, KV slots, and plans of models of real size."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from outrider.configs.schema import REPOSITORY, load_config
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.engine import environment
from outrider.engine.accelerator import accelerator, use
from outrider.engine.cuda import static_runner
from outrider.engine.cuda.static_runner import ROWS, StaticRunner, step_kinds
from outrider.engine.engine import Engine, runner_over
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward import runners
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.runners import make_runner
from outrider.engine.loading import memory, slot_memory
from outrider.engine.loading import model as module
from outrider.engine.loading.cards import CARDS, find_card, planned
from outrider.engine.loading.footprint import Footprint, footprint
from outrider.engine.loading.model import LoadedModel, device_of, load_model, load_weights, served_config
from outrider.engine.loading.outline import Outline, outline
from outrider.engine.loading.plan import BANDWIDTH_SHARE, FLOPS_SHARE, Plan, Roofline, plan
from outrider.engine.loading.slot_memory import LENGTHS, STRICT_ROWS, reserved
from outrider.engine.measures.energy import meter_name
from outrider.experiments.device_double.guard import unavailable
from outrider.experiments.device_double.meta import MetaGpu
from outrider.experiments.gpu_suite.plan_table import CONFIGS, LARGE, ROUNDED, SERVED, table
from tests.engine.loading.gpus.fake_gpus import A100_80, GIB, FakeGpus
from tests.helpers.gguf_files import save_gguf
from tests.helpers.models import llama_config, save_model

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("gpu") / "model", llama_config())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What transformers is asked for; what it returns has no weights and cannot be moved."""
    calls: list[dict[str, Any]] = []

    def from_pretrained(files: str, **options: Any) -> tuple[Any, dict[str, Any]]:
        calls.append(options)
        return SimpleNamespace(device=GPU), {"missing_keys": [], "unexpected_keys": []}

    monkeypatch.setattr(module.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return calls


def test_an_absent_gpu_is_refused() -> None:
    for name, count in (("cuda:7", 2), ("cuda:1", 1), ("cuda:8", 8)):
        with use(FakeGpus(count)), pytest.raises(ModelLoadError, match=f"model.device is {name}.*cuda:{count - 1}$") as caught:
            device_of(name)
        assert "\n" not in str(caught.value)
    with use(FakeGpus(2)):
        assert [device_of(name) for name in ("auto", "cuda", "cuda:1")] == [GPU, GPU, torch.device("cuda", 1)]
        with pytest.raises(ModelLoadError, match="is not known"):
            device_of("gpu")


@pytest.mark.parametrize(
    ("cuda", "visible", "reason"),
    [
        (None, None, f"pip install --force-reinstall torch=={torch.__version__.partition('+')[0]}"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES is ''"),
        ("13.0", "-1", "CUDA_VISIBLE_DEVICES is '-1'"),
        ("13.0", None, "too old for CUDA 13.0"),
        ("13.0", "7", "CUDA_VISIBLE_DEVICES='7' names no GPU"),
    ],
    ids=["cpu-build", "hidden", "minus-one", "old-driver", "wrong-number"],
)
def test_an_unusable_gpu(
    cuda: str | None, visible: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``cuda`` is refused with the reason; where there is a GPU, ``auto`` logs it before it takes the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ModelLoadError, match=r"model\.device=cpu") as caught:
        device_of("cuda")
    assert reason in str(caught.value)
    monkeypatch.setattr(module, "nvidia_device_present", lambda: True)
    assert device_of("auto") == torch.device("cpu")
    (line,) = caplog.records
    assert line.levelno == logging.WARNING and reason in line.getMessage()
    caplog.clear()
    assert device_of("cpu") == torch.device("cpu")
    monkeypatch.setattr(module, "nvidia_device_present", lambda: False)
    assert device_of("auto") == torch.device("cpu") and not caplog.records


def test_a_gpu_that_is_present_and_unused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(environment, "_DEVICES", tmp_path)
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "driver")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidiactl").touch()
    assert not environment.nvidia_device_present()
    for name in ("nvidia3", "driver", "nvidia-smi"):
        (tmp_path / name).touch(0o755)
        assert environment.nvidia_device_present(), name
        (tmp_path / name).unlink()
    monkeypatch.setattr(module, "nvidia_device_present", lambda: True)
    with use(FakeGpus(why="the driver is too old: update it")):
        load_model(ModelOptions(str(folder), dtype="float32", threads=1))
    assert ["the driver is too old" in record.getMessage() for record in caplog.records].count(True) == 1
    assert "the driver is too old" in caplog.records[0].getMessage()


def test_names_of_gpus_are_asked_of_the_accelerator() -> None:
    with use(FakeGpus(2)):
        assert [meter_name(name) for name in ("cuda", "cuda:0", "cuda:1", "cpu")] == ["GPU-0", "GPU-0", "GPU-1", "cpu"]
        assert environment.device_name(torch.device("cuda:1")) == "a GPU, number 1"
    with use(FakeGpus(why="none")):
        assert meter_name("cuda") == "cuda"


def test_weights_go_straight_to_the_gpu_where_they_fit(folder: Path, asked: list[dict[str, Any]]) -> None:
    stored = sum(part.stat().st_size for part in folder.glob("*.safetensors"))
    options, speculation = ModelOptions(str(folder), device="cuda"), SpeculationOptions("autoregressive")
    for gpus in (FakeGpus(free=stored - 1), FakeGpus(total=2 * stored, taken=int(0.8 * stored) + 1)):
        with use(gpus), pytest.raises(ModelLoadError, match="of cuda:0 are free"):
            Engine.load(options, EngineOptions(), speculation)
        assert not asked
    for device, device_map in ((GPU, {"": GPU}), (torch.device("cpu"), None)):
        with use(FakeGpus(free=stored)):
            load_weights(str(folder), "auto", TREE_ATTENTION, device)
        assert asked.pop().get("device_map") == device_map


def test_a_gguf_file_has_to_fit_the_machine_and_the_gpu(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    path = str(save_gguf(tmp_path / "tiny.gguf", model, folder))
    need, read = 2 * model.num_parameters(), list[object]()
    moved = SimpleNamespace(to=lambda device: read.append(device) or SimpleNamespace(device=device))
    monkeypatch.setattr(module, "load_gguf_model", lambda *_: moved)
    with use(FakeGpus(free=need - 1)), pytest.raises(ModelLoadError, match="of cuda:0 are free"):
        load_weights(path, "auto", TREE_ATTENTION, GPU)
    assert not read
    with use(FakeGpus(free=need)):
        load_weights(path, "auto", TREE_ATTENTION, GPU)
        assert read == [GPU]
        monkeypatch.setattr(memory, "free_bytes", lambda: need - 1)
        with pytest.raises(ModelLoadError, match="of memory are free"):
            load_weights(path, "auto", TREE_ATTENTION, GPU)


def test_a_process_takes_its_share_of_a_gpu_and_never_more_than_is_free() -> None:
    total = 80 * GIB

    def left(utilization: float, free: int, taken: int = 0) -> int:
        with use(FakeGpus(total=total, free=free, taken=taken)):
            return memory.left_bytes(GPU, utilization)

    assert left(0.45, total) == left(0.45, total - 36 * GIB) == 36 * GIB  # the other one has loaded meanwhile
    assert left(0.45, total - 46 * GIB, taken=10 * GIB) == 26 * GIB
    assert left(0.9, 20 * GIB) == 20 * GIB and left(0.45, 40 * GIB, taken=40 * GIB) == 0
    with use(FakeGpus()):
        assert memory.left_bytes(torch.device("cuda", 1), 0.9) == 0


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


def planned_footprint(config: PreTrainedConfig, folder: Path, gpus: FakeGpus, *overrides: str) -> Footprint:
    """The footprint with configs/single_gpu.yaml, as ``outrider doctor --model`` prints it."""
    config.save_pretrained(folder)
    settings = load_config(REPOSITORY / "configs" / "single_gpu.yaml", [f"model.path={folder}", *overrides])
    with use(gpus):
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
    loaded = LoadedModel(model, None, "m", length or whole, (), may_shorten=length is None)
    with use(gpus):
        loaded, _ = runner_over(loaded, options, speculation or SpeculationOptions(), world_size, make)
    return loaded.max_model_len, *made[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "length"),
    [(LLAMA_8B, 8192), (QWEN3_8B, 8192), (MISTRAL_7B, 8192), (GEMMA2_9B, 4096)],
    ids=["llama-3.1-8b", "qwen3-8b", "mistral-7b", "gemma-2-9b"],
)
def test_the_usual_models_start_on_80_gb(config: PreTrainedConfig, length: int, tmp_path: Path) -> None:
    found = planned_footprint(config, tmp_path, FakeGpus())
    assert found.fits and (found.max_model_len, found.context_len) == (length, config.max_position_embeddings)
    assert found.max_running == 32 and 32 <= found.kv_slots <= 96
    assert found.need_bytes <= found.free_bytes <= 0.9 * A100_80
    assert found.slot_bytes == found.kv_bytes_per_token * (length + DRAFTS)
    # The engine, whose weights are there, comes to the same.
    taken = found.weight_bytes
    options = EngineOptions(max_running=32, max_step_tokens=2048)
    served_length, capacity, made = served(config, FakeGpus(free=A100_80 - taken, taken=taken), options)
    assert (served_length, capacity, made.kv_slots) == (length, length + DRAFTS, found.kv_slots)


def test_the_context_is_as_long_as_fits_and_at_least_4096_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert planned_footprint(QWEN3_8B, tmp_path, FakeGpus(), "engine.max_running=8").max_model_len == 40960
    assert planned_footprint(LLAMA_8B, tmp_path, FakeGpus(), "engine.max_running=8").max_model_len == 32768
    assert tuple(1024 * count for count in (128, 64, 32, 16, 8, 4)) == LENGTHS
    gpus, options = FakeGpus(free=A100_80 - 15 * GIB, taken=15 * GIB), EngineOptions(max_running=32)
    caplog.clear()
    assert served(LLAMA_8B, gpus, options)[0] == 8192
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all(figure in line for figure in ("8192", "131072", "512.2 GiB", "cuda:0"))  # 64 more tokens may be drafted
    caplog.clear()
    served(LLAMA_8B, gpus, options, 4000)
    assert not caplog.records
    small = FakeGpus(total=24 * GIB, free=7 * GIB, taken=15 * GIB)
    assert served(LLAMA_8B, small, EngineOptions(max_running=8))[0] == 4096
    with pytest.raises(ModelLoadError, match=r"of 4096 tokens .* set engine\.max_running=\d+ or model\.max_model_len=\d+"):
        served(LLAMA_8B, small, EngineOptions(max_running=16))
    with pytest.raises(ModelLoadError, match=r"set parallelism\.mode=tensor"):
        served(LLAMA_8B, FakeGpus(total=16 * GIB, free=GIB // 2, taken=14 * GIB), EngineOptions(max_running=16))


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


def test_running_requests_get_slots_first() -> None:
    gpus = FakeGpus(free=A100_80 - 15 * GIB, taken=15 * GIB)
    _, _, made = served(LLAMA_8B, gpus, EngineOptions(max_running=32))
    assert made.kv_slots is not None and 32 < made.kv_slots < 96 and made.kept_slots == made.kv_slots - 32
    assert served(LLAMA_8B, gpus, EngineOptions(max_running=4), 4096)[2].kv_slots == 12  # two for each at most
    assert served(LLAMA_8B, gpus, EngineOptions(max_running=32, prefix_caching=False))[2].kv_slots == 32
    assert served(LLAMA_8B, gpus, EngineOptions(max_running=32), world_size=2)[2].kv_slots == 32  # as other ranks have
    length, _, made = served(LLAMA_8B, gpus, EngineOptions(max_running=32, kv_slots=96))  # as it was asked for
    assert (length, made.kv_slots) == (4096, 96)
    # Replicas that share a GPU come to the same, whatever the other one has loaded meanwhile.
    share = EngineOptions(max_running=8, gpu_memory_utilization=0.45)
    for other in (0, 15 * GIB, int(0.45 * A100_80)):
        shared = FakeGpus(free=A100_80 - 15 * GIB - other, taken=15 * GIB)
        assert served(LLAMA_8B, shared, share)[:2] == (16384, 16384 + DRAFTS), other


def test_slots_never_take_what_is_kept_back() -> None:
    """Not of what steps need, nor beyond the share of the GPU."""
    for exact in ("strict", "rounding"):
        options = EngineOptions(max_running=32, max_step_tokens=2048, exact=exact)
        for taken in range(15 * GIB, 40 * GIB, 5 * GIB):
            _, capacity, made = served(LLAMA_8B, FakeGpus(free=A100_80 - taken, taken=taken), options)
            kv = (made.kv_slots or 0) * capacity * 128 * 1024  # bytes: two of 8 heads of 128 numbers in 32 layers
            with use(FakeGpus()):
                kept = reserved(LLAMA_8B, torch.bfloat16, GPU, options, capacity)
            assert taken + kv + kept.total <= 0.9 * A100_80


def test_what_is_kept_back_is_that_of_the_largest_forward() -> None:
    strict, rounding = EngineOptions(max_step_tokens=2048), EngineOptions(max_step_tokens=2048, exact="rounding")

    def kept(config: PreTrainedConfig, options: EngineOptions, capacity: int = 8256) -> int:
        with use(FakeGpus()):
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


def test_a_footprint_of_ranks_and_of_a_cpu_stays_as_it_was(tmp_path: Path) -> None:
    LLAMA_8B.save_pretrained(tmp_path)
    model, engine, speculation = ModelOptions(str(tmp_path), device="cuda"), EngineOptions(), SpeculationOptions()
    with use(FakeGpus(8)):
        parts = footprint(model, engine, speculation, ParallelismOptions("tensor", 8))
        ranks = footprint(model, engine, speculation, ParallelismOptions("lookahead", 8))
        cpu = footprint(dataclasses.replace(model, device="cpu"), engine, speculation, NONE)
    assert (parts.max_model_len, parts.reserved_bytes) == (131072, 0)
    assert (ranks.max_model_len, ranks.kv_slots, ranks.draft_rows) == (32768, 8, 8 * DRAFTS)
    assert (cpu.max_model_len, cpu.reserved_bytes, cpu.device) == (131072, 0, "cpu")


ALL = (*SERVED, *LARGE, *ROUNDED)
WITHOUT_GRAPHS = ("GPT-OSS-20B", "Phi-4-mini")
on_double = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def planned_for(model: str, card: str = "A100-80", memory_gib: float | None = None, **options: Any) -> Plan:
    found = CARDS[card] if memory_gib is None else dataclasses.replace(CARDS[card], memory_gib=memory_gib)
    engine = EngineOptions(**options)
    return plan(ModelOptions(str(CONFIGS / model)), engine, SpeculationOptions(), ParallelismOptions(), found)


def refusal(model: str, card: str = "A100-80", **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        planned_for(model, card, **options)
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("model", SERVED)
def test_the_usual_models_start_with_graphs_on_80_gb(model: str) -> None:
    found = planned_for(model)
    assert found.graphs == (STRICT_ROWS,) and found.exact and not found.no_graphs
    own = found.footprint.context_len
    assert found.footprint.max_running == 8 <= found.footprint.kv_slots and found.footprint.max_model_len >= min(8192, own)
    assert sum(found.memory.values()) == CARDS["A100-80"].memory_bytes and min(found.memory.values()) >= 0


@pytest.mark.parametrize("model", ROUNDED)
def test_what_is_not_exact_is_refused_with_the_option_that_helps(model: str) -> None:
    """And starts with it, where there is room."""
    card = "H200" if model == "Mixtral-8x7B" else "A100-80"
    assert "engine.exact=rounding" in refusal(model, card)
    found = planned_for(model, card, exact="rounding")
    assert not found.exact and found.not_exact
    assert (found.graphs, bool(found.no_graphs)) == (((), True) if model in WITHOUT_GRAPHS else (ROWS, False))
    assert "engine.exact=rounding" in refusal(model, card, exact="strict", compile=False)


def test_what_is_too_large_for_a_card() -> None:
    assert all("parallelism.mode=tensor" in refusal(model) for model in ("Llama-3.3-70B", "Mixtral-8x7B"))
    found = planned_for("Qwen2.5-32B").footprint
    assert found.kv_slots == found.max_running == 8 and found.slots_that_fit == 8
    fewer, shorter = re.findall(r"engine\.max_running=(\d+) or model\.max_model_len=(\d+)", refusal("Llama-3.1-8B", "L4"))[0]
    assert planned_for("Llama-3.1-8B", "L4", max_running=int(fewer)).footprint.fits
    refusal("Llama-3.1-8B", "L4", max_running=int(fewer) + 1)
    length = ModelOptions(str(CONFIGS / "Llama-3.1-8B"), max_model_len=int(shorter))
    assert plan(length, EngineOptions(), SpeculationOptions(), ParallelismOptions(), CARDS["L4"]).footprint.fits
    with pytest.raises(ModelLoadError, match=r"parallelism\.mode"):
        plan(length, EngineOptions(), SpeculationOptions(), ParallelismOptions("tensor", 2), CARDS["L4"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ALL)
def test_a_configuration_has_the_published_number_of_parameters(model: str) -> None:
    config = served_config(str(CONFIGS / model))
    assert "huggingface.co" in config._source
    assert outline(config).parameters == getattr(config, "_parameters", outline(config).parameters)


@pytest.mark.slow
@on_double
@pytest.mark.parametrize("model", ALL)
def test_bytes_are_those_that_the_engine_asks_a_gpu_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, at real size."""
    exact = "rounding" if model in ROUNDED else "strict"
    found = planned_for(model, memory_gib=320, exact=exact)
    config, gpu = served_config(str(CONFIGS / model)), MetaGpu(CARDS["A100-80"].capability, 320)
    if model != "SmolLM2-1.7B":  # a first forward leaves nothing
        monkeypatch.setattr(ModelRunner, "_probe", lambda runner: {})
    with use(gpu), gpu.current(GPU):
        with gpu.purpose("weights"), GPU:
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=TREE_ATTENTION).eval()
        buffers = sum(each.nbytes for each in made.buffers())
        slots, capacity = found.footprint, found.footprint.max_model_len + found.footprint.draft_rows
        kept, fixed = slots.kv_slots - slots.max_running, STRICT_ROWS if exact == "strict" else None
        with gpu.purpose("kv_slots"):
            if found.graphs:
                trees = 1 + slots.draft_rows
                runner: ModelRunner = StaticRunner(made, slots.max_running, capacity, fixed, kept=kept, tree_rows=trees)
            else:
                runner = ModelRunner(made, slots.max_running, capacity, kept=kept)
        with gpu.purpose("steps"):
            for size in found.graphs:
                assert isinstance(runner, StaticRunner) and size in runner.sizes
                for logits in step_kinds(fixed):
                    runner._step(size, logits)
        asked, expected = gpu.allocated(), found.memory
    assert asked.pop("weights") - buffers == expected["weights"] and buffers < 2**20
    assert asked.pop("kv_slots") == expected["kv_slots"]
    assert asked.pop("steps", 0) == expected["attention_states"] + expected["step_buffers"]
    assert not +asked


@on_double
def test_the_meta_gpu_counts_what_stays_once() -> None:
    gpu = MetaGpu()
    with use(gpu), gpu.current(GPU):
        with gpu.purpose("a"):
            kept = torch.zeros(1000, device=GPU)
            views = kept.view(10, 100)[3:], kept.t()
            lost = kept + 1
        with gpu.purpose("b"):
            copied = torch.ones(10, dtype=torch.int64).to(GPU)
        assert gpu.allocated() == {"a": 8000, "b": 80} and len(views) == 2 and copied.shape == (10,)
        del lost
        assert gpu.allocated() == {"a": 4000, "b": 80}
        with pytest.raises(NotImplementedError):
            kept.cpu()


def started(model: str, card: str = "A100-80") -> tuple[int, int]:
    """The capacity and the KV slots of a start over a model without weights."""
    config = served_config(str(CONFIGS / model))
    taken = outline(config).parameters * 2
    with planned(CARDS[card]):
        gpus = FakeGpus(total=accelerator().memory(GPU)[1], free=CARDS[card].memory_bytes - taken, taken=taken)
        gpus.capability = accelerator().capability
    _, capacity, made = served(config, gpus, EngineOptions())
    return capacity, made.kv_slots or 0


def test_slots_of_a_plan_and_of_a_start_come_from_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> tuple[int, int]:
        found = planned_for("Llama-3.1-8B").footprint
        assert (found.max_model_len + found.draft_rows, found.kv_slots) == started("Llama-3.1-8B")
        return found.max_model_len, found.kv_slots

    assert both() == (32768, 13)
    monkeypatch.setattr(slot_memory, "reserved", lambda *given: dataclasses.replace(reserved(*given), libraries=30 << 30))
    assert both() == (16384, 12)


@on_double
def test_refusals_of_a_plan_and_of_a_start_come_from_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(**options: Any) -> tuple[str, str]:
        gpu, config = MetaGpu(), served_config(str(CONFIGS / "SmolLM2-1.7B"))
        with use(gpu), gpu.current(GPU), GPU:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=TREE_ATTENTION).eval()
            with pytest.raises(ModelLoadError) as caught:
                make_runner(model, 8256, EngineOptions(**options))
        return refusal("SmolLM2-1.7B", **options), str(caught.value)

    assert planned_for("SmolLM2-1.7B").graphs
    monkeypatch.setattr(static_runner, "lacks_graphs", lambda config, shape: "it is Friday")
    said, at_start = both()
    assert said == at_start and "it is Friday" in said
    monkeypatch.undo()
    monkeypatch.setattr(Outline, "is_plain", property(lambda found: False))
    for options in ({}, {"compile": True, "exact": "rounding"}):
        said, at_start = both(**options)
        assert said == at_start, options
    assert planned_for("SmolLM2-1.7B", exact="rounding").no_graphs


def test_times_are_those_of_the_roofline() -> None:
    card, found = CARDS["A100-80"], planned_for("Llama-3.1-8B")
    embeddings, parameters = 128256 * 4096, 8_030_261_248
    read = 2 * (parameters - embeddings) + 2048 * 128 * 1024
    assert found.step_ms[1] == found.step_ms[64] == pytest.approx(1e3 * read / (card.bandwidth * BANDWIDTH_SHARE))
    rounded = planned_for("Llama-3.1-8B", exact="rounding", max_step_tokens=2048)
    operations = 2 * 2048 * (parameters - embeddings) + 4 * 2048 * 1024 * 32 * 4096
    assert rounded.prefill_ms[2048] == pytest.approx(1e3 * operations / (card.half_flops * FLOPS_SHARE))
    assert rounded.prefill_ms[2048] < found.prefill_ms[2048] < found.prefill_ms[8192] / 4
    assert set(planned_for("OLMo-2-13B").prefill_ms) == {2048}  # its context is 4,096 tokens
    routed = outline(served_config(str(CONFIGS / "Qwen3-30B-A3B")))
    roof = Roofline(card, routed, torch.bfloat16, 98304, 2 * routed.parameters)
    assert routed.expert_share == 8 / 128 and roof.forward_s(1, 0) < 0.12 * roof.forward_s(1000, 0)


def test_a_card_is_found_however_it_is_written() -> None:
    assert [find_card(name).name for name in ("a100-80", "RTX4090", "rtx 4090", "L40s")] == ["A100-80", *["RTX 4090"] * 2, "L40S"]
    with pytest.raises(ValueError, match="A100-80, A100-40, H100, H200, L40S, L4, A10, RTX 4090"):
        find_card("A100")
    for card in CARDS.values():
        assert 0.9 * card.sheet_gb < card.memory_gib < card.sheet_gb and card.sources


@pytest.mark.slow
def test_the_document_says_what_the_plans_say() -> None:
    """``python -m experiments.gpu_suite.plan_table`` prints it."""
    text = (Path(__file__).resolve().parents[4] / "docs" / "gpu.md").read_text(encoding="utf-8")
    _, _, behind = text.partition("<!-- table: plan -->\n")
    assert behind.partition("<!-- end -->")[0].strip() == table()
