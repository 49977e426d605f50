"""What is kept of a tenant: the rule of deletions, pieces in any order, time, quota, and what is worth keeping."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache_service.records import CacheDelta, TextBatch
from outrider.cache_service.server.eviction import GRAM, worths
from outrider.cache_service.server.snapshot import Snapshot, SnapshotText
from outrider.cache_service.texts import MAX_EVICTED, MAX_HELD, CachedText, Ledger, TenantTexts


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def piece(text: int, offset: int, ids: Sequence[int], final: bool = False, epoch: int = 0) -> TextBatch:
    return TextBatch(1, 0, epoch, (CacheDelta(text, offset, tokens(*ids), final),))


def whole(texts: TenantTexts, text: int, ids: Sequence[int], now_s: float = 0.0) -> None:
    texts.apply(piece(text, 0, ids, final=True), now_s)


def kept(texts: TenantTexts) -> dict[int, list[int]]:
    return {key: text.tokens.tolist() for key, text in texts.texts.items() if text.length}


T1, T1B, T2 = 1 << 16, (1 << 16) + 1, 2 << 16


def test_admits_by_epoch() -> None:
    ledger = Ledger(3)
    old = ledger.admit(TextBatch(1, 0, 2, (CacheDelta(T1, 0, tokens(1), True),), (9,), (T2,)))
    assert old == ledger.admit(TextBatch(1, 0, 0)) and not (old.cleared or old.removed or old.evicted or old.deltas)
    assert ledger.allows(9 << 16) and ledger.allows(T2), "nothing of an older epoch counts"
    same = ledger.admit(TextBatch(1, 1, 3, (CacheDelta(T1, 0, tokens(1), True),), (9,), (T2,)), 5.0)
    assert (same.cleared, same.removed, same.evicted, len(same.deltas)) == (False, (9,), (T2,), 1)
    assert ledger.removed == {9: 5.0} and not ledger.allows(9 << 16 | 3) and not ledger.allows(T2)
    newer = ledger.admit(TextBatch(1, 2, 4, (CacheDelta(T2, 0, tokens(1), True),)))
    assert newer.cleared and len(newer.deltas) == 1 and ledger.epoch == 4
    assert not ledger.admit(TextBatch(1, 2, 4)).cleared, "cleared once"


def test_removal_wins_within_a_batch_and_after_it() -> None:
    ledger = Ledger()
    both = TextBatch(1, 0, 0, (CacheDelta(T1, 0, tokens(1), False), CacheDelta(T2, 0, tokens(2), False)), removed=(1,))
    assert [delta.text for delta in ledger.admit(both).deltas] == [T2]
    assert ledger.admit(piece(T1B, 0, [5])).deltas == (), "all choices of the request"
    assert len(ledger.admit(piece(T2, 1, [5])).deltas) == 1
    ledger.admit(both, 9.0)
    assert ledger.removed == {1: 0.0}, "the time of the first removal stays"


def test_evicted_keys_are_forgotten_in_their_order() -> None:
    ledger = Ledger(evicted=range(MAX_EVICTED))
    ledger.evict([MAX_EVICTED, MAX_EVICTED + 1, 2])
    assert len(ledger.evicted) == MAX_EVICTED
    assert [key for key in range(MAX_EVICTED + 2) if key not in ledger.evicted] == [0, 1]


def test_admits_a_snapshot() -> None:
    texts = (
        SnapshotText(T1, tokens(1, 2), True, 0.0),
        SnapshotText(T2, tokens(3), False, 0.0, 4),
        SnapshotText(T1B, tokens(1), True, 0.0),
    )
    snapshot = Snapshot("5-0", 2, 100, "", 0.0, texts, ((7, 1.0), (8, 2.0)), (T1B, 5))
    ledger = Ledger(2, [(8, 1.0), (2, 1.0)], [5])
    admitted = ledger.admit_snapshot(snapshot)
    assert admitted is not None and not admitted.cleared
    assert [(delta.text, delta.offset, delta.tokens.tolist(), delta.final) for delta in admitted.deltas] == [
        (T1, 0, [1, 2], True)
    ]
    assert (admitted.removed, admitted.evicted) == ((7,), (T1B,)), "what was not known here"
    assert ledger.removed == {8: 1.0, 2: 1.0, 7: 1.0}, "what was removed here stays removed"
    newer = Ledger(1, [(1, 1.0)]).admit_snapshot(snapshot)
    assert newer is not None and newer.cleared and [delta.text for delta in newer.deltas] == [T1, T2]
    assert newer.deltas[1].offset == 4
    ahead = Ledger(3)
    assert ahead.admit_snapshot(snapshot) is None and ahead.epoch == 3 and ahead.removed == {}


@given(st.data())
@settings(max_examples=60)
def test_pieces_in_any_order_any_number_of_times(data: st.DataObject) -> None:
    ids = list(range(100, 100 + data.draw(st.integers(1, 30))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=6)) | {0, len(ids)})
    pieces = [(start, ids[start:end], end == len(ids)) for start, end in pairwise(cuts)]
    overlaps = data.draw(st.lists(st.tuples(st.integers(0, len(ids)), st.integers(0, len(ids))), max_size=4))
    pieces += [(start, ids[start:end], False) for start, end in overlaps] + [(0, [], False)]
    texts = TenantTexts()
    for start, part, final in data.draw(st.permutations(pieces)) + data.draw(st.lists(st.sampled_from(pieces), max_size=3)):
        texts.apply(piece(T1, start, part, final), 0.0)
    assert kept(texts) == {T1: ids}
    assert texts.texts[T1].final and texts.num_tokens == len(ids) and not texts.texts[T1].held


def test_a_gap_hides_what_is_beyond() -> None:
    texts = TenantTexts()
    texts.apply(piece(T1, 3, [4, 5]), 1.0)
    texts.apply(piece(T1, 5, [], final=True), 2.0)
    assert kept(texts) == {} and texts.num_tokens == 2, "what waits counts for the quota"
    texts.apply(piece(T1, 0, [1, 2]), 3.0)
    assert kept(texts) == {T1: [1, 2]} and not texts.texts[T1].final
    restored = TenantTexts.restore(texts.snapshot("1-0", 100, "", 0.0))
    for either in (texts, restored):
        either.apply(piece(T1, 2, [3]), 4.0)
        assert kept(either) == {T1: [1, 2, 3, 4, 5]} and either.texts[T1].final and either.num_tokens == 5


def test_pieces_that_wait_are_bounded() -> None:
    text = CachedText()
    waiting = [text.extend(2 * at, tokens(2 * at), False) for at in range(1, MAX_HELD + 10)]
    assert waiting == [True] * MAX_HELD + [False] * 9
    assert text.num_tokens == MAX_HELD and text.length == 0
    assert not text.extend(2, tokens(2), False), "a duplicate changes nothing"
    assert text.extend(2, tokens(2, 3), False), "a longer one does"


def test_duplicates_do_not_make_a_text_younger() -> None:
    texts = TenantTexts()
    texts.apply(piece(T1, 0, [1, 2]), 10.0)
    texts.apply(piece(T1, 0, [1, 2]), 50.0)
    assert texts.texts[T1].updated_s == 10.0
    texts.apply(piece(T1, 1, [2, 3]), 60.0)
    assert texts.texts[T1].updated_s == 60.0


def test_deletion_by_request_and_by_tenant() -> None:
    texts = TenantTexts()
    for key in (T1, T1B, T2):
        whole(texts, key, [1, 2, 3])
    assert texts.apply(TextBatch(1, 0, 0, removed=(1,)), 5.0).removed == (1,)
    assert kept(texts) == {T2: [1, 2, 3]} and texts.num_tokens == 3
    whole(texts, T1, [1, 2, 3])
    assert kept(texts) == {T2: [1, 2, 3]}, "a late piece brings nothing back"
    assert texts.apply(TextBatch(1, 0, 1), 6.0).cleared
    assert kept(texts) == {} and texts.num_tokens == 0
    whole(texts, T2, [1, 2, 3])
    assert kept(texts) == {}, "of the epoch before"
    texts.apply(piece(T2, 0, [7], epoch=1), 7.0)
    assert kept(texts) == {T2: [7]}


def test_time() -> None:
    texts = TenantTexts()
    whole(texts, T1, [1, 2, 3], 10.0)
    texts.apply(piece(T2, 0, [1, 2]), 20.0)  # still growing
    texts.apply(TextBatch(1, 0, 0, removed=(9,)), 25.0)
    assert texts.expire(100.0, 110.0) == [], "as old as the limit"
    assert texts.expire(100.0, 111.0) == [T1] and texts.num_tokens == 2
    assert texts.expire(100.0, 125.0) == [T2] and texts.num_tokens == 0 and texts.ledger.removed == {9: 25.0}
    whole(texts, T1, [1, 2, 3], 126.0)
    assert kept(texts) == {}, "what was let go of does not come back late"
    texts.expire(100.0, 125.1)
    assert texts.ledger.removed == {}
    whole(texts, 3 << 16, [1], 0.0)
    assert texts.expire(float("inf"), 1e12) == [], "no limit"


def test_one_look_lets_go_of_a_tenth_and_of_the_oldest() -> None:
    texts, keys = TenantTexts(), [number << 16 for number in range(100)]
    for number, key in enumerate(keys):
        whole(texts, key, [1, 2, 3], float(number))
    assert texts.expire(100.0, 1e9) == keys[:10], "a wrong clock does not cost all"
    looks = 1
    while texts.texts:
        texts.expire(100.0, 1e9)
        looks += 1
    assert looks < 40, "what is old goes all the same"


def naive_worths(texts: list[list[int]], ages_s: list[float], half_life_s: float) -> list[float]:
    """The rule, text by text."""
    grams = [[tuple(ids[at : at + GRAM]) for at in range(max(1, len(ids) - GRAM + 1))] for ids in texts]
    result = []
    for index, (mine, age_s) in enumerate(zip(grams, ages_s, strict=True)):
        total = 0
        for gram in mine:
            holders = [other for other, theirs in enumerate(grams) if gram in theirs and gram]
            total += len(holders) if holders and holders[-1] == index else 1
        result.append(2 ** (-age_s / half_life_s) * total / len(mine))
    return result


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12))
@settings(max_examples=60)
def test_worths_against_the_rule(texts: list[list[int]]) -> None:
    ages_s = [float(len(texts) - at) for at in range(len(texts))]
    found = worths([tokens(*ids) for ids in texts], np.array(ages_s), 3.0)
    assert found == pytest.approx(naive_worths(texts, ages_s, 3.0))


def test_a_share_of_the_grams_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, 1000, 20) for _ in range(30)]
    texts = [np.concatenate([phrases[at] for at in rng.integers(0, 5 + index, 30)]).astype(np.int32) for index in range(25)]
    ages_s = np.arange(25.0)[::-1]
    exact = worths(texts, ages_s, 10.0)
    monkeypatch.setattr("outrider.cache_service.server.eviction.MAX_GRAMS", 4000)  # one in four of 14,925
    sampled = worths(texts, ages_s, 10.0)
    assert not np.array_equal(sampled, exact)
    assert sampled == pytest.approx(exact, rel=0.25)


def test_what_goes_first() -> None:
    texts = TenantTexts()
    common = [1, 2, 3, 4, 5, 6]
    whole(texts, 1 << 16, common, 10.0)
    whole(texts, 2 << 16, [20, 21, 22, 23, 24, 25], 10.0)  # said once
    whole(texts, 3 << 16, common, 11.0)
    whole(texts, 4 << 16, common, 12.0)  # the latest of three
    texts.apply(piece(5 << 16, 0, [30, 31, 32, 33]), 0.0)  # oldest of all, but it grows
    whole(texts, 6 << 16, [40, 41, 42, 43], 12.0)
    # Equal worths of 1 << 16 and 2 << 16: the smaller key. 3 << 16 is a younger copy, 6 << 16 new, 4 << 16 counts three.
    order = [1 << 16, 2 << 16, 3 << 16, 6 << 16, 4 << 16, 5 << 16]
    assert texts.evict(27, 5.0, 12.0) == order[:1]
    assert texts.evict(0, 5.0, 12.0) == order[1:]
    assert list(texts.ledger.evicted) == order
    with pytest.raises(ValueError, match="half_life_s must be above 0, got 0"):
        texts.evict(0, 0.0, 12.0)


def test_eviction_does_not_depend_on_the_order_of_arrival() -> None:
    rng = np.random.default_rng(0)
    arrivals = [(key << 16, rng.integers(0, 30, 40).tolist(), float(rng.integers(0, 5))) for key in range(1, 80)]
    evicted = []
    for seed in range(3):
        random.Random(seed).shuffle(arrivals)
        texts = TenantTexts()
        for key, ids, now_s in arrivals:
            whole(texts, key, ids, now_s)
        evicted.append(texts.evict(1000, 3.0, 6.0))
        assert texts.num_tokens == 1000
        restored = TenantTexts.restore(texts.snapshot("1-0", 100, "", 0.0))
        assert restored.evict(500, 3.0, 6.0) == texts.evict(500, 3.0, 6.0)
    assert evicted[0] == evicted[1] == evicted[2] and len(evicted[0]) == 54


def test_a_flood_of_copies_leaves_one() -> None:
    texts = TenantTexts()
    for key in range(1, 101):
        whole(texts, key << 16, [1, 2, 3, 4, 5, 6, 7, 8], float(key))
    whole(texts, 200 << 16, [11, 12, 13, 14, 15, 16, 17, 18], 100.0)
    texts.evict(16, 50.0, 100.0)
    assert sorted(texts.texts) == [100 << 16, 200 << 16]


def test_what_is_kept_does_not_hold_on_to_what_it_came_in() -> None:
    texts = TenantTexts()
    shared = np.arange(1000, dtype=np.int32)
    texts.apply(TextBatch(1, 0, 0, (CacheDelta(T1, 0, shared[:5], True), CacheDelta(T2, 7, shared[:5], False))), 0.0)
    held = texts.texts[T2].held[7][0]
    assert not np.shares_memory(texts.texts[T1].tokens, shared) and not np.shares_memory(held, shared)
    with pytest.raises(TypeError):
        texts.texts[T1] = CachedText()  # type: ignore[index]


def test_snapshot_of_everything() -> None:
    texts = TenantTexts(epoch=4)
    texts.apply(piece(T1, 0, [1, 2], final=True, epoch=4), 1.0)
    texts.apply(piece(T2, 0, [3], epoch=4), 2.0)
    texts.apply(TextBatch(1, 0, 4, removed=(9,), evicted=(77,)), 3.0)
    snapshot = texts.snapshot("8-1", 100, "ab", 5.0)
    head = (snapshot.stream_id, snapshot.epoch, snapshot.vocab_size, snapshot.tokenizer_revision, snapshot.created_s)
    assert head == ("8-1", 4, 100, "ab", 5.0)
    assert [(*text[:1], text.tokens.tolist(), *text[2:]) for text in snapshot.texts] == [
        (T1, [1, 2], True, 1.0, 0), (T2, [3], False, 2.0, 0),
    ]  # fmt: skip
    assert (snapshot.removed, snapshot.evicted) == (((9, 3.0),), (77,))
    restored = TenantTexts.restore(snapshot)
    assert kept(restored) == kept(texts) and restored.num_tokens == 3 and restored.ledger.epoch == 4
    assert not restored.ledger.allows(9 << 16) and not restored.ledger.allows(77)
    assert {key: text.updated_s for key, text in restored.texts.items()} == {T1: 1.0, T2: 2.0}
