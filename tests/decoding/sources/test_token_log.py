"""The token log against naive searches of the texts that were put into it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.sources.log.chains import BLOCK, bucket, place, unigram_bucket
from outrider.decoding.sources.log.token_log import LARGE, TokenLog
from tests.helpers.targets import naive_occurrences, occurrences

TEXTS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=90), min_size=1, max_size=6)


@settings(max_examples=60)
@given(TEXTS, st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_finds_every_occurrence_once(texts: list[list[int]], context: list[int]) -> None:
    log = TokenLog(2048)
    for text in texts:
        log.add(text)
    assert sorted(occurrences(log, context)) == sorted(naive_occurrences(texts, context))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 4), max_size=70)), max_size=12))
def test_texts_that_grow_in_turns_are_the_texts_added_whole(pieces: list[tuple[int, list[int]]]) -> None:
    log = TokenLog(8192)
    texts: dict[int, list[int]] = {}
    for text, piece in pieces:
        log.extend(text, piece)
        texts.setdefault(text, []).extend(piece)
    context = [0, 1, 2]
    expected = naive_occurrences(list(texts.values()), context)
    assert sorted(f[:1] for f, _ in occurrences(log, context)) == sorted(f[:1] for f, _ in expected)


def test_a_text_moves_on_in_one_piece() -> None:
    log, rng = TokenLog(64 * BLOCK), np.random.default_rng(0)
    texts = [rng.integers(0, 1000, 400).tolist() for _ in range(3)]
    for start in range(0, 400, 7):  # three texts in turns: none finds its next block free
        for name, text in enumerate(texts):
            log.extend(name, text[start : start + 7])
    for text in texts:
        for at in range(4, 390):
            followers = [f for f, length in occurrences(log, text[at - 4 : at]) if length == 4]
            assert followers == [text[at : at + 4]], at


def test_the_latest_occurrences_come_first_and_caps_hold() -> None:
    log = TokenLog(1024)
    for last in range(10, 20):
        log.add([1, 2, last])
    assert [f for f, _ in occurrences(log, [1, 2])] == [[f] for f in range(19, 9, -1)]
    assert [f for f, _ in occurrences(log, [1, 2], (9, 3, 9))] == [[19], [18], [17]]


def test_a_text_does_not_see_its_own_blocks_if_asked() -> None:
    log = TokenLog(1024)
    log.extend("a", [1, 2, 3])
    log.extend("b", [1, 2, 4])
    assert sorted(f for f, _ in occurrences(log, [1, 2], owner=log.number("a"))) == [[4]]
    log.close("a")
    assert log.number("a") == -1 and sorted(f for f, _ in occurrences(log, [1, 2])) == [[3], [4]]


def test_the_ring_forgets_the_oldest_and_keeps_what_was_frequent() -> None:
    log = TokenLog(16 * BLOCK)
    for _ in range(3):
        log.add([90, 91, 92, 93, 94, 95])
    log.add([80, 81, 82, 83, 84, 85])
    rng = np.random.default_rng(0)
    for _ in range(20):
        log.add(rng.integers(1000, 10**6, BLOCK - 4))
    assert occurrences(log, [90, 91, 92, 93]) and not occurrences(log, [80, 81, 82, 83])
    for _ in range(200):  # each time round its count is halved
        log.add(rng.integers(1000, 10**6, BLOCK - 4))
    assert not occurrences(log, [90, 91, 92, 93])
    assert len(log.arrays.tokens) == 16 * BLOCK and log.end > 200 * BLOCK


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_whatever_the_ring_went_through_what_it_finds_was_written(seed: int) -> None:
    rng = np.random.default_rng(seed)
    log = TokenLog(int(rng.integers(1, 12)) * BLOCK)
    texts: dict[int, list[int]] = {}
    for step in range(int(rng.integers(1, 60))):
        text = int(rng.integers(0, 4)) if rng.random() < 0.7 else 100 + step
        piece = rng.integers(0, 6, int(rng.integers(1, 150))).tolist()
        texts.setdefault(text, []).extend(piece)
        log.extend(text, piece)
        if rng.random() < 0.2:
            log.close(text)
            texts[1000 + step] = texts.pop(text)
    grams = {tuple(text[i : i + 3]) for text in texts.values() for i in range(len(text) - 2)}
    for context in ([0, 1], [3], [2, 2, 5]):
        for followers, length in occurrences(log, context):
            if length >= len(context) and followers:
                seen = (*context, *followers)[:3] if len(context) < 3 else tuple(context)
                assert len(seen) < 3 or seen in grams


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 4), max_size=150)), max_size=20))
def test_a_log_that_grows_finds_what_one_that_was_large_finds(pieces: list[tuple[int, list[int]]]) -> None:
    small, large = TokenLog(1 << 14, initial=1), TokenLog(1 << 14)
    texts: dict[int, list[int]] = {}
    for text, piece in pieces:
        small.extend(text, piece)
        large.extend(text, piece)
        texts.setdefault(text, []).extend(piece)
    assert small.end == large.end
    assert small.num_tokens == large.num_tokens == sum(len(text) for text in texts.values())
    for context in ([0], [1, 2], [0, 0, 3], [1, 2, 3, 4]):
        assert occurrences(small, context) == occurrences(large, context)  # in the same order
    for text, tokens in texts.items():
        assert small.tokens_of(small.number(text)).tolist() == tokens


def test_a_log_doubles_up_to_its_capacity_and_then_forgets() -> None:
    log, rng = TokenLog(32 * BLOCK, initial=4 * BLOCK), np.random.default_rng(0)
    texts = [rng.integers(0, 10**6, BLOCK - 1) for _ in range(40)]
    sizes, plain = [], log.plain
    for text in texts:
        log.add(text)
        sizes.append(len(log.arrays.tokens) // BLOCK)
    assert sizes == [4] * 4 + [8] * 4 + [16] * 8 + [32] * 24
    assert all(array is other for array, other in zip(log.arrays, log.plain, strict=True)) and log.plain is not plain
    assert all(array.flags.c_contiguous for array in log.arrays)
    assert log.oldest == 8 * BLOCK
    for number, text in enumerate(texts):
        assert [f for f, length in occurrences(log, text[:5].tolist()) if length == 5] == [text[5:9].tolist()] * (number >= 8)
    assert TokenLog(1 << 30).nbytes < 1 << 20


def test_a_large_log_grows_where_it_lies() -> None:
    """No step copies what is there, or splits more buckets than it writes tokens, twice over."""
    log, whole, rng = TokenLog(1 << 18), TokenLog(1 << 18, initial=1 << 18), np.random.default_rng(0)
    texts = rng.integers(0, 3000, (700, 512))
    sizes = set()
    for number, text in enumerate(texts):
        before, end = log.arrays, log.end
        log.extend(number, text)
        whole.extend(number, text)
        after, written = log.arrays, log.end - end
        if len(before.tokens) >= LARGE:
            assert [one.ctypes.data for one in before] == [one.ctypes.data for one in after]
            buckets = [(len(old), len(new)) for old, new in zip(before[2:5], after[2:5], strict=True)]
            assert all(new - old <= 2 * written for old, new in buckets)
            sizes.add(len(after.tokens))
            assert (after.tokens[log.end :] == -1).all() and (after.owners[log.end // BLOCK :] == -1).all()
    assert sizes == {1 << 16, 1 << 17, 1 << 18} and log.end > 1 << 18 and log.oldest == whole.oldest
    assert [len(array) for array in log.arrays] == [len(array) for array in whole.arrays]
    for text in texts[::50]:
        for length in (1, 2, 4, 9):
            assert occurrences(log, text[100 : 100 + length].tolist()) == occurrences(whole, text[100 : 100 + length].tolist())


def test_keys_keep_their_bucket_until_it_is_split() -> None:
    for buckets in range(1, 40):
        for key in range(200):
            at, later = place(key, buckets), place(key, buckets + 1)
            assert 0 <= at < buckets and later in (at, buckets)
            if buckets & (buckets - 1) == 0:
                assert at == key % buckets
            if later != at:
                assert at == buckets - (1 << (buckets.bit_length() - 1))  # whose chains the new one begins with


def test_a_count_goes_on_after_the_log_has_grown() -> None:
    log = TokenLog(16 * BLOCK, initial=2 * BLOCK)
    for _ in range(5):
        log.add([90, 91, 92, 93, 94, 95])
    assert sorted(log.arrays.counts[log.arrays.counts > 1].tolist()) == [5, 5, 5]


def test_a_removed_text_is_never_found_or_followed() -> None:
    log = TokenLog(1 << 14, initial=1)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 50, 300).tolist() for _ in range(3)]
    for start in range(0, 300, 7):
        for name, text in enumerate(texts):
            log.extend(name, text[start : start + 7])
    number = log.number(1)
    assert log.tokens_of(number).tolist() == texts[1]
    log.remove(number, rescued=False)
    assert log.number(1) == -1 and not len(log.tokens_of(number)) and log.num_tokens == 600
    assert not log.arrays.counts[log.arrays.tokens < 0].any()
    left = [texts[0], texts[2]]
    for token in range(50):
        assert sorted(occurrences(log, [token])) == sorted(naive_occurrences(left, [token]))
    log.extend(1, [7, 8])  # another text of that name
    assert log.number(1) > number and log.tokens_of(log.number(1)).tolist() == [7, 8]
    log.remove(12345, rescued=True)
    assert log.num_tokens == 602


def test_what_survived_goes_with_a_removed_text_if_asked() -> None:
    log, rng = TokenLog(16 * BLOCK), np.random.default_rng(0)
    for _ in range(3):
        log.add([90, 91, 92, 93, 94, 95])
    for _ in range(20):
        log.add(rng.integers(1000, 10**6, BLOCK - 4))
    assert not len(log.tokens_of(0)) and occurrences(log, [90, 91, 92, 93])
    log.remove(0, rescued=False)
    assert occurrences(log, [90, 91, 92, 93])
    log.remove(0, rescued=True)
    assert not occurrences(log, [93]) and not occurrences(log, [90])


def test_what_survives_after_a_removal_can_be_removed_too() -> None:
    log, rng = TokenLog(16 * BLOCK), np.random.default_rng(0)

    def fill(blocks: int) -> None:
        for _ in range(blocks):
            log.add(rng.integers(1000, 10**6, BLOCK - 4))

    for first in (90, 80):
        for _ in range(3):
            log.add([first, first + 1, first + 2, first + 3, first + 4])
        fill(6)
    assert log.end == 18 * BLOCK
    fill(2)
    assert occurrences(log, [90, 91, 92, 93]) and not len(log.tokens_of(2))  # survived in a block that has room for more
    log.remove(999, rescued=True)
    fill(7)
    assert occurrences(log, [80, 81, 82, 83]) and not len(log.tokens_of(11)) and not occurrences(log, [90])
    log.remove(999, rescued=True)
    assert not occurrences(log, [80])


def test_a_cleared_log_is_empty_and_small_and_works() -> None:
    log = TokenLog(1 << 14, initial=128)
    log.extend("a", range(1000))
    number, grown = log.number("a"), log.nbytes
    log.clear()
    assert (log.number("a"), log.end, log.num_tokens) == (-1, 0, 0) and log.nbytes < grown / 4 and not occurrences(log, [5])
    log.extend("a", [5, 6])
    assert log.number("a") > number and occurrences(log, [5]) == [([6], 1)]


def test_sizes_are_checked_and_reported() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        TokenLog(0)
    with pytest.raises(ValueError, match="initial must be at least 1"):
        TokenLog(100, 0)
    log = TokenLog(1000)
    assert len(log.arrays.tokens) == 1024 and log.nbytes < 60 * 1024
    log.extend("a", [])
    assert log.number("a") == -1 and log.end == 0


def test_one_token_has_one_bucket() -> None:
    for token in (0, 1, 77, 50256, 250_000):
        tokens = np.array([token], np.int32)
        assert bucket(tokens, 0, 1, 0, 4096) == unigram_bucket(token, 4096)
