"""Several strategies in one drafter: each request is drafted for as if its strategy were alone, and what is shared is shared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.decoding.arrays import Int32Array
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.drafters.base import Drafter, TargetRows, TooManySettingsError
from outrider.decoding.drafters.by_request import ByRequest
from outrider.decoding.drafters.registry import build_drafter, build_drafters, parse_strategy, setting_of, strategy_text
from outrider.decoding.request import PLAIN, Request, SamplingParams
from outrider.decoding.sources.text_keys import request_of
from outrider.decoding.tree import Acceptance, DraftTree
from outrider.decoding.verify.exact import verify_exact
from tests.helpers.targets import Target

VOCAB = 40
TARGET = Target(VOCAB, (0,), LatencyCurve((1, 64), (0.01, 0.0163), 0, 0.0, 0.0))
NAMES = ("auto", "llma", "trie", "recycling", "ngrammys", "jacobi")
OPTIONS: dict[str, dict[str, object]] = {"auto": {"all_rows": True}, "ngrammys": {"allocation": "context"}}


def logits(tokens: Int32Array) -> torch.Tensor:
    """[n, vocab] what ``TARGET`` says after each token."""
    return -torch.from_numpy((np.arange(VOCAB) - tokens[:, None] - 1) % VOCAB).float()


def built(*names: str) -> dict[str, Drafter]:
    return {name: build_drafter(name, OPTIONS.get(name, {})) for name in names}


def prepared(drafter: Drafter) -> Drafter:
    drafter.prepare(TARGET)
    return drafter


def request(name: str, strategy: str | None, tenant: str | None = "t", max_tokens: int = 24) -> Request:
    start = 1 + len(name) % 5
    prompt = [*range(start, start + 9), *range(start, start + 4)]
    return Request(name, prompt, SamplingParams(max_tokens), [prompt[::-1]], tenant=tenant, strategy=strategy)


def step(drafter: Drafter, live: Sequence[Request], budget: int = 12) -> list[DraftTree]:
    """One step of plain greedy decoding by ``TARGET``; requests that end leave the drafter."""
    trees = drafter.propose(live, [budget] * len(live))
    for one, tree in zip(live, trees, strict=True):
        rows = logits(tree.tokens)
        ids = rows.argmax(-1).numpy().astype(np.int32)
        acceptance = verify_exact(tree, lambda row, ids=ids: int(ids[row]), one.remaining, ())  # type: ignore[misc]
        one.commit([*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token])
        if one.remaining:
            drafter.observe(one, tree, TargetRows(ids, rows), acceptance)
        else:
            drafter.finish(one)
    return trees


def shape(tree: DraftTree) -> tuple[list[int], list[int], list[int], int]:
    return tree.tokens.tolist(), tree.parents.tolist(), tree.sources.tolist(), tree.num_candidates


def test_each_request_is_drafted_for_as_if_its_strategy_were_alone() -> None:
    both = prepared(ByRequest(built(*NAMES)))
    alone = {name: prepared(drafter) for name, drafter in built(*NAMES).items()}
    # Tenants of their own: what the strategies share is no matter here.
    pairs = [
        tuple(request(f"{name}-{at}", strategy, tenant=name, max_tokens=16 + 3 * at) for _ in range(2))
        for at in range(2)
        for name, strategy in [(name, None if name == NAMES[0] and at else name) for name in NAMES]
    ]
    drafted = 0
    for _ in range(100):
        live = [pair for pair in pairs if pair[0].remaining]
        if not live:
            break
        together = step(both, [pair[0] for pair in live])
        for name, drafter in alone.items():
            places = [at for at, pair in enumerate(live) if pair[0].request_id.startswith(name)]
            expected = step(drafter, [live[at][1] for at in places]) if places else []
            assert [shape(together[at]) for at in places] == [shape(tree) for tree in expected], name
        drafted += sum(len(tree) - 1 for tree in together)
    assert not any(one.remaining for pair in pairs for one in pair) and drafted > 100
    assert not both.tracked_requests()
    assert both.top_k == max(drafter.top_k for drafter in alone.values())
    both.propose([], [])
    assert both.top_k == 0  # nobody is live


def run(drafter: Drafter, one: Request) -> list[DraftTree]:
    trees: list[DraftTree] = []
    while one.remaining:
        trees += step(drafter, [one])
    return trees


def test_a_strategy_that_keeps_nothing_leaves_nothing() -> None:
    drafter = prepared(ByRequest(built("auto", "suffix")))
    one = request("a", "suffix")
    run(drafter, one)
    assert drafter.histories is not None and drafter.histories.of("t").num_tokens == 0  # type: ignore[union-attr]
    assert (
        not drafter.keeps_output(one) and drafter.keeps_output(request("b", None)) and drafter.keeps_output(request("c", "auto"))
    )
    assert ByRequest(built("prompt_lookup", "suffix")).histories is None


class Announced(Drafter):
    """Announces, and records what it is told."""

    def __init__(self, top_k: int, rows: int = 0) -> None:
        self.top_k, self._rows = top_k, rows
        self.loads, self.had_logits, self.finished = list[StepLoad](), list[bool](), list[str]()

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        assert load is not None
        self.loads.append(load)
        return [DraftTree.chain(one.root, [1] * self._rows) for one in requests]

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        self.had_logits.append(target.has_logits)

    def finish(self, request: Request) -> None:
        self.finished.append(request.request_id)


def test_tokens_are_ranked_for_strategies_with_live_requests_and_others_do_not_see_them() -> None:
    few, many = Announced(2), Announced(8)
    drafter = ByRequest({"few": few, "many": many})
    one, other = request("one", None), request("other", "many")
    drafter.propose([one], [4])
    assert drafter.top_k == 2
    drafter.ranks = 2
    tree = DraftTree.chain(other.root, ())
    ranked = TargetRows(np.zeros(1, np.int32), None, np.zeros((1, 2), np.int32))
    drafter.observe(one, tree, ranked, Acceptance((), 1))
    drafter.observe(other, tree, ranked, Acceptance((), 1))  # its prefill ends in this step: two tokens a row are too few for it
    assert (few.had_logits, many.had_logits) == ([True], [False])
    drafter.propose([one], [4])
    assert drafter.top_k == 8 and (few.ranks, many.ranks) == (2, 2)  # it has been met
    drafter.finish(other)
    drafter.propose([one], [4])
    assert drafter.top_k == 2 and (few.finished, many.finished) == ([], ["other"])
    drafter.ranks = 1  # the logits are here: whoever wants to may look at them
    drafter.observe(other, tree, TargetRows(np.zeros(1, np.int32), torch.zeros(1, VOCAB)), Acceptance((), 1))
    assert many.had_logits == [False, True]


def test_the_default_is_told_of_the_rows_that_others_draft() -> None:
    first, second = Announced(0, rows=3), Announced(0, rows=5)
    drafter = ByRequest({"first": first, "second": second})
    requests = [request("a", None), request("b", "second"), request("c", "second"), request("d", "first")]
    load = StepLoad(sequences=4, rows=4, context=400)
    trees = drafter.propose(requests, [8] * 4, load)
    assert set(drafter.tracked_requests()) == set("abcd")
    assert [len(tree) for tree in trees] == [4, 6, 6, 4]
    assert second.loads == [load] and first.loads == [StepLoad(sequences=4, rows=14, context=400)]


def test_drafters_are_built_for_what_may_be_asked_for() -> None:
    drafter = build_drafters("llma", {"copy_length": 9}, ["trie", "suffix", PLAIN, "llma"])
    assert isinstance(drafter, ByRequest) and drafter.strategies == ("llma", "trie", "suffix")
    for others in ([], [PLAIN], ["llma"]):
        assert not isinstance(build_drafters("llma", {}, others), ByRequest)
    assert build_drafters(PLAIN, {}, ["llma"]).strategies == (PLAIN, "llma")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["lma"], "did you mean 'llma'"),
        (["llma:copy_len=3"], "did you mean 'copy_length'"),
        (["llma:copy_length"], "must be option=value"),
        (["llma", "llma:copy_length=3"], "llma is listed twice"),
        (["auto:max_depth=3"], "set its options in speculation.options"),
        ([f"{PLAIN}:rows=1"], "has no option"),
    ],
)
def test_what_cannot_be_asked_for_is_said_at_once(others: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_drafters("auto", {}, others)


def test_plain_requests() -> None:
    params = SamplingParams(4)
    assert Request("a", [1], params, strategy=PLAIN, max_draft_tokens=5).plain
    assert Request("a", [1], params, max_draft_tokens=0).plain
    assert not Request("a", [1], params, strategy="llma", max_draft_tokens=1).plain and not Request("a", [1], params).plain
    with pytest.raises(ValueError, match="max_draft_tokens must be 0"):
        Request("a", [1], params, max_draft_tokens=-1)


def test_outputs_of_one_strategy_are_drafted_from_by_another_of_the_same_tenant_alone() -> None:
    drafter = prepared(ByRequest(built("llma", "trie", "auto")))
    taught = Request("taught", [30, 31], SamplingParams(20), tenant="t", strategy="trie")
    run(drafter, taught)

    def first(name: str, tenant: str | None) -> DraftTree:
        """What is drafted from others' outputs: nothing of its own holds the two tokens twice."""
        one = Request(name, [32, 33], SamplingParams(20), tenant=tenant, strategy="auto")
        (tree,) = drafter.propose([one], [12])
        drafter.finish(one)
        return tree

    assert drafter.histories is not None
    assert [token for token in (34, 35, 36) if token in first("same", "t").tokens] == [34, 35, 36]
    for name, tenant in (("other", "u"), ("private", None)):
        assert not {34, 35, 36} & set(first(name, tenant).tokens.tolist()), tenant
    history = drafter.histories.of("t")
    assert history is not None
    history.remove_requests([request_of(taught.text)])
    assert not {34, 35, 36} & set(first("deleted", "t").tokens.tolist())


