"""Plans of models of real size on cards that are not here, beside what a start and the engine's allocations come to."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.engine.accelerator import accelerator, use
from outrider.engine.cuda import static_runner
from outrider.engine.cuda.static_runner import ROWS, StaticRunner, step_kinds
from outrider.engine.engine import runner_over
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.runners import make_runner
from outrider.engine.loading import slot_memory
from outrider.engine.loading.cards import CARDS, find_card, planned
from outrider.engine.loading.model import LoadedModel, served_config
from outrider.engine.loading.outline import Outline, outline
from outrider.engine.loading.plan import BANDWIDTH_SHARE, FLOPS_SHARE, Plan, Roofline, plan
from outrider.engine.loading.slot_memory import STRICT_ROWS, reserved
from outrider.experiments.device_double.guard import unavailable
from outrider.experiments.device_double.meta import MetaGpu
from outrider.experiments.gpu_suite.plan_table import CONFIGS, LARGE, ROUNDED, SERVED, table

GPU = torch.device("cuda", 0)
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
    assert "parallelism.mode=tensor" in refusal("Llama-3.3-70B")
    assert "parallelism.mode=tensor" in refusal("Mixtral-8x7B")
    found = planned_for("Qwen2.5-32B").footprint
    assert found.kv_slots == found.max_running == 8 and found.slots_that_fit == 8
    fewer, shorter = re.findall(r"engine\.max_running=(\d+) or model\.max_model_len=(\d+)", refusal("Llama-3.1-8B", "L4"))[0]
    assert planned_for("Llama-3.1-8B", "L4", max_running=int(fewer)).footprint.fits
    refusal("Llama-3.1-8B", "L4", max_running=int(fewer) + 1)
    length = ModelOptions(str(CONFIGS / "Llama-3.1-8B"), max_model_len=int(shorter))
    assert plan(length, EngineOptions(), SpeculationOptions(), ParallelismOptions(), CARDS["L4"]).footprint.fits
    with pytest.raises(ModelLoadError, match=r"parallelism\.mode"):
        plan(length, EngineOptions(), SpeculationOptions(), ParallelismOptions("tensor", 2), CARDS["L4"])


@pytest.mark.parametrize("model", ALL)
def test_a_configuration_has_the_published_number_of_parameters(model: str) -> None:
    config = served_config(str(CONFIGS / model))
    assert "huggingface.co" in config._source
    assert outline(config).parameters == getattr(config, "_parameters", outline(config).parameters)


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
def test_what_stays_on_a_gpu_without_numbers_is_counted_once() -> None:
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


def started(model: str, reached: dict[str, int], card: str = "A100-80") -> None:
    """Start over a model without weights, up to where its runner is made."""

    def make(model: Any, capacity: int, options: EngineOptions, *_: Any) -> Any:
        reached["capacity"], reached["slots"] = capacity, options.kv_slots or 0
        return SimpleNamespace(grammars=None, adapt=lambda adapters: None)

    config = served_config(str(CONFIGS / model))
    stub: Any = SimpleNamespace(config=config, dtype=torch.bfloat16, device=GPU)
    taken = outline(config).parameters * 2
    loaded = LoadedModel(stub, None, "m", config.max_position_embeddings, (), may_shorten=True)  # type: ignore[arg-type]
    with planned(CARDS[card]):
        whole, free = accelerator().memory(GPU)[1], CARDS[card].memory_bytes - taken

        class Taken(type(accelerator())):  # type: ignore[misc]
            def memory(self, device: torch.device) -> tuple[int, int]:
                return free, whole

            def reserved(self, device: torch.device) -> int:
                return taken

        with use(Taken(CARDS[card])):
            runner_over(loaded, EngineOptions(), SpeculationOptions(), 1, make)


def test_slots_of_a_plan_and_of_a_start_come_from_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> tuple[int, int]:
        reached: dict[str, int] = {}
        started("Llama-3.1-8B", reached)
        found = planned_for("Llama-3.1-8B").footprint
        assert (found.max_model_len + found.draft_rows, found.kv_slots) == (reached["capacity"], reached["slots"])
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


def test_the_document_says_what_the_plans_say() -> None:
    """``python -m experiments.gpu_suite.plan_table`` prints it."""
    text = (Path(__file__).resolve().parents[4] / "docs" / "gpu.md").read_text(encoding="utf-8")
    _, _, behind = text.partition("<!-- table: plan -->\n")
    assert behind.partition("<!-- end -->")[0].strip() == table()
