"""The engine's GPU path on the double of a GPU, and what the double finds: each test makes one mistake that a GPU punishes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import DraftTree
from outrider.engine.accelerator import accelerator, use
from outrider.engine.cuda.slot_attention import SPLIT, graph_fault
from outrider.engine.cuda.static_runner import StaticRunner
from outrider.engine.engine import Engine
from outrider.engine.errors import DeviceError, ModelLoadError
from outrider.engine.forward import exactness
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.attention_parts import usable
from outrider.engine.forward.batch import DummySequence, ScheduledDummy, pack
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.runners import make_runner
from outrider.engine.loading.model_tables import bigram_rows
from outrider.engine.measures.latency import cases, rough_timings
from outrider.experiments.device_double.attention import attend_slots
from outrider.experiments.device_double.gpu import DoubleError, DoubleGpu
from outrider.experiments.device_double.guard import unavailable
from outrider.experiments.device_double.loading import loading
from tests.helpers.models import (
    FAMILIES,
    MAX_DRAFT,
    VOCAB,
    TinyTarget,
    engine_over,
    llama_config,
    nearly,
    run,
    save_model,
)
from tests.helpers.ranks import BranchingDrafter

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
CONTEXT = 1024
COUNTS = Path(__file__).with_name("gpu_counts.json")


@pytest.fixture
def gpu() -> Iterator[DoubleGpu]:
    """A double with two GPUs, on which the engine of the test runs."""
    double = DoubleGpu()
    with use(double):
        yield double


def model_on(gpu: DoubleGpu, device: torch.device = GPU, family: str = "llama", layers: int = 2) -> Any:
    config = deepcopy(FAMILIES[family])
    config.max_position_embeddings, config.num_hidden_layers = CONTEXT, layers
    torch.manual_seed(9)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=TREE_ATTENTION)
    return gpu.move(model.eval(), device)


def runner_on(gpu: DoubleGpu, device: torch.device = GPU, exact: str = "strict", running: int = 4, **model: Any) -> StaticRunner:
    options = EngineOptions(max_running=running, kv_slots=running, exact=exact)  # type: ignore[arg-type]
    runner = make_runner(model_on(gpu, device, **model), CONTEXT + MAX_DRAFT, options, 1 + MAX_DRAFT)
    assert isinstance(runner, StaticRunner) and not runner.capture_failures
    return runner


def chain(slot: int, start: int, tokens: list[int]) -> ScheduledDummy:
    """Some tokens of a text, the first of them below ``start`` zeros."""
    text = np.array([*[0] * start, tokens[0]], np.int32)
    return ScheduledDummy(DummySequence(slot, text), start, start + 1, DraftTree.chain(tokens[0], tokens[1:]))


def numbers(logits: torch.Tensor) -> torch.Tensor:
    return logits.cpu().clone()


# ---- starts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", ["strict", "rounding"])
def test_a_model_of_several_layers_starts_with_graphs(exact: str, gpu: DoubleGpu) -> None:
    """A check that shortens the model must not replay a graph of all layers."""
    runner = runner_on(gpu, exact=exact, layers=4)
    assert runner.exact == (exact == "strict")
    assert runner.calibration_key()["graphs"] == ([64] if exact == "strict" else list(runner.sizes))
    made = len(gpu.graphs)
    run(engine_of(runner), Request("a", list(range(1, 200)), SamplingParams(max_tokens=30)))
    assert len(gpu.graphs) == made and gpu.counts["replays"] > 0  # nothing is captured while requests run


@pytest.mark.parametrize("capacity", [20, 70, 320, 532, 539])
def test_slots_of_any_length_pass_the_check(capacity: int, gpu: DoubleGpu) -> None:
    options = EngineOptions(max_running=1, kv_slots=2)
    assert make_runner(model_on(gpu), capacity, options, 8).exact


def test_a_graph_of_all_layers_does_not_compute_the_first_ones(gpu: DoubleGpu) -> None:
    runner = runner_on(gpu, layers=4)
    batch = pack([chain(0, 0, [1, 2, 3])])
    whole = numbers(runner.forward(batch))
    with exactness.first_layers(runner.model):
        replayed = numbers(runner.forward(batch))
        with runner.uncaptured():
            first = numbers(runner.forward(batch))
    assert torch.equal(replayed, whole) and not torch.allclose(first, whole, atol=1e-3)


def test_a_graph_that_computes_something_else_is_refused(gpu: DoubleGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = StaticRunner.prepare

    def captured_with_other_weights(runner: StaticRunner) -> None:
        weight = runner.model.lm_head.weight
        runner.model.lm_head.weight = torch.nn.Parameter(weight.data * 2 + 1, requires_grad=False)
        prepare(runner)
        runner.model.lm_head.weight = weight

    monkeypatch.setattr(StaticRunner, "prepare", captured_with_other_weights)
    with pytest.raises(ModelLoadError, match="graph of 64 rows"):
        runner_on(gpu)


@pytest.mark.parametrize("border", [SPLIT, 2 * SPLIT])
def test_kernels_that_round_otherwise_behind_a_split_are_found(
    border: int, gpu: DoubleGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's bits depend there on where the tree begins: a check of fewer tokens would not see it."""

    def attend(*arguments: Any) -> None:
        attend_slots(*arguments)
        output, start, position = arguments[6], arguments[8], arguments[9]
        off = (position >= border) & (start % 2 == 1)
        output[0, off] *= 1 + 1e-3

    monkeypatch.setattr("outrider.experiments.device_double.gpu.attend_slots", attend)
    with pytest.raises(ModelLoadError, match="changed with the other rows of the batch"):
        runner_on(gpu)