def choosing(strategy: str = "prompt_lookup", *others: str, most_rows: int | None = None, max_settings: int = 2) -> ByRequest:
    """Return a prepared drafter whose requests may set options."""
    drafter = prepared(build_drafters(strategy, {}, others, most_rows, max_settings))
    assert isinstance(drafter, ByRequest)
    return drafter


def test_a_request_with_options_is_drafted_for_as_if_its_strategy_had_them() -> None:
    options = {"prompt_lookup": {"num_tokens": 3}, "suffix": {"max_spec_tokens": 2}, "jacobi": {"window": 2}}
    drafter = choosing("prompt_lookup", "suffix", "jacobi", max_settings=3)
    for name, given in options.items():
        text = strategy_text(name, given)
        one, other = request(name, text), request(name, name)
        drafter.admit(one)
        alone = prepared(build_drafter(name, given))
        while one.remaining:
            assert [shape(tree) for tree in step(drafter, [one])] == [shape(tree) for tree in step(alone, [other])], name
    assert not drafter.tracked_requests()
    assert drafter.strategies == ("prompt_lookup", "suffix", "jacobi")


def test_options_of_a_request_add_to_those_of_its_setting() -> None:
    drafter = choosing("suffix", "fast = jacobi:window=3,guesses=2", "jacobi")
    one = request("a", "fast:ngram=3")
    drafter.admit(one)
    assert drafter.strategies == ("suffix", "fast", "jacobi")
    assert drafter._drafters["fast:ngram=3"].published_rows == build_drafter(
        "jacobi", {"window": 3, "guesses": 2, "ngram": 3}
    ).published_rows  # fmt: skip


