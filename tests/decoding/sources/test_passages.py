"""What recurs in the prompts of different requests is a passage: kept once, and deleted with what it came from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.history import History
from outrider.decoding.sources.log.chains import BLOCK
from outrider.decoding.sources.passages import LEAST_RECURRING, Passages, marks_of
from outrider.decoding.sources.text_keys import (
    MAX_RECURRING,
    document_hash,
    is_passage,
    is_recurring,
    recurring_key,
    request_hash,
)

SHARED = 39  # tokens that two texts share at least where some of their marks are the same
EDGE = 31  # tokens of a passage that may be missing at each end


def text(seed: int, length: int = 200) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 5000, length).astype(np.int32)


def prompt(*parts: Int32Array) -> Int32Array:
    return np.concatenate(parts)


def within(part: Sequence[int] | Int32Array, whole: Int32Array) -> bool:
    return np.asarray(part, "<i4").tobytes() in np.asarray(whole, "<i4").tobytes()


def asked(history: History, name: str, prompt_ids: Int32Array, tenant: str | None = "t") -> Request:
    """A request that has ended."""
    request = Request(name, prompt_ids, SamplingParams(max_tokens=9), tenant=tenant)
    request.commit([1, 2])
    history.start(request.text)
    history.extend(request.text, 0, request.output_ids, final=True)
    history.remember(request)
    return request


def found(history: History, request: Request) -> list[Int32Array]:
    return [tokens for key, tokens in history.notes(request) if is_passage(key)]


def recalled(history: History, prompt_ids: Int32Array) -> list[Int32Array]:
    asking = Request("asking", prompt_ids, SamplingParams(max_tokens=9), tenant="t")
    return [one.tokens for one in history.recall(asking, 4) if not one.is_output]


def history() -> History:
    return History(1024 * BLOCK)


def test_what_recurs_is_recalled_for_a_request_that_resembles() -> None:
    known, document = history(), text(0)
    assert found(known, asked(known, "a", prompt(text(1, 60), document, text(2, 20)))) == []
    second = prompt(text(3, 90), document, text(4, 30))
    (passage,) = found(known, asked(known, "b", second))
    assert within(passage, document) and len(passage) >= len(document) - 2 * EDGE
    (again,) = recalled(known, np.append(second[:-3], text(5, 2)))
    assert again.tolist() == passage.tolist()
    assert found(known, asked(known, "c", prompt(text(6), document, text(7)))) == []  # it is known


def test_another_history_recalls_it_and_does_not_keep_it_again() -> None:
    here, there, document = history(), history(), text(0)
    asked(here, "a", prompt(text(1), document, text(2)))
    second = asked(here, "b", prompt(text(3), document, text(4)))
    (passage,) = found(here, second)
    for key, tokens in [*here.notes(second), *here.notes(second)]:
        there.extend(key, 0, tokens, final=True)
    (again,) = recalled(there, second.prompt_ids)
    assert again.tolist() == passage.tolist()
    asked(there, "c", prompt(text(5), document, text(6)))
    assert found(there, asked(there, "d", prompt(text(7), document, text(8)))) == []


def test_what_all_prompts_begin_with_is_kept_once() -> None:
    known, system, documents = history(), text(0, 150), [text(seed, 300) for seed in range(1, 9)]
    rng, kept = np.random.default_rng(0), []
    for number in range(200):
        some = [documents[at] for at in rng.permutation(8)[:3]]
        kept += found(known, asked(known, str(number), prompt(system, *some, text(100 + number, 25))))
    total = sum(map(len, kept))
    assert 0.8 * (len(system) + 8 * 300) < total < 1.3 * (len(system) + 8 * 300), total
    assert all(len(passage) >= LEAST_RECURRING for passage in kept)
    assert all(found(known, asked(known, f"s{number}", prompt(system, text(500 + number, 9)))) == [] for number in range(9))


def test_a_conversation_and_choices_of_one_prompt_are_no_reason() -> None:
    known, document = history(), text(0)
    conversation = prompt(text(1, 40), document, text(2, 20))
    for turn in range(5):
        asked(known, f"turn {turn}", conversation)
        conversation = prompt(conversation, text(10 + turn, 90))
    for choice in range(3):
        asked(known, f"one/{choice}", text(20, 400))
    asked(known, "twice", prompt(text(30), text(30)))
    assert all(not found(known, Request(name, [1], SamplingParams(), tenant="t")) for name in ("turn 4", "one/2", "twice"))
    (passage,) = found(known, asked(known, "another", prompt(text(40, 60), document, text(41, 20))))
    assert within(passage, document)


def test_short_and_private_ones_are_not_kept() -> None:
    known = history()
    for number in range(3):
        request = asked(known, str(number), prompt(text(number + 1), text(0, 60), text(number + 10)))
        assert found(known, request) == []
    small, private = history(), text(0)
    for number in range(3):
        asked(small, str(number), prompt(text(number + 1), private, text(number + 10)), tenant=None)
    assert recalled(small, private) == []
    assert found(small, asked(small, "a", prompt(text(20), private, text(21)))) == []  # of nobody's prompts nothing is known


def test_a_request_brings_so_many_at_most() -> None:
    known, documents = history(), [text(seed, 150) for seed in range(40)]
    asked(known, "a", prompt(*(part for at, one in enumerate(documents) for part in (text(100 + at, 50), one))))
    kept = found(
        known, asked(known, "b", prompt(*(part for at, one in enumerate(documents) for part in (text(200 + at, 50), one))))
    )
    assert len(kept) == MAX_RECURRING
    long, known = text(300, 10_000), history()
    asked(known, "a", prompt(text(1), long))
    assert [len(part) for part in found(known, asked(known, "b", prompt(text(2), long)))][:2] == [4096, 4096]


@pytest.mark.parametrize("how", ["request", "tenant", "evicted", "document"])
def test_what_is_deleted_is_not_recalled(how: str) -> None:
    known, document = history(), text(0)
    asked(known, "a", prompt(text(1), document, text(2)))
    second = asked(known, "b", prompt(text(3), document, text(4)))
    notes = known.notes(second)
    assert len(recalled(known, second.prompt_ids)) == 1
    if how == "request":
        known.remove_requests([request_hash("b")])
    elif how == "tenant":
        known.clear(dead=True)
    elif how == "evicted":
        known.remove(notes[0][0])
    else:
        known.remove_requests([document_hash(document), *marks_of(document)])
    assert recalled(known, second.prompt_ids) == [] and known.notes(second)[:-1] == []
    for key, tokens in notes if how in ("request", "document") else ():
        known.extend(key, 0, tokens, final=True)  # it comes late
    third = asked(known, "c", prompt(text(5), document, text(6)))
    fourth = asked(known, "d", prompt(text(7), document, text(8)))
    kept = found(known, third) + found(known, fourth)
    assert len(kept) == (how != "document")  # others may bring it


def test_what_stood_in_the_prompt_of_a_deleted_request_has_not_been_there() -> None:
    known, document = history(), text(0)
    asked(known, "a", prompt(text(1), document, text(2)))
    known.remove_requests([request_hash("a")])
    assert found(known, asked(known, "b", prompt(text(3), document, text(4)))) == []
    assert len(found(known, asked(known, "c", prompt(text(5), document, text(6))))) == 1


def test_of_a_deleted_document_nothing_is_kept_while_what_stands_beside_it_is() -> None:
    known, deleted, beside = history(), text(0), text(1)
    known.remove_requests([document_hash(deleted), *marks_of(deleted)])
    asked(known, "a", prompt(text(2), deleted[:-10], beside, text(3)))
    (passage,) = found(known, asked(known, "b", prompt(text(4), deleted[:-10], beside, text(5))))
    assert within(passage[EDGE + 8 :], beside) and len(passage) > 100
    assert not any(within(deleted[at : at + SHARED], passage) for at in range(len(deleted) - SHARED))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5000))
def test_all_that_is_kept_stood_in_two_prompts(seed: int, vocabulary: int) -> None:
    rng, known, prompts = np.random.default_rng(seed), Passages(1 << 13), list[Int32Array]()
    parts = [rng.integers(0, vocabulary, rng.integers(1, 300)).astype(np.int32) for _ in range(6)]
    for number in range(12):
        some = [parts[at] if rng.random() < 0.8 else rng.integers(0, vocabulary, 30) for at in rng.integers(0, 6, 3)]
        prompts.append(np.concatenate(some).astype(np.int32))
        known.look(number, prompts[-1], ())
        for key, tokens in known.of_request(number):
            assert is_recurring(key) and within(tokens, prompts[-1]) and len(tokens) <= 4096
            for at in range(len(tokens) - 8):
                assert any(within(tokens[at : at + 9], other) for other in prompts[:-1])
    assert known.num_tokens <= 1 << 13


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(SHARED, 300), st.integers(1, 5000))
def test_texts_that_share_enough_share_marks(seed: int, length: int, vocabulary: int) -> None:
    rng = np.random.default_rng(seed)
    before, shared, after, other = (rng.integers(0, vocabulary, size).astype(np.int32) for size in (70, length, 50, 60))
    marks = set(marks_of(np.concatenate([before, shared, after])))
    assert marks & set(marks_of(shared)) and marks & set(marks_of(np.concatenate([other, shared])))
    assert all(0 < mark < 1 << 40 for mark in marks)


def test_memory_is_bounded() -> None:
    known = Passages(1 << 12)
    assert known.nbytes == 0
    for number in range(300):
        known.look(number, prompt(text(number // 2, 200), text(1000 + number, 100)), ())
        assert known.num_tokens <= 1 << 12 and known.nbytes <= (4 + 6) * (1 << 12)
    known.clear()
    assert known.nbytes == 0
    assert len({recurring_key(5, number) for number in range(MAX_RECURRING)}) == MAX_RECURRING
