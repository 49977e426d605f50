"""The outbox: joined, bounded, fair, and used by two threads at once."""

from __future__ import annotations

import random
import threading

import numpy as np

from outrider.cache_service.client.outbox import PIECE_TOKENS, Outbox
from outrider.cache_service.records import CacheDelta
from tests.helpers.shared_memory import delta

MANY = 1 << 30


def plain(taken: dict[str, list[CacheDelta]]) -> dict[str, list[tuple[int, int, list[int], bool]]]:
    return {tenant: [(d.text, d.offset, d.tokens.tolist(), d.final) for d in deltas] for tenant, deltas in taken.items()}


def test_contiguous_pieces_leave_as_one() -> None:
    box = Outbox(10_000)
    assert box.idle and not box.wait(0)
    box.put("a", delta(7, 0, [1, 2]))
    box.put("a", delta(8, 0, [9]))
    box.put("a", delta(7, 2, [3]))
    box.put("a", delta(7, 3, [], final=True))
    box.put("a", delta(8, 5, [4]))  # behind a gap
    box.put("a", delta(8, 6, []))  # nothing
    assert box.nbytes == 3 * 64 + 4 * 5
    assert box.wait(0) and not box.idle
    taken = box.take(MANY)
    assert plain(taken) == {"a": [(7, 0, [1, 2, 3], True), (8, 0, [9], False), (8, 5, [4], False)]}
    assert taken["a"][0].tokens.dtype == np.int32
    assert box.nbytes == 0 and not box.idle
    box.delivered()
    assert box.idle and not box.wait(0)
    box.put("a", delta(7, 0, [1], final=True))
    box.put("a", delta(7, 1, [2]))  # nothing is joined to an ended text
    assert plain(box.take(MANY)) == {"a": [(7, 0, [1], True), (7, 1, [2], False)]}


def test_long_runs_leave_in_pieces_and_only_the_last_is_final() -> None:
    box = Outbox(1 << 20)
    tokens = list(range(2 * PIECE_TOKENS + 1))
    box.put("a", delta(7, 10, tokens, final=True))
    seen = []
    for _ in range(3):
        taken = box.take(1)
        box.delivered()
        seen += plain(taken)["a"]
    assert [(offset, len(piece), final) for _, offset, piece, final in seen] == [
        (10, PIECE_TOKENS, False), (10 + PIECE_TOKENS, PIECE_TOKENS, False), (10 + 2 * PIECE_TOKENS, 1, True),
    ]  # fmt: skip
    assert [token for _, _, piece, _ in seen for token in piece] == tokens
    assert box.idle and box.nbytes == 0


def test_tenants_take_turns_whatever_one_of_them_floods() -> None:
    box = Outbox(1 << 24)
    for text in range(100):
        box.put("loud", delta(text, 0, range(PIECE_TOKENS)))
    box.put("quiet", delta(1, 0, [1, 2, 3]))
    box.put("third", delta(2, 0, [4]))
    first = box.take(2 * PIECE_TOKENS)
    box.delivered()
    assert plain(first)["quiet"] == [(1, 0, [1, 2, 3], False)] and "third" in first
    box.put("quiet", delta(5, 0, [6]))
    second = box.take(PIECE_TOKENS + 1)
    box.delivered()
    assert set(second) == {"loud", "quiet"}


def test_a_full_share_drops_its_oldest_texts_whole() -> None:
    box = Outbox(1000)
    box.put("b", delta(50, 0, [1] * 200))  # 864 bytes, of another tenant
    for text in range(10):
        box.put("a", delta(text, 0, [text] * 30))  # 184 bytes each: five fit
    assert (box.dropped_texts, box.dropped_tokens) == (5, 150)
    assert box.nbytes <= 2000
    box.put("a", delta(0, 30, [0] * 5))  # the rest of a text that was dropped is of no use
    box.put("a", delta(0, 35, [0], final=True))
    assert box.dropped_tokens == 156
    taken = plain(box.take(MANY))
    assert [entry[0] for entry in taken["a"]] == [5, 6, 7, 8, 9]
    assert taken["b"] == [(50, 0, [1] * 200, False)]
    box.delivered()
    box.put("a", delta(0, 0, [3]))  # another text of that name
    assert plain(box.take(MANY)) == {"a": [(0, 0, [3], False)]}
    box.delivered()
    box.put("a", delta(99, 0, [1] * 500))  # larger than the share
    assert box.idle and box.nbytes == 0 and box.dropped_texts == 6