def test_drafters_for_options_make_room_for_others_when_unused() -> None:
    drafter = choosing(max_settings=2)
    first, second, third = (request(str(length), f"prompt_lookup:num_tokens={length}") for length in (1, 2, 3))
    drafter.admit(first)
    drafter.admit(second)
    with pytest.raises(TooManySettingsError, match=r"speculation\.max_settings"):
        drafter.admit(third)
    drafter.finish(third)  # as the engine does for a request that it refuses
    drafter.finish(first)
    drafter.admit(third)
    assert set(drafter.tracked_requests()) == {"2", "3"}
    drafter.propose([second, third], [8, 8])
    drafter.finish(second)
    drafter.finish(third)
    drafter.admit(request("again", "prompt_lookup:num_tokens=2"))  # is still there, and so is used last
    drafter.admit(request("new", "prompt_lookup:num_tokens=4"))
    assert set(drafter._built) == {"prompt_lookup:num_tokens=2", "prompt_lookup:num_tokens=4"}


def test_drafters_for_options_share_the_history() -> None:
    drafter = choosing("suffix_decoding")
    text = "suffix_decoding:max_spec_tokens=4"
    drafter.admit(request("a", text))
    assert drafter._drafters[text].histories is drafter.histories is not None


@pytest.mark.parametrize(
    ("strategy", "text", "message"),
    [
        ("suffix", "suffix:occurrence=last", "occurrence must be one of"),
        ("ngrammys", "ngrammys:table_width=60", "bigram table of 40 columns"),
    ],
)
def test_options_that_need_what_the_start_did_not_prepare_are_refused(strategy: str, text: str, message: str) -> None:
    drafter = prepared(build_drafters(strategy, {}, (), None, 2))
    with pytest.raises(ValueError, match=message):
        drafter.admit(request("a", text))
    drafter.finish(request("a", text))
    assert not drafter.tracked_requests()


