"""Device faults in a step, and each request's own strategy and draft bound."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.drafters.by_request import ByRequest
from outrider.decoding.drafters.registry import build_drafter, build_drafters
from outrider.decoding.request import PLAIN, FinishReason, Request, SamplingParams
from outrider.decoding.tree import Acceptance, DraftTree
from outrider.engine.accelerator import Cuda, device_error, is_out_of_memory, use
from outrider.engine.engine import Engine
from outrider.engine.errors import DEVICE_FAULTS, DeviceError, RequestError
from outrider.engine.executor import VerifyResult
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.scheduling.scheduler import RECOVERY_STEPS
from tests.helpers.models import MAX_DRAFT, engine_over, prepared, run, tiny_model

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


def mixed_requests() -> list[Request]:
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


def run_steps(engine: Engine, *asked: Request) -> None:
    for request in asked:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine._scheduler.check_integrity()


def told(asked: Sequence[Request]) -> list[tuple[list[int], FinishReason | None, list[int]]]:
    return [(each.output_ids.tolist(), each.finish_reason, [one.token_id for one in each.prompt_scores]) for each in asked]


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("room", [2, 7, 40])
def test_steps_that_run_out_of_memory_are_computed_in_smaller_ones(folder: str, room: int, late: bool) -> None:
    expected = mixed_requests()
    run_steps(load(folder), *expected)
    engine, asked = load(folder), mixed_requests()
    failed = break_steps(engine, lambda works: torch.OutOfMemoryError() if rows_of(works) > room else None, late)
    run_steps(engine, *asked)
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
        run_steps(engine, *mixed_requests())
    assert double.emptied == len(failed) > 0


def test_a_request_that_does_not_fit_alone_ends_with_an_error(folder: str) -> None:
    expected = mixed_requests()
    run_steps(load(folder), *expected)
    engine, asked = load(folder), mixed_requests()
    break_steps(engine, lambda works: torch.OutOfMemoryError() if any(one.request.request_id == "3" for one in works) else None)
    run_steps(engine, *asked)
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
    engine.add(mixed_requests()[0])
    with pytest.raises(DeviceError) as raised:
        engine.step()
    assert raised.value.kind == "illegal_memory_access"


@pytest.mark.parametrize("place", ["verify", "observe"])
def test_a_failed_device_is_no_fault_of_the_request_whose_tree_is_walked(
    folder: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, (asked, *_) = load(folder), mixed_requests()

    def fails(*_: object) -> None:
        raise torch.AcceleratorError(ILLEGAL)

    target = engine._executor._verifier if place == "verify" else engine._drafter  # type: ignore[attr-defined]
    monkeypatch.setattr(target, place, fails)
    with pytest.raises(DeviceError):
        run_steps(engine, asked)
    assert asked.fault is None and asked.finish_reason is None


def test_memory_that_lacks_for_a_walk_lacks_for_the_step(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mixed_requests()
    run_steps(load(folder), *expected)
    engine, asked = load(folder), mixed_requests()
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
    run_steps(engine, *asked)
    assert told(asked) == told(expected) and engine.metrics().out_of_memory_steps == 3


MOTIF = [4, 9, 17, 23, 5]
PROMPT = [*MOTIF, *MOTIF, *MOTIF[:2]]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


class Recorder(Drafter):
    """Fills every budget, and remembers of which requests it heard."""

    def __init__(self) -> None:
        self.budgets: dict[str, set[int]] = {}
        self.observed, self.finished = set[str](), list[str]()

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        for request, budget in zip(requests, budgets, strict=True):
            self.budgets.setdefault(request.request_id, set()).add(budget)
        return [DraftTree.chain(one.root, [1] * budget) for one, budget in zip(requests, budgets, strict=True)]

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        self.observed.add(request.request_id)

    def finish(self, request: Request) -> None:
        self.finished.append(request.request_id)


def request(name: str, strategy: str | None = None, most: int | None = None, tenant: str | None = "t") -> Request:
    return Request(name, PROMPT, PARAMS, [PROMPT], tenant=tenant, strategy=strategy, max_draft_tokens=most)


def test_the_bound_is_the_requests_within_the_engines() -> None:
    drafter = Recorder()
    engine = engine_over(tiny_model("llama", "float32").runner, drafter)
    bounds = {"none": None, "three": 3, "one": 1, "much": 10**12}
    outputs = run(engine, *(request(name, most=most) for name, most in bounds.items()))
    assert all(output == outputs[0] and len(output) == PARAMS.max_tokens for output in outputs)
    assert {name: max(budgets) for name, budgets in drafter.budgets.items()} == {
        "none": MAX_DRAFT, "three": 3, "one": 1, "much": MAX_DRAFT,
    }  # fmt: skip
    assert drafter.observed == set(bounds) and sorted(drafter.finished) == sorted(bounds)


def test_no_drafter_hears_of_plain_requests() -> None:
    drafter = Recorder()
    engine = engine_over(tiny_model("llama", "float32").runner, drafter)
    one, two, drafted = request("strategy", PLAIN), request("bound", most=0), request("drafted", "test")
    outputs = run(engine, one, two, drafted)
    assert outputs[0] == outputs[1] == outputs[2]
    assert (one.stats.drafted, one.stats.steps, two.stats.drafted, two.stats.steps) == (0, PARAMS.max_tokens) * 2
    assert set(drafter.budgets) == drafter.observed == {"drafted"} and drafter.finished == ["drafted"]
    assert not engine.keeps_output(one) and not engine.keeps_output(two)


@pytest.mark.parametrize("several", [False, True])
def test_plain_requests_neither_teach_nor_are_taught(several: bool) -> None:
    model = tiny_model("llama", "float32")
    drafter = prepared(build_drafters("auto", {"all_rows": True}, ["llma"] if several else []), model)
    assert isinstance(drafter, ByRequest) == several
    engine = engine_over(model.runner, drafter, strategy="auto")
    (expected,) = run(engine, request("plain", PLAIN))
    assert engine.histories is not None and engine.histories.of("t").num_tokens == 0  # type: ignore[union-attr]
    first, second, plain = request("first"), request("second"), request("again", PLAIN)
    assert engine.keeps_output(first)
    assert run(engine, first) == run(engine, second) == run(engine, plain) == [expected]
    assert not {"history", "similar"} & first.stats.accepted_by_source.keys()
    assert second.stats.accepted_by_source["similar"] > 0  # of the first, which drafted
    assert (plain.stats.drafted, plain.stats.steps) == (0, PARAMS.max_tokens)


def test_requests_of_one_step_have_strategies_of_their_own() -> None:
    model = tiny_model("llama", "float32")
    names = ("llma", "prompt_lookup", "suffix", "ngrammys")
    drafter = prepared(ByRequest({name: build_drafter(name, {}) for name in names}), model)
    engine = engine_over(model.runner, drafter, strategy="llma")
    (expected,) = run(engine, request("plain", PLAIN))
    requests = [Request(name or "default", PROMPT, PARAMS, [expected], tenant="t", strategy=name) for name in (None, *names[1:])]
    assert run(engine, *requests) == [expected] * 4
    assert set(requests[0].stats.accepted_by_source) == {"llma"}
    sources = ({"llma"}, {"prompt_lookup"}, {"suffix"}, {"context_ngram", "bigram", "unigram"})
    for one, its in zip(requests, sources, strict=True):
        assert one.stats.drafted > 0 and set(one.stats.accepted_by_source) <= its, one.request_id


def test_a_strategy_that_the_engine_does_not_have_is_refused() -> None:
    engine = engine_over(
        tiny_model("llama", "float32").runner, ByRequest({"llma": Recorder(), "trie": Recorder()}), strategy="llma"
    )
    with pytest.raises(RequestError, match=r"^speculation\.strategy: 'auto' .* allowed: llma, trie, autoregressive$") as refusal:
        engine.add(request("refused", "auto"))
    assert refusal.value.field == "speculation.strategy" and not engine.has_work
    engine.check_integrity()
    assert run(engine, request("a", "trie")) == run(engine, request("b", "llma")) == run(engine, request("c", PLAIN))


def test_a_loaded_engine_has_the_strategies_of_its_options(folder: str) -> None:
    speculation = SpeculationOptions("llma", max_draft_tokens=8, strategies=("trie:branch_length=3", "suffix", PLAIN))
    engine = Engine.load(ModelOptions(folder, dtype="float32"), EngineOptions(max_running=4), speculation)
    assert engine.info.choices == ("llma", "trie", "suffix", PLAIN) and engine.info.lossless
    outputs = run(engine, *(request(name, name) for name in engine.info.choices))
    assert all(output == outputs[0] for output in outputs)
    single = Engine.load(ModelOptions(folder, dtype="float32"), EngineOptions(max_running=4), SpeculationOptions("suffix"))
    assert single.info.choices == ("suffix", PLAIN) and run(single, request("a"), request("b", PLAIN)) == outputs[:2]
    with pytest.raises(ValueError, match="did you mean 'branch_length'"):
        Engine.load(ModelOptions("absent"), EngineOptions(), SpeculationOptions("llma", strategies=("trie:branch_len=3",)))
