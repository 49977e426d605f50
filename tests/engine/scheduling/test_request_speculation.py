"""A request's own strategy and bound of drafted rows: what is drafted changes, the output does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.drafters.by_request import ByRequest
from outrider.decoding.drafters.registry import build_drafter, build_drafters
from outrider.decoding.request import PLAIN, Acceptance, Request, SamplingParams
from outrider.decoding.tree import DraftTree
from outrider.engine.engine import Engine
from outrider.engine.errors import RequestError
from tests.helpers.models import MAX_DRAFT, engine_over, prepared, run, tiny_model

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