# One row pays: each further one takes as long as a step.
STEEP = Target(VOCAB, (0,), LatencyCurve((1, 512), (0.01, 5.12), 0, 0.0, 0.0))


def test_a_request_that_is_drafted_for_as_published_gets_all_rows_and_the_others_those_that_pay() -> None:
    drafter = build_drafters("jacobi", {"window": 15, "guesses": 15}, (), 64)
    drafter.prepare(STEEP)
    usual, published = request("usual", None, max_tokens=60), request("published", None, max_tokens=60)
    published.as_published = True
    rows: dict[str, list[int]] = {"usual": [], "published": []}
    for _ in range(12):
        trees = drafter.propose([usual, published], [64, 512])
        for one, tree in zip((usual, published), trees, strict=True):
            rows[one.request_id].append(len(tree) - 1)
            cut = drafter.cut_rows(one, tree, 64 if one is usual else 512)
            assert cut == ((119, True) if one is usual else (0, True))
            ids = logits(tree.tokens).argmax(-1).numpy().astype(np.int32)
            acceptance = verify_exact(tree, lambda row, ids=ids: int(ids[row]), one.remaining, ())  # type: ignore[misc]
            one.commit([*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token])
            if one.remaining:
                drafter.observe(one, tree, TargetRows(ids, logits(tree.tokens)), acceptance)
        if not (usual.remaining > 1 and published.remaining > 1):
            break
    assert max(rows["usual"]) <= 3
    assert 59 <= max(rows["published"]) <= 119  # the whole window at least


def test_setting_names() -> None:
    assert parse_strategy("fast = jacobi:window=5").setting == "fast"
    assert parse_strategy("jacobi:window=5").setting == "jacobi"
    assert setting_of("fast:ngram=3") == setting_of("fast") == "fast"
    assert strategy_text("llma", {"ties": "first", "copy_length": 3, "include_prompt": False}) == (
        "llma:copy_length=3,include_prompt=false,ties=first"
    )
    for text in ("trie = jacobi:window=5", f"none = {PLAIN}"):
        with pytest.raises(ValueError, match=r"name"):
            build_drafters("auto", {}, [text])
    with pytest.raises(ValueError, match="fast is listed twice"):
        build_drafters("auto", {}, ["fast = jacobi", "fast = llma"])
