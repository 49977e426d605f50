"""Exactness under load: at every number of requests in a step each answer is that of the request alone, in float32, while others
arrive, leave and are preempted, whatever is drafted for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.registry import STRATEGIES
from outrider.decoding.request import FinishReason
from outrider.engine.engine import Engine
from tests.helpers.models import llama_config, save_model
from tests.helpers.ranks import loaded_group
from tests.helpers.traffic import Case, Rush, Watch, make_cases

STRATEGY_NAMES = sorted(STRATEGIES)
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
TENANTS = ("a", "a", "b", None)
Load = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    # Tied embeddings make the model repeat tokens it has just seen, so that drafts are accepted in places.
    config = llama_config(tie_word_embeddings=True, initializer_range=0.15)
    return ModelOptions(str(save_model(tmp_path_factory.mktemp("models") / "tiny", config, seed=4)), dtype="float32")


@pytest.fixture(scope="module")
def load(model: ModelOptions) -> Load:
    """Makes an engine of a strategy, in whose steps so many requests run, with options of ``EngineOptions``."""

    def make(strategy: str, running: int, strategies: tuple[str, ...] = (), **options: object) -> Engine:
        engine = EngineOptions(max_running=running, **options)  # type: ignore[arg-type]
        speculation = SpeculationOptions(strategy, max_draft_tokens=16, strategies=strategies)
        return Engine.load(model, engine, speculation)

    return make


@pytest.fixture(scope="module")
def cases(load: Load) -> list[Case]:
    """What plain decoding says at batch 1."""
    made = make_cases(load("autoregressive", 1, prefix_caching=False), 54, seed=21, longest_prompt=70, max_tokens=24)
    assert len({case.ids for case in made}) > 40 and {case.reason for case in made} == {FinishReason.STOP, FinishReason.LENGTH}
    return made


def assert_drafts_helped(watch: Watch, strategy: str, running: int) -> None:
    """Else the comparison would show nothing. How much ``auto`` drafts in larger batches is decided by the clock."""
    assert watch.accepted > 0 or strategy == "autoregressive" or (strategy == "auto" and running > 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "running"),
    [
        (strategy, running)
        for strategy in STRATEGY_NAMES
        for running in (CONCURRENCIES if strategy in ("auto", "autoregressive") else (1, 4, 32))
    ],
)
def test_answers_at_every_concurrency_are_those_alone(load: Load, cases: list[Case], strategy: str, running: int) -> None:
    watch = Watch(load(strategy, running))
    chosen = cases[: running + 18]  # more than slots
    for number, case in enumerate(chosen):
        watch.add(case, str(number), tenant=TENANTS[number % len(TENANTS)])
    watch.drain()
    watch.engine.check_integrity()
    assert watch.ended.total() == len(chosen)
    assert watch.cached > 0 or running < 8  # prompts share beginnings, but a slot holds only what was in it last
    assert_drafts_helped(watch, strategy, running)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_arrivals_aborts_and_preemptions_change_no_other_answer(load: Load, cases: list[Case], strategy: str) -> None:
    """With few rows a step, so that prompts are computed in chunks between the others' tokens."""
    watch = Watch(load(strategy, 4, max_step_tokens=48, scheduling_policy="priority"))
    rush = Rush(count=40, most_live=12, check_share=0.1)
    rush.play(watch, cases, seed=3, options=lambda n: {"tenant": TENANTS[n % len(TENANTS)], "priority": (0, 2, 1, -1, 0)[n % 5]})
    assert watch.preemptions > 0 and watch.ended[FinishReason.ABORT] > 0
    assert_drafts_helped(watch, strategy, 4)


@pytest.mark.parametrize("running", [3, 16])
def test_a_batch_of_all_strategies_says_what_each_request_says_alone(load: Load, cases: list[Case], running: int) -> None:
    """Every request has a strategy and a bound of its own."""
    watch = Watch(load("auto", running, tuple(STRATEGY_NAMES), max_step_tokens=36, scheduling_policy="priority"))
    names, bounds = (None, *STRATEGY_NAMES), (None, 0, 3, 1000)

    def options(number: int) -> dict[str, object]:
        return {
            "tenant": TENANTS[number % len(TENANTS)],
            "priority": number % 3,
            "strategy": names[number % len(names)],
            "max_draft_tokens": bounds[number // len(names) % len(bounds)],
        }

    Rush(count=80, most_live=4 * running, check_share=0.1).play(watch, cases, seed=5, options=options)
    assert watch.preemptions > 0 and watch.accepted > 0


def test_without_prefix_caching_nothing_is_taken_over(load: Load, cases: list[Case]) -> None:
    watch = Watch(load("auto", 4, prefix_caching=False))
    Rush(count=30, most_live=8).play(watch, cases, seed=9, options=lambda number: {"tenant": "a"})
    assert watch.cached == 0


def test_ranks_that_share_the_steps_change_no_answer(model: ModelOptions, cases: list[Case]) -> None:
    """Three ranks, each of which looks for itself what it has of a prompt."""
    engine = EngineOptions(max_running=4, max_step_tokens=64, scheduling_policy="priority")
    with loaded_group(model, engine, SpeculationOptions("trie", max_draft_tokens=16), 3) as (leader, group):
        watch = Watch(leader)
        rush = Rush(count=30, most_live=10, check_share=0.1)
        rush.play(watch, cases, seed=7, options=lambda n: {"tenant": TENANTS[n % len(TENANTS)], "priority": n % 3})
        state = group.state(3)
    assert state.ready == (0, 1, 2) and (state.losses, state.divergences, state.disagreements) == (0, 0, 0)
    assert watch.preemptions > 0 and watch.cached > 0 and watch.accepted > 0