def test_a_model_that_waits_for_the_device_runs_without_graphs_and_says_so(
    gpu: DoubleGpu, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_on(gpu, family="mixtral")
    model.set_experts_implementation("eager")  # which asks for each expert who goes to it
    with gpu.current(GPU):
        runner = StaticRunner(model, 2, 100, sizes=(2, 8))
        runner.prepare()
    assert set(runner.capture_failures) == {2, 8} and runner.calibration_key()["graphs"] == []
    assert numbers(runner.forward(pack([chain(0, 0, [1, 2, 3])]))).isfinite().all()
    assert [record.levelname for record in caplog.records if "could not be captured" in record.getMessage()] == ["WARNING"]


def test_inexact_models_are_refused_unless_they_may_round(
    gpu: DoubleGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = EngineOptions(max_running=2, kv_slots=2)
    with pytest.raises(ModelLoadError, match=r"MixtralForCausalLM .* routing.*engine\.exact=rounding"):
        make_runner(model_on(gpu, family="mixtral"), CONTEXT, options)
    with monkeypatch.context() as patch:
        patch.setattr(exactness, "check", lambda runner, _: None if runner.fixed_rows == 1 else "3 of 4 rows differ")
        with pytest.raises(ModelLoadError, match=r"engine\.exact=rounding"):
            runner_on(gpu)
    gpu.has_kernels = lambda dtype: False  # type: ignore[method-assign]
    model = model_on(gpu)
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM .* Triton.*engine\.exact=rounding"):
        make_runner(model, CONTEXT, options)
    runner = make_runner(model, CONTEXT, EngineOptions(max_running=2, kv_slots=2, exact="rounding"))
    assert type(runner) is ModelRunner and "without CUDA graphs" in caplog.text


def test_the_second_gpu_is_used_while_the_first_is_current(gpu: DoubleGpu) -> None:
    first, second = runner_on(gpu), runner_on(gpu, OTHER)
    prompt, params = list(range(1, 90)), SamplingParams(max_tokens=20, ignore_eos=True)
    expected = run(engine_of(first), Request("a", prompt, params))
    with gpu.current(GPU):
        assert run(engine_of(second), Request("a", prompt, params)) == expected
        with pytest.raises(DoubleError, match="another device"):  # a launch outside of ``current`` would not pass
            second._steps[64, True]._forward()


def test_the_probe_of_a_gpu_captures_its_attention(gpu: DoubleGpu) -> None:
    assert graph_fault(GPU) is None and graph_fault(OTHER) is None and gpu.counts["replays"] == 2
    gpu.fail_at(4, torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert "illegal memory access" in str(graph_fault(GPU))


def test_an_engine_loads_with_the_defaults_on_the_second_gpu(gpu: DoubleGpu, tmp_path: Path) -> None:
    folder = str(save_model(tmp_path, llama_config(max_position_embeddings=CONTEXT)))
    answers = []
    for device, options in (("cuda:1", EngineOptions(max_running=2)), ("cuda", EngineOptions(max_running=4, max_step_tokens=64))):
        with loading():
            engine = Engine.load(ModelOptions(folder, device=device), options, SpeculationOptions())
        assert engine.info.exact and engine.info.device == ("cuda:1" if device == "cuda:1" else "cuda:0")
        answers.append(run(engine, Request("a", list(range(1, 99)), SamplingParams(max_tokens=30, ignore_eos=True))))
        assert engine._scheduler._max_draft_rows == 63  # with the root, one forward
    assert answers[0] == answers[1] and gpu.counts["replays"] > 100


def test_the_stairs_of_a_gpu_s_steps_are_timed(gpu: DoubleGpu) -> None:
    strict, rounding = runner_on(gpu), runner_on(gpu, exact="rounding")
    for runner, stairs in ((strict, (64, 65, 128, 129, 192, 193)), (rounding, (128, 129))):
        rows = {case.rows for case in cases(4, runner.cache.capacity, CONTEXT, runner.full_rows)}
        assert rows >= set(stairs)
    with gpu.current(GPU):
        assert {64, 65} <= {case.rows for case in rough_timings(strict, CONTEXT).seconds}


def test_a_bigram_table_is_computed_in_whole_forwards(gpu: DoubleGpu) -> None:
    runner = runner_on(gpu)
    for most, forwards in ((64, -(-VOCAB // 63)), (128, -(-VOCAB // 127) * 2)):
        table = np.empty((VOCAB, 4), np.int32)
        assert gpu.counted(lambda: list(bigram_rows(runner, table, 0, most)))["replays"] <= forwards  # noqa: B023


def test_a_flash_attn_without_code_for_the_gpu_is_left_out(gpu: DoubleGpu, caplog: pytest.LogCaptureFixture) -> None:
    def without_code(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    def with_code(*_: Any, **__: Any) -> Any:
        return None

    with gpu.current(GPU):
        assert usable(with_code, GPU) is with_code and not caplog.records
        assert usable(without_code, GPU) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "sm_80" in record.getMessage()


# ---- mistakes that the double has to find -----------------------------------------------------------------------------------


def test_a_capture_keeps_numbers_shapes_and_addresses(gpu: DoubleGpu) -> None:
    factor, rows = [1], [2]
    with gpu.current(GPU):
        there = torch.ones(4).to(GPU)
        graph, output = gpu.capture(GPU, None, lambda: there * factor[0])
        factor[0] = 5
        graph.replay()
        assert output.tolist() == [1.0] * 4
        places = torch.arange(4, device=GPU)
        graph, output = gpu.capture(GPU, None, lambda: places[: rows[0]].sum())
        rows[0] = 4
        graph.replay()
        assert output.item() == 1
        graph, output = gpu.capture(GPU, None, lambda: there + 1)
        anew = there + 1
        there.fill_(7)
        graph.replay()  # writes to its own output
        assert output.tolist() == [8.0] * 4 and anew.tolist() == [2.0] * 4
        there = torch.zeros(3, device=GPU)
        graph, output = gpu.capture(GPU, None, lambda: there.add_(1) * 2)
        assert output.isnan().all().item() and there.tolist() == [0.0] * 3  # nothing was computed
        graph.replay()
        assert output.tolist() == [2.0] * 3


def test_a_step_that_is_larger_than_its_graph_is_refused(gpu: DoubleGpu) -> None:
    runner = runner_on(gpu, exact="rounding")
    with gpu.current(GPU), pytest.raises(AssertionError):
        runner._steps[8, True].run(pack([chain(0, 0, list(range(9)))]))


def forwards_ahead(runner: StaticRunner) -> list[torch.Tensor]:
    """Logits behind a prompt whose parts are launched without waiting for any."""
    text = np.random.default_rng(1).integers(1, VOCAB, 700).astype(np.int32)
    works = (
        [ScheduledDummy(DummySequence(0, text), 0, 699, None)],
        [ScheduledDummy(DummySequence(0, text), 699, 700, DraftTree.chain(int(text[-1]), []))],
    )
    return [numbers(runner.forward(pack(work))) for work in works][1:]


def test_a_buffer_that_is_filled_before_its_copy_shows(gpu: DoubleGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = forwards_ahead(runner_on(gpu))
    assert all(map(torch.equal, forwards_ahead(runner_on(gpu)), expected))
    runner = runner_on(gpu)
    for step in runner._steps.values():  # as if nobody had recorded the copies
        monkeypatch.setattr(step.buffers, "_copied", Forgetful(step.buffers._copied))
    assert not all(map(torch.equal, forwards_ahead(runner), expected))


class Forgetful(list[Any]):
    """Keeps no event."""

    def __setitem__(self, at: Any, event: Any) -> None: ...


def test_other_streams_hosts_and_devices_in_a_step_show(gpu: DoubleGpu) -> None:
    stream = gpu.new_stream(GPU)
    with gpu.current(GPU):
        there = torch.zeros(3, device=GPU)
        stream.wait_stream(gpu.current_stream(GPU))
        with gpu.stream(stream):
            there += 1
        with pytest.raises(DoubleError, match="another stream"):
            there * 2
        gpu.current_stream(GPU).wait_stream(stream)
        assert (there * 2).tolist() == [2.0] * 3
        with pytest.raises(DoubleError, match="one of the CPU"):
            there + torch.ones(3)
        assert (there + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number travels with the launch
        with pytest.raises(DoubleError, match="several devices"):
            there + torch.zeros(3, device=OTHER)
        assert gpu.counted(lambda: torch.zeros(3, device=GPU) + 1) == Counter({"launches": 2, "calls": 2})
    with gpu.current(OTHER):
        elsewhere = torch.zeros(3, device=OTHER)
        with pytest.raises(DoubleError, match="empty"):  # a capture on another device
            gpu.capture(GPU, None, lambda: elsewhere + 1)
    with pytest.raises(RuntimeError):  # a call that the double does not see
        there.numpy()
    assert there.data_ptr() == 0
    with pytest.raises(NotImplementedError):
        torch.zeros(3, device=GPU)  # no device is current in this thread


@pytest.mark.parametrize(
    "wait",
    [
        lambda there: there.sum().item(), lambda there: there.tolist(), lambda there: there.nonzero(),
        lambda there: bool(there[0]), lambda there: torch.equal(there, there), lambda there: there.cpu(),
        lambda there: there[there > 0], lambda there: there[torch.tensor([0, 1])], lambda there: torch.ones(3).to(GPU),
        lambda there: torch.tensor(1.0, device=GPU),
        lambda there: accelerator().synchronize(GPU),
    ],
)  # fmt: skip
def test_every_wait_is_counted_and_breaks_a_capture(wait: Any, gpu: DoubleGpu) -> None:
    with gpu.current(GPU):
        there = torch.zeros(3, device=GPU)
        assert gpu.counted(lambda: wait(there))["waits"] >= 1

        def forward() -> torch.Tensor:
            wait(there + 1)
            return there

        with pytest.raises(RuntimeError, match="capturing"):
            gpu.capture(GPU, None, forward)


# ---- faults -----------------------------------------------------------------------------------------------------------------


def engine_of(runner: ModelRunner, strategy: str = "autoregressive", batch: int = 4) -> Any:
    drafter = build_drafter(strategy, {})
    drafter.prepare(TinyTarget(runner))
    return engine_over(runner, drafter, batch, 512, strategy, context=CONTEXT)


def asked(answers: list[list[int]] | None = None) -> list[Request]:
    prompts = [list(range(1, 70)), [5, 6, 7] * 5, [9]]
    drawn = {"temperature": 0.8, "seed": 4}
    return [
        Request(str(at), prompt, SamplingParams(max_tokens=12, ignore_eos=True, **(drawn if at == 1 else {})),  # type: ignore[arg-type]
                [nearly(answer) for answer in (answers or [])[at : at + 1]])
        for at, prompt in enumerate(prompts)
    ]  # fmt: skip


def begun(runner: ModelRunner, plain: list[list[int]], steps: int) -> tuple[Any, list[Request]]:
    """An engine after some steps of the requests, with right drafts."""
    engine, wanted = engine_of(runner, "llma"), asked(plain)
    for request in wanted:
        engine.add(request)
    for _ in range(steps):
        engine.step()
    return engine, wanted


def test_a_device_that_fails_at_any_operation_of_a_step_ends_the_engine_and_no_request(gpu: DoubleGpu) -> None:
    """Wherever the error comes up, it is the device's: no request ends with it, and each goes on elsewhere from its tokens."""
    plain = run(engine_of(runner_on(gpu)), *asked())
    runner, spare = runner_on(gpu), runner_on(gpu, OTHER)
    engine, wanted = begun(runner, plain, 2)
    before = [request.output_ids.tolist() for request in wanted]
    calls = gpu.counted(engine.step)["calls"]
    assert calls > 6
    for call in range(1, calls + 1):
        engine, wanted = begun(runner, plain, 2)
        assert [request.output_ids.tolist() for request in wanted] == before
        gpu.fail_at(call, torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
        with pytest.raises(DeviceError, match="illegal memory access"):
            engine.step()
        assert all(request.finish_reason is None for request in wanted), call
        gpu.broken = None  # the other GPU is another process's
        if call in (1, calls):
            again = [Request(one.request_id, one.prompt_ids, one.params, emitted=one.output_ids.tolist()) for one in wanted]
            assert run(engine_of(spare), *again) == plain


def test_a_step_that_runs_out_of_memory_is_tried_again(gpu: DoubleGpu) -> None:
    runner = runner_on(gpu)
    plain = run(engine_of(runner), *asked())
    engine, wanted = begun(runner, plain, 1)
    for _ in range(3):
        gpu.fail_at(2, torch.OutOfMemoryError("CUDA out of memory"))
        engine.step()
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert [request.output_ids.tolist() for request in wanted] == plain


# ---- counts -----------------------------------------------------------------------------------------------------------------


KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 1}, "greedy, drafted": {}}


def counts_of(gpu: DoubleGpu, requests: int, kind: str) -> dict[str, int]:
    """Calls of the device in one step; where tokens are drafted, each request has some accepted."""
    runner, params = runner_on(gpu, running=requests), SamplingParams(max_tokens=24, ignore_eos=True, **KINDS[kind])
    prompts = [[1 + number % 300, 2, 3] for number in range(requests)]
    answers = run(engine_of(runner, batch=requests), *(Request(str(at), each, params) for at, each in enumerate(prompts)))
    drafted = kind == "greedy, drafted"
    drafter = BranchingDrafter({str(at): answer for at, answer in enumerate(answers)}, branches=3)
    engine = engine_over(runner, drafter, requests, 512, context=CONTEXT) if drafted else engine_of(runner, batch=requests)
    wanted = [Request(str(at), each, params) for at, each in enumerate(prompts)]
    for request in wanted:
        engine.add(request)
    for _ in range(3):
        engine.step()
    before = [request.num_output for request in wanted]
    counts = gpu.counted(engine.step)
    several = [request.num_output - old > 1 for request, old in zip(wanted, before, strict=True)]
    assert any(several) == drafted, several
    return {name: counts[name] for name in ("waits", "to_device", "to_host", "launches", "replays")}


@pytest.mark.parametrize("requests", [1, 8, pytest.param(64, marks=pytest.mark.proof)])
def test_waits_copies_and_launches_of_a_step(gpu: DoubleGpu, requests: int) -> None:
    """The table is to fall: a change that makes a step wait more often, or launch more, has to say so here."""
    found = {f"{requests} {kind}": counts_of(gpu, requests, kind) for kind in KINDS}
    table = json.loads(COUNTS.read_text(encoding="utf-8"))
    assert found == {name: table[name] for name in found}, json.dumps(found)
