"""What a tenant generated is drafted for that tenant alone, and not after it was deleted. Each miss has a hit beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.drafters.auto import AutoDrafter
from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.drafters.registry import build_drafter, build_drafters
from outrider.decoding.replay import KnownText, replay_workload
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.history import Histories, History
from outrider.decoding.sources.ranked.successors import MAX_TENANTS, SuccessorTables
from outrider.decoding.sources.text_keys import request_hash
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree
from tests.helpers.targets import Target, paths

VOCAB = 60
END = 2
TEXT = list(range(10, 30))  # what is said, by whomever
ASKING = TEXT[:4]  # a prompt after which it could go on
HIT = (TEXT[4], TEXT[5])  # drafted below it where the text is known
_names: Iterator[int] = itertools.count()


@pytest.fixture(autouse=True)
def no_frequent_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoDrafter, "num_frequent", 0)


def auto(**options: object) -> Drafter:
    return prepared("auto", {"all_rows": True, "history_tokens": 1 << 11} | options)


def trie(**options: object) -> Drafter:
    return prepared("trie", {"capacity": 1 << 11} | options)


def recycling() -> Drafter:
    return prepared("recycling", {})


def prepared(strategy: str, options: dict[str, object]) -> Drafter:
    drafter = build_drafter(strategy, options)
    drafter.prepare(Target(VOCAB, (END,)))
    return drafter


WITH_MEMORY = pytest.mark.parametrize("make", [auto, trie, lambda: trie(layout="single")], ids=["auto", "trie", "single"])
Make = Callable[[], Drafter]


def request(tenant: str | None, prompt: Sequence[int] = (9,), public: bool = True, name: str = "", room: int = 900) -> Request:
    return Request(name or f"r{next(_names)}", prompt, SamplingParams(max_tokens=room), tenant=tenant, public=public)


def memory(drafter: Drafter) -> Histories:
    assert drafter.histories is not None
    return drafter.histories


def history(drafter: Drafter, tenant: str) -> History:
    found = memory(drafter).of(tenant)
    assert found is not None
    return found


def say(drafter: Drafter, tenant: str | None, text: Sequence[int] = TEXT, name: str = "", end: bool = True) -> Request:
    """A request of which the drafter sees a text emitted, two tokens a step."""
    saying = request(tenant, name=name)
    for at in range(0, len(text), 2):
        saying.commit(list(text[at : at + 2]))
        drafter.propose([saying], [4])
    if end:
        drafter.finish(saying)
    return saying


def drafted(drafter: Drafter, tenant: str | None, prompt: Sequence[int] = ASKING, public: bool = True) -> set[tuple[int, ...]]:
    """What a new request is offered after its prompt; its output is never told."""
    asking = request(tenant, prompt, public)
    (tree,) = drafter.propose([asking], [40])
    drafter.finish(asking)
    return set(paths(tree))


@WITH_MEMORY
@pytest.mark.parametrize("end", [True, False], ids=["finished", "running"])
def test_outputs_are_drafted_for_their_tenant_and_no_other(make: Make, end: bool) -> None:
    drafter = make()
    say(drafter, "a", end=end)
    assert HIT in drafted(drafter, "a")
    assert drafted(drafter, "b") == drafted(drafter, None) == set()
    say(drafter, "b", end=end)
    assert HIT in drafted(drafter, "b") and drafted(drafter, None) == set()


@WITH_MEMORY
def test_a_private_request_teaches_nobody_and_drafts_from_itself(make: Make) -> None:
    drafter = make()
    running = say(drafter, None, end=False)
    assert drafted(drafter, "a") == drafted(drafter, None) == set()
    running.commit(ASKING)
    (tree,) = drafter.propose([running], [40])
    assert HIT in paths(tree)  # of its own output
    drafter.finish(running)
    assert drafted(drafter, "a") == drafted(drafter, None) == set()
    assert memory(drafter).public.num_tokens == history(drafter, "a").num_tokens == 0


@WITH_MEMORY
def test_private_and_shared_requests_in_one_batch(make: Make) -> None:
    drafter = make()
    say(drafter, "a")
    asking = [request(tenant, ASKING) for tenant in (None, "a", "b", "a", None)]
    trees = [set(paths(tree)) for tree in drafter.propose(asking, [40] * 5)]
    assert [HIT in tree for tree in trees] == [False, True, False, True, False]
    assert [trees[at] for at in (0, 2, 4)] == [set()] * 3


@WITH_MEMORY
def test_public_texts_are_drafted_for_all_who_may(make: Make) -> None:
    drafter = make()
    memory(drafter).public.extend(1, 0, TEXT, final=True)
    for tenant in ("a", "b", None):
        assert HIT in drafted(drafter, tenant)
        assert drafted(drafter, tenant, public=False) == set()
    say(drafter, "a", [*TEXT[:4], 50, 51])  # outputs do not become public
    assert all((50, 51) not in drafted(drafter, tenant) for tenant in ("b", None))
    assert (50, 51) in drafted(drafter, "a", public=False) and HIT not in drafted(drafter, "a", public=False)


def test_rows_of_tenant_and_public_texts_stand_in_one_tree() -> None:
    for drafter, source in ((auto(), "history"), (trie(), "trie")):
        memory(drafter).public.extend(1, 0, TEXT, final=True)
        say(drafter, "a", [*TEXT[:4], 50, 51])
        (tree,) = drafter.propose([request("a", ASKING)], [40])
        assert {HIT, (50, 51)} <= set(paths(tree))
        assert {SOURCES[row] for row in tree.sources[1:]} == {source}


def test_public_texts_count_as_outputs_in_the_trie() -> None:
    drafter = trie(max_query_length=1, frequencies="mix", min_output=0)
    for number in range(3):
        memory(drafter).public.extend(number, 0, [7, 40], final=True)
    for _ in range(2):
        say(drafter, "a", [7, 41])

    asking = [request("a", [7, 42, 7]), request("a", [7]), request("a", [7], public=False)]
    trees = drafter.propose(asking, [1, 1, 1])
    # One in the prompt counts most; then three public ones come before two of the tenant.
    assert [tree.tokens[1:].tolist() for tree in trees] == [[42], [40], [41]]


def test_without_memory_nothing_is_remembered() -> None:
    for drafter in (auto(history_tokens=0), trie(capacity=0)):
        assert drafter.histories is None
        saying = say(drafter, "a", end=False)
        assert drafted(drafter, "a") == set()
        saying.commit(ASKING)
        (tree,) = drafter.propose([saying], [40])
        assert HIT in paths(tree)


def test_frequent_tokens_do_not_cross_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoDrafter, "num_frequent", 3)
    drafter = auto()
    say(drafter, "a", [50, 50, 51])
    memory(drafter).public.extend(1, 0, [40, 40, 40], final=True)

    def frequent(tenant: str | None, public: bool = True) -> set[int]:
        (tree,) = drafter.propose([request(tenant, [5], public)], [40])
        return set(tree.tokens[tree.sources == SOURCES.index("unigram")].tolist())

    assert frequent("a") == {50, 51, 40}
    assert frequent("b") == frequent(None) == {5, 40}
    assert frequent("a", public=False) == {5, 50, 51}
    assert frequent(None, public=False) == {5}


def rank(drafter: Drafter, teaching: Request, token: int, follower: int) -> None:
    """A step in which the target ranked ``follower`` first after ``token``."""
    logits = -torch.arange(VOCAB, dtype=torch.float32)[None]
    logits[0, follower] = 100.0
    target = TargetRows(np.array([follower], np.int32), logits)
    drafter.observe(teaching, DraftTree.chain(token, ()), target, Acceptance((), follower))


def test_drafts_that_fail_for_one_are_left_out_for_no_other() -> None:
    drafter = auto()
    memory(drafter).public.extend(1, 0, TEXT, final=True)
    for tenant in (None, "a"):
        asking = request(tenant, ASKING)
        for _ in range(60):
            (tree,) = drafter.propose([asking], [40])
            drafter.observe(asking, tree, TargetRows(np.full(len(tree), -1, np.int32), None), Acceptance((), 9))
        assert not paths(drafter.propose([asking], [40])[0])
        drafter.finish(asking)
        assert HIT in drafted(drafter, None) and HIT in drafted(drafter, "b")
    assert HIT not in drafted(drafter, "a")  # a tenant's requests go by what they taught each other


@pytest.mark.parametrize("make", [auto, recycling])
def test_successors_do_not_cross_tenants(make: Make) -> None:
    drafter = make()
    rank(drafter, request("a"), 7, 31)
    assert (31,) in drafted(drafter, "a", [7])
    assert drafted(drafter, "b", [7]) == drafted(drafter, None, [7]) == set()
    private = request(None, [7])
    rank(drafter, private, 7, 32)
    (tree,) = drafter.propose([private], [4])
    assert (32,) in paths(tree) and (31,) not in paths(tree)
    assert drafted(drafter, None, [7]) == set() and (32,) not in drafted(drafter, "a", [7])
    drafter.finish(private)
    again = request(None, [7], name=private.request_id)
    assert len(drafter.propose([again], [4])[0]) == 1


def test_the_tables_of_the_tenants_served_last_are_kept() -> None:
    tables = SuccessorTables(VOCAB)
    asking = {tenant: request(f"t{tenant}") for tenant in range(MAX_TENANTS + 1)}
    kept = {tenant: tables.of(asking[tenant]) for tenant in range(MAX_TENANTS)}
    assert tables.of(asking[0]) is kept[0]  # served again
    tables.of(asking[MAX_TENANTS])
    assert tables.known(asking[1]) is None
    assert all(tables.known(asking[tenant]) is kept[tenant] for tenant in (0, *range(2, MAX_TENANTS)))


def test_a_replay_drafts_from_the_outputs_before() -> None:
    texts = [KnownText("t", np.array([1], np.int32), (), np.array(TEXT, np.int32))] * 2
    for strategy in ("auto", "trie"):
        twice = replay_workload(texts, lambda strategy=strategy: build_drafter(strategy, {}), 32, VOCAB, lambda: 0.0)
        each = replay_workload(
            texts, lambda strategy=strategy: build_drafter(strategy, {}), 32, VOCAB, lambda: 0.0, keep_history=False
        )
        assert twice.steps < each.steps


def remove_text(drafter: Drafter, said: Request) -> None:
    history(drafter, "a").remove(said.text)


def remove_request(drafter: Drafter, said: Request) -> None:
    history(drafter, "a").remove_requests([request_hash(said.request_id)])


def clear(drafter: Drafter, said: Request) -> None:
    history(drafter, "a").clear(dead=True)


Delete = Callable[[Drafter, Request], None]
DELETIONS = pytest.mark.parametrize("delete", [remove_text, remove_request, clear])


@WITH_MEMORY
@DELETIONS
def test_deleted_texts_are_not_drafted(make: Make, delete: Delete) -> None:
    drafter = make()
    other = [40, 41, 42, 43, 44, 45]
    said = say(drafter, "a")
    say(drafter, "a", other)
    say(drafter, "b")
    assert HIT in drafted(drafter, "a") and (44, 45) in drafted(drafter, "a", other[:4])
    delete(drafter, said)
    assert drafted(drafter, "a") == set()
    assert ((44, 45) in drafted(drafter, "a", other[:4])) == (delete in (remove_text, remove_request))
    assert HIT in drafted(drafter, "b")
    say(drafter, "a")  # another request may say it again
    assert HIT in drafted(drafter, "a")


@WITH_MEMORY
@DELETIONS
def test_what_a_running_request_says_after_its_deletion_is_not_drafted(make: Make, delete: Delete) -> None:
    drafter = make()
    running = say(drafter, "a", TEXT[:10], end=False)
    assert HIT in drafted(drafter, "a")
    delete(drafter, running)
    assert drafted(drafter, "a") == set()
    running.commit(TEXT[10:16])
    drafter.propose([running], [4])
    assert drafted(drafter, "a") == drafted(drafter, "a", TEXT[10:14]) == set()
    running.commit(TEXT[16:])
    drafter.finish(running)
    assert drafted(drafter, "a") == drafted(drafter, "a", TEXT[10:14]) == drafted(drafter, "a", TEXT[16:18]) == set()
    say(drafter, "a", name="" if delete is remove_request else running.request_id)
    assert HIT in drafted(drafter, "a")


@WITH_MEMORY
@DELETIONS
def test_runs_that_survived_an_eviction_go_with_the_text(make: Make, delete: Delete) -> None:
    drafter = make()
    said = say(drafter, "a", TEXT * 4)  # often: it outlives the block it stands in
    rng = np.random.default_rng(0)
    while number_of_blocks(drafter, said):
        say(drafter, "a", rng.integers(40, VOCAB, 200).tolist())
    assert HIT in drafted(drafter, "a")
    delete(drafter, said)
    assert HIT not in drafted(drafter, "a") and (TEXT[4],) not in drafted(drafter, "a")


def number_of_blocks(drafter: Drafter, said: Request) -> int:
    """Of the first text, whose number is 0; it is still known by its key."""
    assert said.num_output
    return int((history(drafter, "a").log.arrays.owners == 0).sum())


@DELETIONS
def test_frequent_tokens_of_deleted_texts_go_too(delete: Delete, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoDrafter, "num_frequent", 2)
    drafter = auto()
    saying, beside = say(drafter, "a", [50, 50, 51], end=False), request("a", [5])
    drafter.propose([beside], [4])
    assert (50,) in drafted(drafter, "a", [5])
    delete(drafter, saying)
    assert drafted(drafter, "a", [5]) == {(5,)} and paths(drafter.propose([beside], [4])[0]) == [(5,)]


@DELETIONS
@pytest.mark.parametrize("make", [auto, recycling])
def test_successors_that_were_ranked_for_deleted_texts_go_too(make: Make, delete: Delete) -> None:
    drafter = make()
    saying, beside = say(drafter, "a", [50, 51], end=False), request("a", [5])
    drafter.propose([beside], [4])
    rank(drafter, saying, 7, 31)
    rank(drafter, request("b"), 7, 32)
    assert (31,) in drafted(drafter, "a", [7])
    delete(drafter, saying)
    assert drafted(drafter, "a", [7]) == set() and (32,) in drafted(drafter, "b", [7])
    saying.commit([52])
    drafter.propose([saying], [4])
    rank(drafter, saying, 7, 33)  # it teaches itself, and no other any more
    assert drafted(drafter, "a", [7]) == set() and (32,) in drafted(drafter, "b", [7])
    saying.commit([7])
    assert (33,) in paths(drafter.propose([saying], [40])[0])
    drafter.finish(saying)
    assert drafted(drafter, "a", [7]) == set()
    rank(drafter, beside if make is auto else request("a"), 7, 34)
    assert (34,) in drafted(drafter, "a", [7])
    assert drafter.keeps_output(saying) == (make is auto)
    assert make is auto or history(drafter, "a").num_tokens == 0


@DELETIONS
@pytest.mark.parametrize(("strategy", "options"), [("suffix_decoding", {}), ("racer", {"window": 4})])
def test_automata_and_windows_of_deleted_texts_go_too(strategy: str, options: dict[str, object], delete: Delete) -> None:
    drafter = prepared(strategy, options)
    said = say(drafter, "a")
    assert HIT in drafted(drafter, "a") and drafted(drafter, "b") == drafted(drafter, None) == set()
    say(drafter, "b")
    assert HIT in drafted(drafter, "b")
    delete(drafter, said)
    assert drafted(drafter, "a") == set() and HIT in drafted(drafter, "b")
    running = say(drafter, "a", end=False)
    assert strategy == "suffix_decoding" or HIT in drafted(drafter, "a")
    delete(drafter, running)
    assert drafted(drafter, "a") == set()
    drafter.propose([running], [40])  # its windows are its own from now on
    drafter.finish(running)
    assert drafted(drafter, "a") == set()


@pytest.mark.parametrize("most_rows", [None, 16], ids=["all rows", "rows that pay"])
def test_a_deletion_reaches_every_strategy_of_an_engine(most_rows: int | None) -> None:
    drafter = build_drafters("recycling", {}, ["auto:all_rows=true,recycling=false", "trie", "suffix_decoding"], most_rows)
    drafter.prepare(Target(VOCAB, (END,)))

    def offered(strategy: str, root: int, tenant: str | None = "a") -> set[tuple[int, ...]]:
        asking = Request(f"r{next(_names)}", [8, root], SamplingParams(max_tokens=900), tenant=tenant, strategy=strategy)
        (tree,) = drafter.propose([asking], [40])
        drafter.finish(asking)
        return set(paths(tree))

    assert memory(drafter).capacity > 1  # as many texts as the strategies that keep any
    said = Request("said", [9], SamplingParams(max_tokens=900), tenant="a", strategy="trie")
    for token in (40, 41, 42):
        said.commit([token])
        drafter.propose([said], [4])
    drafter.finish(said)
    ranked = Request("ranked", [9], SamplingParams(max_tokens=900), tenant="a", strategy="recycling")
    rank(drafter, ranked, 40, 31)
    assert (31,) in offered("recycling", 40) and (41,) in offered("trie", 40) and (41,) in offered("auto", 40)
    for strategy, tenant in itertools.product(("recycling", "trie", "auto"), ("b", None)):
        assert offered(strategy, 40, tenant) == set()
    counted = Request("counted", [9], SamplingParams(max_tokens=900), tenant="a", strategy="suffix_decoding")
    for token in (40, 41, 42):
        drafter.propose([counted], [4])
        counted.commit([token])
    drafter.finish(counted)
    assert (41,) in offered("suffix_decoding", 40)
    history(drafter, "a").remove(said.text)
    assert not any(offered(strategy, 40) for strategy in ("recycling", "trie", "auto", "suffix_decoding"))


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", None]), st.lists(st.integers(0, 4), min_size=1, max_size=20), st.booleans()),
        max_size=8,
    ),
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
    st.sampled_from(["auto", "trie"]),
)
def test_a_tenant_drafts_what_it_would_draft_alone(
    said: list[tuple[str | None, list[int], bool]], prompt: list[int], strategy: str
) -> None:
    """Other tenants' and private requests, running ones included, leave no trace in a draft."""
    make = {"auto": auto, "trie": trie}[strategy]
    together, alone = make(), make()
    for tenant, text, end in said:
        say(together, tenant, text, end=end)
        if tenant == "a":
            say(alone, tenant, text, end=end)
    for tenant, other in (("a", alone), (None, make())):
        trees = [drafter.propose([request(tenant, prompt)], [40])[0] for drafter in (together, other)]
        assert trees[0].tokens.tolist() == trees[1].tokens.tolist() and trees[0].parents.tolist() == trees[1].parents.tolist()
