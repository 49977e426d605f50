"""What slots hold, where a request is placed, and that a reused entry is always that of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.decoding.arrays import Int32Array
from outrider.engine.kv.kv_cache import KVShape, SlotCache
from outrider.engine.kv.prefix_cache import WORTH_COPYING, Placement, PrefixCache, common_prefix


def ids(*parts: Sequence[int]) -> Int32Array:
    return np.array([token for part in parts for token in part], np.int32)


SYSTEM = range(1000, 1040)


def filled(*texts: Int32Array, scope: str = "s") -> PrefixCache:
    cache = PrefixCache(len(texts))
    for slot, text in enumerate(texts):
        if len(text):
            cache.keep(slot, scope, text)
    return cache


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [((), (1,), 0), ((1, 2), (1, 2), 2), ((1, 2, 3), (1, 2), 2), ((1, 2), (1, 3), 1), ((2,), (1,), 0), ((1, 2, 3), (1, 9, 3), 1)],
)
def test_common_prefix(one: Sequence[int], other: Sequence[int], length: int) -> None:
    assert common_prefix(ids(one), ids(other)) == common_prefix(ids(other), ids(one)) == length


def test_a_conversation_goes_on_in_its_slot_and_its_last_token_is_left_to_compute() -> None:
    cache = filled(ids([5] * 30), ids(SYSTEM, [1]), ids())
    assert cache.place(ids(SYSTEM, [1, 2, 3]), "s", (2, 0, 1)) == Placement(1, 41, None, 41)
    assert cache.tokens(1).tolist() == [*SYSTEM, 1]
    assert cache.place(ids(SYSTEM, [1]), "s", (0, 1)) == Placement(1, 40, None, 40)  # the same prompt again


def test_a_system_prompt_is_copied_and_the_conversation_that_it_began_stays() -> None:
    long = ids(SYSTEM, range(60))
    cache = filled(long, ids(), ids([7] * 9))
    assert cache.place(ids(SYSTEM, [-1, -2]), "s", (0, 2, 1)) == Placement(1, 40, 0, 0)  # the empty slot before older ones
    assert cache.tokens(0).tolist() == long.tolist() and cache.tokens(1).tolist() == list(SYSTEM)
    assert cache.place(ids(SYSTEM, [-3]), "s", (0,)) == Placement(0, 40, None, 40)  # no other slot is free
    assert cache.tokens(0).tolist() == list(SYSTEM)


def test_a_live_slot_is_copied_behind_what_a_free_one_holds() -> None:
    live, old = ids(SYSTEM, [1, 2]), ids(SYSTEM[:9], [5])
    assert filled(live, old).place(ids(SYSTEM, [9]), "s", (1,)) == Placement(1, 40, 0, 9)


def test_few_tokens_are_not_copied() -> None:
    for count in (WORTH_COPYING - 1, WORTH_COPYING):
        found = filled(ids(SYSTEM), ids()).place(ids(SYSTEM[:count], [1]), "s", (1,))
        assert (found.length, found.source) == ((count, 0) if count == WORTH_COPYING else (0, None))


def test_without_a_match_the_slot_that_was_released_longest_ago_goes() -> None:
    cache = filled(ids([1] * 20), ids([2] * 20), ids([3] * 20))
    assert cache.place(ids([4, 4]), "s", (1, 2, 0)) == Placement(1, 0, None, 0)
    assert not len(cache.tokens(1)) and len(cache.tokens(2)) == 20


@pytest.mark.parametrize("scope", [None, "t"])
def test_nothing_is_reused_across_scopes_or_without_one(scope: str | None) -> None:
    cache = filled(ids(SYSTEM), ids(SYSTEM))
    assert cache.place(ids(SYSTEM, [1]), scope, (0, 1)) == Placement(0, 0, None, 0)
    cache.keep(0, scope, ids(SYSTEM, [1]))
    assert cache.place(ids(SYSTEM, [1, 2]), "s", (0,)).source == 1
    assert (len(cache.tokens(0)), len(cache.tokens(1))) == (40, 40)


def test_what_is_overwritten_is_known_no_more() -> None:
    cache = filled(ids(SYSTEM))
    cache.cut(0, 50)
    assert len(cache.tokens(0)) == 40
    cache.cut(0, 12)
    assert cache.tokens(0).tolist() == list(SYSTEM[:12])
    cache.clear()
    assert not len(cache.tokens(0))


def test_check_integrity_finds_more_entries_than_there_are() -> None:
    cache = filled(ids(SYSTEM))
    cache.check_integrity(40)
    with pytest.raises(AssertionError):
        cache.check_integrity(39)


@pytest.mark.parametrize(("panel", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (8, torch.float32), (8, torch.bfloat16)])
def test_copied_and_moved_entries_are_those_of_the_source_and_no_others(panel: int, dtype: torch.dtype) -> None:
    cache = SlotCache(KVShape(2, 3, 4, dtype, torch.device("cpu"), panel=panel), 3, 10)
    generator = torch.Generator().manual_seed(1)
    for layer in range(2):
        for slot in range(3):
            written = torch.rand((2, 3, 10, 4), generator=generator).to(dtype)
            keys, values = cache.write(layer, slot, 0, *written)
            assert torch.equal(torch.stack((keys, values)), written)
            keys, values = cache.write(layer, slot, 7, *written[:, :, 7:9])
            assert torch.equal(torch.stack((keys, values)), written[:, :, :9])
    before = [cache.entries(slot, 10) for slot in range(3)]
    cache.copy(2, 0, 7, 3)
    for kind in range(2):
        copied = cache.entries(0, 10)[kind]
        assert torch.equal(copied[:, :, 3:7], before[2][kind][:, :, 3:7])
        assert torch.equal(copied[:, :, :3], before[0][kind][:, :, :3]) and torch.equal(
            copied[:, :, 7:], before[0][kind][:, :, 7:]
        )
        assert all(torch.equal(cache.entries(slot, 10)[kind], before[slot][kind]) for slot in (1, 2))
    cache.compact(1, 2, (0, 3, 6))
    for kind in range(2):
        expected = before[1][kind].clone()
        expected[:, :, 2:5] = before[1][kind][:, :, [2, 5, 8]]
        assert torch.equal(cache.entries(1, 10)[kind], expected)


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_reuses_only_entries_of_the_same_tokens_and_scope(seed: int) -> None:
    """Slots of which every entry is written down as the sequence and the scope that it belongs to."""
    rng = np.random.default_rng(seed)
    slots, hits = 5, 0
    cache = PrefixCache(slots)
    entries: list[list[tuple[str | None, bytes]]] = [[] for _ in range(slots)]
    free, running = list(range(slots)), dict[int, tuple[str | None, Int32Array, int]]()
    prefixes = [rng.integers(0, 3, length).astype(np.int32) for length in (0, 20, 45, 70)]
    for _ in range(1500):
        if free and (not running or rng.random() < 0.3):
            scope = (None, "a", "b")[int(rng.integers(3))]
            tokens = ids(prefixes[int(rng.integers(4))], rng.integers(0, 3, int(rng.integers(1, 12))))
            found = cache.place(tokens, scope, free)
            if found.source is not None:
                assert found.source != found.slot and found.length - found.start >= WORTH_COPYING
                entries[found.slot][found.start :] = entries[found.source][found.start : found.length]
            wanted = [(scope, tokens[: at + 1].tobytes()) for at in range(found.length)]
            assert entries[found.slot][: found.length] == wanted and found.length < len(tokens)
            hits += found.length
            free.remove(found.slot)
            running[found.slot] = scope, tokens, found.length
        elif rng.random() < 0.2:
            slot = int(rng.choice(list(running)))
            del running[slot]
            free.append(slot)
        else:  # a step of one of them: a chunk, and drafts behind it
            slot = int(rng.choice(list(running)))
            scope, tokens, computed = running[slot]
            end = min(len(tokens), computed + int(rng.integers(1, 30)))
            cache.cut(slot, computed)
            entries[slot][computed:] = [(scope, tokens[: at + 1].tobytes()) for at in range(computed, end)]
            entries[slot] += [(scope, b"draft")] * 3
            cache.keep(slot, scope, tokens[:end])
            grown = tokens if end < len(tokens) else ids(tokens, rng.integers(0, 3, 1))
            running[slot] = scope, grown, end
            if len(grown) > 120:
                del running[slot]
                free.append(slot)
    assert hits > 500
