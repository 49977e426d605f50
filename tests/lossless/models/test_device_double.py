"""Families of models on the double of a GPU: with CUDA graphs an engine emits the tokens that it emits without them.

By default a few families of ``families.json`` are tried. ``make prove`` tries all of them and writes a record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.actors.lookahead.executor import LookaheadParallelExecutor
from outrider.actors.lookahead.link import connect
from outrider.actors.lookahead.rank import RankServer
from outrider.configs.slices import EngineOptions
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.accelerator import use
from outrider.engine.cuda.static_runner import StaticRunner, lacks_exactness, lacks_graphs
from outrider.engine.engine import Engine
from outrider.engine.executor import Executor, LocalExecutor
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.runner import ModelRunner, kv_shape
from outrider.engine.forward.runners import make_runner
from outrider.experiments.device_double.gpu import DoubleGpu
from outrider.experiments.device_double.guard import unavailable
from tests.helpers.models import MAX_DRAFT, VOCAB, TinyTarget, engine_over, nearly, run
from tests.helpers.ranks import CHECK_STEPS, CONNECT_S, PATIENT, SECRET
from tests.lossless.models.test_families import FAMILIES, config_of

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

CONTEXT, MAX_TOKENS, RUNNING = 1024, 20, 8
GPUS = [torch.device("cuda", index) for index in range(2)]
SERVED = [each for each in FAMILIES if "refused" not in each]
SHORT = ("Llama, scaled rope", "Mixtral")  # in every run
UNCAPTURED = {"Gemma 3n"}  # it copies a number to the device in every layer
_RNG = np.random.default_rng(5)
_MOTIF = _RNG.integers(1, 40, 15).tolist()
_LONG = [_RNG.integers(1, VOCAB, length).tolist() for length in (60, 700)]
PROMPTS = ([7], [1, 2, 3, 4] * 6, _MOTIF * 2 + _MOTIF[:7], *_LONG)
DRAWN = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.9, top_p=0.9, seed=3)
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
CASES = [*((prompt, GREEDY) for prompt in PROMPTS), *((prompt, DRAWN) for prompt in (PROMPTS[1], PROMPTS[2], PROMPTS[4]))]


@pytest.fixture
def gpu() -> Iterator[DoubleGpu]:
    """A double with two GPUs, on which the engine of the test runs."""
    double = DoubleGpu()
    with use(double):
        yield double


def model_of(family: dict[str, Any], gpu: DoubleGpu, device: torch.device, dtype: torch.dtype) -> Any:
    """A random model with room for several splits of the attention kernels."""
    config = config_of(family)
    if getattr(config.get_text_config(), "max_position_embeddings", CONTEXT) == 128:
        config.get_text_config().max_position_embeddings = CONTEXT
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=TREE_ATTENTION)
    # As "grouped_mm", the default on a GPU, no expert waits for the device; that one asks ``torch.cuda`` for what it can.
    model.set_experts_implementation("batched_mm")
    return gpu.move(model.to(dtype).eval(), device)


def requests(answers: Sequence[Sequence[int]] = (), priority: int = 0) -> list[Request]:
    """The cases as new requests; of the answers parts can be copied."""
    return [
        Request(str(at), prompt, params, [nearly(answer) for answer in answers[at : at + 1]], tenant="a", priority=priority)
        for at, (prompt, params) in enumerate(CASES)
    ]


def engine_of(runner: ModelRunner, strategy: str, batch: int, step_tokens: int = 512, executor: Executor | None = None) -> Engine:
    drafter: Drafter = build_drafter(strategy, {})
    drafter.prepare(TinyTarget(runner))
    return engine_over(runner, drafter, batch, step_tokens, strategy, executor, context=CONTEXT)


def answers_one_by_one(runner: ModelRunner) -> list[list[int]]:
    engine = engine_of(runner, "autoregressive", 1)
    return [output for request in requests() for output in run(engine, request)]


def answers_preempted(runner: ModelRunner, answers: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """Three requests at once; more urgent ones come while they run. Returns the outputs, and how often one was preempted."""
    engine, wanted = engine_of(runner, "auto", 3, 96), requests(answers, priority=1)
    for request in wanted[:4]:
        engine.add(request)
    for _ in range(4):
        engine.step()
    for request in wanted[4:]:
        request.priority = 0
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    return [request.output_ids.tolist() for request in wanted], sum(request.stats.preemptions for request in wanted)


def answers_of_two_ranks(runners: Sequence[ModelRunner], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """The second rank is on another GPU, and its engine in another thread."""
    with ExitStack() as parts:
        server = RankServer(LocalExecutor(runners[1]), SECRET, PATIENT)
        parts.callback(server.close)
        executor = LookaheadParallelExecutor(LocalExecutor(runners[0]), PATIENT, 512)
        executor.check_steps = CHECK_STEPS
        executor.add_rank(1, connect(server.address, SECRET, CONNECT_S))
        parts.callback(executor.remove_rank, 1)
        outputs = run(engine_of(runners[0], "llma", RUNNING, executor=executor), *requests(answers))
        state = executor.state(2)
        assert state.ready == (0, 1) and state.losses == state.divergences == state.disagreements == 0, state
        return outputs


def made(model: Any, exact: str) -> StaticRunner:
    options = EngineOptions(max_running=RUNNING, kv_slots=RUNNING, exact=exact)  # type: ignore[arg-type]
    runner = make_runner(model, CONTEXT + 2 * MAX_DRAFT, options, 1 + 2 * MAX_DRAFT)
    assert isinstance(runner, StaticRunner)
    return runner


def outcome_of(family: dict[str, Any], gpu: DoubleGpu, exact: str) -> str | Counter[str]:
    """Try a family; return why it has no graphs, or how many answers of each kind were those without graphs."""
    dtype = torch.float32 if exact == "strict" else torch.float64
    model = model_of(family, gpu, GPUS[0], dtype)
    with gpu.current(GPUS[0]):
        lacks = lacks_exactness if exact == "strict" else lacks_graphs
        reason = lacks(model.config, kv_shape(model))
    if reason is not None:
        return reason
    runner = made(model, exact)
    if runner.capture_failures:
        return f"a capture fails: {runner.capture_failures[runner.sizes[-1]]}"
    with runner.uncaptured():
        plain = answers_one_by_one(runner)
    assert len({tuple(output) for output in plain}) > len(PROMPTS) // 2, plain
    found: dict[str, list[list[int]]] = {"one": answers_one_by_one(runner)}
    found["eight"] = run(engine_of(runner, "llma", RUNNING), *requests(plain))
    found["preempted"], preemptions = answers_preempted(runner, plain)
    assert preemptions > 0
    if exact == "strict":
        found["two ranks"] = answers_of_two_ranks([runner, made(model_of(family, gpu, GPUS[1], dtype), exact)], plain)
    right = {kind: sum(one == other for one, other in zip(outputs, plain, strict=True)) for kind, outputs in found.items()}
    return Counter(right)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("exact", ["strict", pytest.param("rounding", marks=pytest.mark.proof)])
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, id=each["family"], marks=[] if each["family"] in SHORT else [pytest.mark.proof]) for each in SERVED],
)
def test_a_family_emits_with_graphs_what_it_emits_without(
    family: dict[str, Any], exact: str, gpu: DoubleGpu, proof: dict[str, Any]
) -> None:
    outcome = outcome_of(family, gpu, exact)
    graphs = [len(graph.operations) for graph in gpu.graphs]
    proof |= {
        "config": family["config"], "without graphs": outcome if isinstance(outcome, str) else None,
        "answers": {} if isinstance(outcome, str) else dict(outcome), "of": len(CASES), "graphs": len(graphs),
        "operations": max(graphs, default=0),
    }  # fmt: skip
    assert isinstance(outcome, str) or set(outcome.values()) == {len(CASES)}, outcome
    assert str(outcome).startswith("a capture fails") == (family["family"] in UNCAPTURED)
