"""Past requests that resemble: found whatever else is remembered, forgotten when they are deleted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.embeddings import EMBEDDING, MAX_EMBEDDING, nearness, signs_of
from outrider.decoding.sources.history import History, Recalled
from outrider.decoding.sources.log.chains import BLOCK
from outrider.decoding.sources.similar import LEAST_SIMILARITY, SKETCH_TOKENS, SimilarRequests, as_tokens, of_tokens, sketch_of
from outrider.decoding.sources.text_keys import document_hash, passage_key, request_hash, sketch_key

VOCAB = 5000
OUTPUT = [7, 8, 9, 10]
DOCUMENT = list(range(100, 140))


def prompt(seed: int, length: int = 300) -> Int32Array:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def altered(tokens: Int32Array, places: list[int]) -> Int32Array:
    other = tokens.copy()
    other[places] = (other[places] + 1) % VOCAB
    return other


def meaning(seed: int, off: float = 0.0, size: int = 384) -> Int32Array:
    """The embedding of something, or of something the nearer to it the less it is off."""
    vector = np.random.default_rng(seed).standard_normal(size) + off * np.random.default_rng(seed + 1).standard_normal(size)
    return signs_of(vector.tolist())


def request(
    name: str, prompt_ids: Int32Array, references: list[list[int]] | None = None, output: list[int] | None = None,
    embedding: Int32Array | None = None,
) -> Request:  # fmt: skip
    made = Request(name, prompt_ids, SamplingParams(max_tokens=100), references or [], tenant="t", embedding=embedding)
    made.commit(output or [])
    return made


def remembered(history: History, *requests: Request) -> None:
    for one in requests:
        history.start(one.text)
        history.extend(one.text, 0, one.output_ids, final=True)
        history.remember(one)


def said(recalled: list[Recalled]) -> list[list[int]]:
    return [text.tokens.tolist() for text in recalled]


def test_a_prompt_is_found_among_many_by_what_it_shares() -> None:
    known = SimilarRequests(4096)
    assert known.nbytes == 0  # before the first
    for seed in range(3000):
        known.add(seed, sketch_of(prompt(seed)))
    for seed in range(0, 3000, 100):
        (same,) = known.find(sketch_of(prompt(seed)), 4)
        assert same.request == seed and same.similarity == pytest.approx(1.0)
        (near,) = known.find(sketch_of(altered(prompt(seed), [280, 285])), 4)
        assert near.request == seed and LEAST_SIMILARITY < near.similarity <= same.similarity
    assert known.find(sketch_of(prompt(5000)), 4) == []


def test_the_question_decides_among_those_with_one_document() -> None:
    known, document = SimilarRequests(128), prompt(1, 250)
    questions = [np.concatenate([document, prompt(10 + number, 20)]) for number in range(20)]
    for number, one in enumerate([*questions, *(prompt(seed) for seed in range(100, 150))]):
        known.add(number, sketch_of(one))
    for number, one in enumerate(questions):
        found = known.find(sketch_of(altered(one, [260])), 3)
        assert found[0].request == number
        assert len(found) == 3 and found[1].similarity < found[0].similarity  # the document alone


def test_what_all_prompts_have_counts_for_little() -> None:
    known, template = SimilarRequests(1024), prompt(0, 96)
    for seed in range(1, 500):
        known.add(seed, sketch_of(np.concatenate([template, prompt(seed, 100)])))
    assert known.find(sketch_of(np.concatenate([template, prompt(1000, 100)])), 4) == []


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60), st.sampled_from([1, 4, 16]))
def test_the_latest_are_known_and_nothing_else(steps: list[tuple[bool, int]], capacity: int) -> None:
    known = SimilarRequests(capacity)
    ring: list[int | None] = []
    for adds, name in steps:
        if not adds:
            known.remove(name)
            ring = [None if kept == name else kept for kept in ring]
        elif name not in ring[-capacity:]:
            known.add(name, sketch_of(prompt(name)))
            ring.append(name)
        else:
            known.add(name, sketch_of(prompt(name)))
    live = {kept for kept in ring[-capacity:] if kept is not None}
    assert len(known) == len(live)
    for name in range(13):
        assert [found.request for found in known.find(sketch_of(prompt(name)), 1)] == ([name] if name in live else [])
        assert known.knows(name) == (name in live)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=200), st.none() | st.integers(1, MAX_EMBEDDING))
def test_a_sketch_travels_as_a_text(tokens: list[int], size: int | None) -> None:
    sketch = sketch_of(np.array(tokens, np.int32), None if size is None else meaning(1, size=size))
    travelling = as_tokens(sketch)
    assert len(travelling) == SKETCH_TOKENS[size is not None] and travelling.min() >= 0 and travelling.max() < 4096
    assert (of_tokens(travelling) == sketch).all()


def test_an_embedding_is_found_by_its_direction_among_many_of_its_length() -> None:
    known, rng = SimilarRequests(1 << 12), np.random.default_rng(0)
    for seed in range(0, 3000, 2):
        embedding = None if seed % 100 == 50 else meaning(seed)  # some have none
        known.add(seed, sketch_of(prompt(seed), embedding))
    for seed in (0, 2, 1000, 2998):
        (same,) = known.find(sketch_of(prompt(5000), meaning(seed)), 4)
        assert same == (seed, 1.0)
        (near,) = known.find(sketch_of(prompt(5000), meaning(seed, off=0.5)), 4)
        assert near.request == seed and LEAST_SIMILARITY < near.similarity < 1
        assert known.find(sketch_of(prompt(5000), meaning(seed, off=3.0)), 4) == []
        assert known.find(sketch_of(prompt(5000)), 4) == []
    assert known.find(sketch_of(prompt(5000), meaning(0, size=383)), 4) == []  # another length
    both = known.find(sketch_of(prompt(6), meaning(2)), 4)  # the prompt of one and the embedding of another
    assert {found.request for found in both} == {2, 6} and known.find(sketch_of(prompt(2), meaning(2)), 1)[0].request == 2
    known.remove(2)
    assert [found.request for found in known.find(sketch_of(prompt(6), meaning(2)), 4)] == [6]
    for number in range(20):
        known.add(10_000 + number, sketch_of(rng.integers(0, VOCAB, 50).astype(np.int32), meaning(1)))
    latest = known.find(sketch_of(prompt(5000), meaning(1)), 3)
    assert [found.request for found in latest] == [10_019, 10_018, 10_017]


def test_signs_tell_the_angle() -> None:
    rng = np.random.default_rng(0)
    for size in (2, 3, 384, MAX_EMBEDDING):
        for _ in range(10):
            one, other = rng.standard_normal((2, size))
            other = one + rng.uniform(0, 2) * other
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            differ = sum(int(a ^ b).bit_count() for a, b in zip(signs_of(one), signs_of(other), strict=True))
            assert np.cos(np.pi * differ / 384) == pytest.approx(cosine, abs=0.3)
    assert nearness(np.array([0, 64, 128, 200, 384], np.int32)) == pytest.approx([1, 3**0.5 - 1, 0, 0, 0])
    for vector in ([1e-320], [1e6] * 3, [-1.0], [0.0, 1.0]):
        signs = signs_of(vector)
        assert len(signs) == EMBEDDING and signs[0] == len(vector) and signs.min() >= 0 and signs.max() < 1 << 24


def test_the_same_asked_in_other_words_is_recalled_by_its_embedding_here_and_elsewhere() -> None:
    here, there = History(64 * BLOCK), History(64 * BLOCK)
    one = request("a", prompt(1), [DOCUMENT], OUTPUT, meaning(1))
    remembered(here, one, request("b", prompt(2), [], [1, 2], meaning(9)))
    there.extend(one.text, 0, one.output_ids, final=True)
    for key, tokens in here.notes(one):
        there.extend(key, 0, tokens, final=True)
    asking = request("c", prompt(3), embedding=meaning(1, off=0.5))
    for history in (here, there):
        assert said(history.recall(asking, 4)) == [OUTPUT, DOCUMENT]
        assert history.recall(request("d", prompt(3)), 4) == []
    assert len(here.notes(one)[-1][1]) == SKETCH_TOKENS[1]


def test_outputs_and_documents_of_similar_requests_are_recalled() -> None:
    history = History(64 * BLOCK)
    remembered(history, request("a", prompt(1), [DOCUMENT], OUTPUT), request("b", prompt(2), [], [1, 2]))
    recalled = history.recall(request("c", altered(prompt(1), [290])), 4)
    assert said(recalled) == [OUTPUT, DOCUMENT] and [text.is_output for text in recalled] == [True, False]
    assert history.recall(request("c", prompt(3)), 4) == [] and history.recall(request("d", prompt(1)), 0) == []
    assert said(history.recall(request("a", prompt(1)), 4)) == []  # its own


def test_notes_make_another_history_recall_the_same() -> None:
    here, there = History(64 * BLOCK), History(64 * BLOCK)
    one, same = request("a", prompt(1), [DOCUMENT], OUTPUT), request("b", prompt(1), [DOCUMENT], OUTPUT)
    remembered(here, one, same)
    assert [key for key, _ in here.notes(one)] == [passage_key(request_hash("a"), 0), sketch_key(request_hash("a"))]
    assert [key for key, _ in here.notes(same)] == [sketch_key(request_hash("b"))]  # the document is known already
    there.extend(one.text, 0, one.output_ids, final=True)
    for key, tokens in [*here.notes(one), *here.notes(one)]:
        there.extend(key, 0, tokens, final=True)
    assert said(there.recall(request("c", prompt(1)), 4)) == [OUTPUT, DOCUMENT]
    assert there.num_tokens == len(OUTPUT)  # notes are not among what is drafted from whatever the prompt
    there.extend(sketch_key(5), 0, [1, 2], final=True)  # damaged
    there.extend(sketch_key(6), 4, as_tokens(sketch_of(prompt(6))), final=True)
    assert there.recall(request("c", prompt(6)), 4) == []


@pytest.mark.parametrize("how", ["request", "tenant", "evicted"])
def test_what_is_deleted_is_not_recalled(how: str) -> None:
    history = History(64 * BLOCK)
    one = request("a", prompt(1), [DOCUMENT], OUTPUT, meaning(1))
    remembered(history, one)
    notes, asking = history.notes(one), request("c", prompt(1), embedding=meaning(1))
    if how == "request":
        history.remove_requests([request_hash("a")])
    elif how == "tenant":
        history.clear(dead=True)
    else:
        for key in (one.text, *(key for key, _ in notes)):
            history.remove(key, rescued=False)
    assert history.recall(asking, 4) == [] and history.notes(one) == []
    if how == "request":  # what comes late is of no use
        for key, tokens in notes:
            history.extend(key, 0, tokens, final=True)
        history.remember(one)
        assert history.recall(asking, 4) == []


def test_a_deleted_document_is_forgotten_whoever_brought_it() -> None:
    history = History(64 * BLOCK)
    remembered(history, request("a", prompt(1), [DOCUMENT], OUTPUT))
    history.remove_requests([document_hash(np.array(DOCUMENT, np.int32))])
    assert said(history.recall(request("c", prompt(1)), 4)) == [OUTPUT]
    remembered(history, request("d", prompt(1), [DOCUMENT], OUTPUT))
    assert said(history.recall(request("e", prompt(1)), 4)) == [OUTPUT, OUTPUT]


def test_documents_take_as_much_room_as_outputs_may() -> None:
    history = History(2 * BLOCK)
    for number in range(8):
        remembered(history, request(f"r{number}", prompt(number), [[number] * 40], OUTPUT))
    assert said(history.recall(request("c", prompt(7)), 4)) == [OUTPUT, [7] * 40]
    assert all(len(history.notes(request(f"r{number}", prompt(number)))) <= 1 for number in range(4))


def test_more_than_a_few_are_moved_into_larger_arrays() -> None:
    known = SimilarRequests(1 << 12)
    assert known.nbytes == 0  # before the first
    known.add(0, sketch_of(prompt(0, 40)))
    small = known.nbytes
    for seed in range(1, 400):
        known.add(seed, sketch_of(prompt(seed, 40)))
    assert known.nbytes > 8 * small and len(known) == 400
    assert all(known.find(sketch_of(prompt(seed, 40)), 1)[0].request == seed for seed in range(400))
