"""Errors of the device in a step: which of them it survives, and steps that run out of its memory."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import FinishReason, Request, SamplingParams
from outrider.engine.accelerator import Cuda, device_error, is_out_of_memory, use
from outrider.engine.engine import Engine
from outrider.engine.errors import DEVICE_FAULTS, DeviceError
from outrider.engine.executor import VerifyResult
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.scheduling.scheduler import RECOVERY_STEPS

GPU, CPU = torch.device("cuda:1"), torch.device("cpu")
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


class Asked(Cuda):
    """A GPU that says whether it failed, in a test without one."""

    def __init__(self, failure: str | None) -> None:
        self.failure, self.asked = failure, list[torch.device]()

    def current(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def synchronize(self, device: torch.device) -> None:
        self.asked.append(device)
        if self.failure is not None:
            raise torch.AcceleratorError(self.failure)


@pytest.mark.parametrize(
    ("error", "failure", "kind"),
    [
        (torch.AcceleratorError(ILLEGAL), ILLEGAL, "illegal_memory_access"),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), ILLEGAL, "uncorrectable_ecc"),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), "again", "launch_failure"),
        (RuntimeError("Triton Error [CUDA]: device-side assert"), "CUDA error: device-side assert triggered", "device_assert"),
        (torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), "again", "device_lost"),
        (IndexError("index out of range"), "CUDA error: something new", "other"),
        (torch.AcceleratorError("CUDA error: invalid argument"), None, None),
        (IndexError("index out of range"), None, None),
    ],
)
def test_a_device_has_failed_where_waiting_for_it_fails_as_well(error: Exception, failure: str | None, kind: str | None) -> None:
    double = Asked(failure)
    with use(double):
        found = device_error(error, GPU)
    assert double.asked == [GPU]
    assert (None if found is None else found.kind) == kind
    if found is not None:
        assert found.kind in DEVICE_FAULTS and "\n" not in str(found)
        again = pickle.loads(pickle.dumps(found))
        assert (again.reason, again.kind, str(again)) == (found.reason, found.kind, str(found))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x")],
)
def test_a_device_goes_on_when_it_lacked_memory(error: Exception) -> None:
    double = Asked(ILLEGAL)
    with use(double):
        assert is_out_of_memory(error) and device_error(error, GPU) is None
    assert not double.asked


def test_on_a_cpu_no_device_is_asked() -> None:
    double = Asked(ILLEGAL)
    with use(double):
        assert device_error(RuntimeError("wrong shape"), CPU) is None
        lost = device_error(torch.AcceleratorError(ILLEGAL), CPU)
    assert lost is not None and lost.kind == "illegal_memory_access" and not double.asked
    assert device_error(lost, CPU) is lost


# ---- steps of an engine -------------------------------------------------------------------------------------------------------

Execute = Callable[[Sequence[ScheduledRequest], int], list[VerifyResult | None]]


def rows_of(works: Sequence[ScheduledRequest]) -> int:
    return sum(work.end - work.start + (0 if work.tree is None else len(work.tree.tokens) - 1) for work in works)


def load(folder: str, **options: Any) -> Engine:
    options = {"max_running": 4, "max_step_tokens": 64} | options
    return Engine.load(ModelOptions(folder, dtype="float32", threads=1), EngineOptions(**options), SpeculationOptions("llma"))


def break_steps(engine: Engine, fails: Callable[[Sequence[ScheduledRequest]], Exception | None], late: bool = False) -> list[int]:
    """Has the executor raise what ``fails`` says, before a step is computed or behind it; returns the rows of such steps."""
    execute: Execute = engine._executor.execute
    failed: list[int] = []

    def guarded(works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        error = fails(works)
        if late or error is None:
            outcomes = execute(works, top_k)
        if error is not None:
            failed.append(rows_of(works))
            raise error
        return outcomes

    engine._executor.execute = guarded  # type: ignore[method-assign]
    return failed


def requests() -> list[Request]:
    """Greedy and sampled ones, with prompts of several steps, and rules that look back on the output."""
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=5),
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=6, frequency_penalty=0.5),
        SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2, repetition_penalty=1.2),
    ]
    prompts = [[5 + at, *range(20, 20 + 30 * (at % 3)), 6, 7] for at in range(8)]
    return [
        Request(str(at), prompt, params[at % 4], tenant="a" if at % 2 else None, prompt_logprobs=1 if at == 6 else None)
        for at, prompt in enumerate(prompts)
    ]


def run(engine: Engine, *asked: Request) -> None:
    for request in asked:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine._scheduler.check_integrity()


def told(asked: Sequence[Request]) -> list[tuple[list[int], FinishReason | None, list[int]]]:
    return [(each.output_ids.tolist(), each.finish_reason, [one.token_id for one in each.prompt_scores]) for each in asked]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("room", [2, 7, 40])
def test_steps_that_run_out_of_memory_are_computed_in_smaller_ones(folder: str, room: int, late: bool) -> None:
    expected = requests()
    run(load(folder), *expected)
    engine, asked = load(folder), requests()
    failed = break_steps(engine, lambda works: torch.OutOfMemoryError() if rows_of(works) > room else None, late)
    run(engine, *asked)
    assert told(asked) == told(expected)
    assert failed and engine.metrics().out_of_memory_steps == len(failed)
    assert engine.metrics().finished["error"] == 0
    engine.check_integrity()


def test_memory_that_no_tensor_uses_is_given_back_before_the_next_step(folder: str) -> None:
    class Cached(Cuda):
        emptied = 0

        def empty_cache(self) -> None:
            self.emptied += 1

    engine, double = load(folder), Cached()
    failed = break_steps(engine, lambda works: torch.OutOfMemoryError() if len(works) > 2 else None)
    with use(double):
        run(engine, *requests())
    assert double.emptied == len(failed) > 0


def test_a_request_that_does_not_fit_alone_ends_with_an_error(folder: str) -> None:
    expected = requests()
    run(load(folder), *expected)
    engine, asked = load(folder), requests()
    break_steps(engine, lambda works: torch.OutOfMemoryError() if any(one.request.request_id == "3" for one in works) else None)
    run(engine, *asked)
    assert asked[3].finish_reason is FinishReason.ERROR
    del asked[3], expected[3]
    assert told(asked) == told(expected)
    assert engine.metrics().finished["error"] == 1


def test_more_requests_run_again_when_steps_went_well(folder: str) -> None:
    engine = load(folder)
    break_steps(engine, lambda works: torch.OutOfMemoryError() if len(works) > 1 and not engine.metrics().steps else None)
    for name in "abcd":
        engine.add(Request(name, [5, 6, 7], SamplingParams(max_tokens=240, ignore_eos=True, temperature=1.0, seed=3)))
    running = []
    while engine.has_work:
        engine.step()
        running.append(engine.counts().running)
    assert max(running[5:RECOVERY_STEPS]) == 1 < max(running[RECOVERY_STEPS:])


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_device_is_an_error_of_the_step(folder: str, late: bool) -> None:
    engine = load(folder)
    break_steps(engine, lambda works: torch.AcceleratorError(ILLEGAL), late)
    engine.add(requests()[0])
    with pytest.raises(DeviceError) as raised:
        engine.step()
    assert raised.value.kind == "illegal_memory_access"


@pytest.mark.parametrize("place", ["verify", "observe"])
def test_a_failed_device_is_no_fault_of_the_request_whose_tree_is_walked(
    folder: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, (asked, *_) = load(folder), requests()

    def fails(*_: object) -> None:
        raise torch.AcceleratorError(ILLEGAL)

    target = engine._executor._verifier if place == "verify" else engine._drafter  # type: ignore[attr-defined]
    monkeypatch.setattr(target, place, fails)
    with pytest.raises(DeviceError):
        run(engine, asked)
    assert asked.fault is None and asked.finish_reason is None


def test_memory_that_lacks_for_a_walk_lacks_for_the_step(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = requests()
    run(load(folder), *expected)
    engine, asked = load(folder), requests()
    verifier: Any = engine._executor._verifier  # type: ignore[attr-defined]
    verify, calls = verifier.verify, 0

    def rarely_fails(*arguments: Any) -> VerifyResult:
        nonlocal calls
        calls += 1
        if calls in (3, 20, 50):
            raise torch.OutOfMemoryError
        outcome: VerifyResult = verify(*arguments)
        return outcome

    monkeypatch.setattr(verifier, "verify", rarely_fails)
    run(engine, *asked)
    assert told(asked) == told(expected) and engine.metrics().out_of_memory_steps == 3