def test_what_is_given_back_comes_first_and_is_joined_again() -> None:
    box = Outbox(10_000)
    box.put("a", delta(7, 0, [1, 2]))
    box.put("a", delta(8, 0, [5]))
    taken = box.take(MANY)
    box.put("a", delta(9, 0, [6]))
    box.put("a", delta(7, 2, [3], final=True))
    box.give_back(taken)
    assert box.nbytes == 3 * 64 + 4 * 5
    assert box.wait(0)
    assert plain(box.take(MANY)) == {"a": [(7, 0, [1, 2, 3], True), (8, 0, [5], False), (9, 0, [6], False)]}


def test_what_is_given_back_is_bounded_too() -> None:
    box = Outbox(1000)
    box.put("a", delta(1, 0, [1] * 200))
    taken = box.take(MANY)
    box.put("a", delta(2, 0, [2] * 200))
    box.give_back(taken)
    assert [entry[0] for entry in plain(box.take(MANY))["a"]] == [2]
    assert box.dropped_texts == 1


def test_a_forgotten_tenant_leaves_nothing_and_its_growing_texts_stay_away() -> None:
    box = Outbox(10_000)
    box.put("a", delta(7, 0, [1]))
    box.put("b", delta(7, 0, [1]))
    taken = box.take(MANY)
    box.put("a", delta(7, 1, [2]))
    box.put("a", delta(8, 0, [3], final=True))
    box.discard("a")
    box.give_back(taken)
    box.put("a", delta(7, 2, [4]))
    box.put("a", delta(9, 0, [5]))
    assert plain(box.take(MANY)) == {"b": [(7, 0, [1], False)], "a": [(9, 0, [5], False)]}
    box.delivered()
    box.put("a", delta(7, 3, [6], final=True))
    assert box.idle
    box.discard("never seen")


def test_a_forgotten_request_takes_all_its_choices() -> None:
    box = Outbox(10_000)
    for text in (5 << 16, 5 << 16 | 1, 6 << 16):
        box.put("a", delta(text, 0, [1]))
    taken = box.take(MANY)
    box.put("a", delta(5 << 16 | 2, 0, [2]))
    box.discard("a", 5)
    box.give_back(taken)
    box.put("a", delta(5 << 16, 1, [3]))
    assert plain(box.take(MANY)) == {"a": [(6 << 16, 0, [1], False)]}


def test_a_request_forgotten_while_its_ended_texts_are_out_does_not_come_back() -> None:
    box = Outbox(10_000)
    box.put("a", delta(7 << 16, 0, [1], final=True))
    box.put("a", delta(8 << 16, 0, [2], final=True))
    taken = box.take(MANY)
    box.discard("a", 7)
    box.give_back(taken)
    assert plain(box.take(MANY)) == {"a": [(8 << 16, 0, [2], True)]}


def test_threads_lose_nothing_and_keep_each_text_in_order() -> None:
    box = Outbox(1 << 24)
    sizes = {(f"t{text % 3}", text): 2000 for text in range(12)}
    got: dict[tuple[str, int], list[int]] = {key: [] for key in sizes}
    done = threading.Event()

    def write(tenant: str, text: int) -> None:
        at, size, dice = 0, sizes[tenant, text], random.Random(text)
        while at < size:
            count = min(size - at, dice.randint(1, 40))
            box.put(tenant, delta(text, at, range(at, at + count), final=at + count == size))
            at += count

    def drain() -> None:
        dice = random.Random(99)
        while not (done.is_set() and box.idle):
            if not box.wait(0.01):
                continue
            taken = box.take(dice.randint(1, 3000))
            if dice.random() < 0.3:
                box.give_back(taken)
                continue
            for tenant, deltas in taken.items():
                for one in deltas:
                    assert len(got[tenant, one.text]) == one.offset
                    got[tenant, one.text] += one.tokens.tolist()
            box.delivered()

    reader = threading.Thread(target=drain)
    writers = [threading.Thread(target=write, args=key) for key in sizes]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join(30)
    assert not reader.is_alive()
    assert got == {key: list(range(size)) for key, size in sizes.items()}
    assert box.nbytes == 0 and box.dropped_tokens == 0


def test_nothing_is_joined_to_an_ended_text() -> None:
    box = Outbox(10_000)
    box.put("a", delta(7, 0, [1], final=True))
    box.put("a", delta(7, 1, [2]))
    assert plain(box.take(MANY)) == {"a": [(7, 0, [1], True), (7, 1, [2], False)]}


def test_a_text_larger_than_the_share_is_dropped() -> None:
    box = Outbox(1000)
    box.put("a", delta(1, 0, [1] * 500))
    assert box.idle and box.nbytes == 0 and box.dropped_texts == 1
