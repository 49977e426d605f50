"""Histories against a model that keeps each text as a dictionary of its tokens."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.request import PUBLIC
from outrider.decoding.sources.history import HELD_TEXTS, HELD_TOKENS, Histories, History
from outrider.decoding.sources.log.chains import BLOCK
from outrider.decoding.sources.log.token_log import TokenLog
from outrider.decoding.sources.text_keys import request_hash, text_key
from tests.helpers.targets import Occurrence, naive_occurrences, occurrences

KEYS = [text_key("a/0"), text_key("a/1"), text_key("b")]
END = 4  # the end token, where there is one


def history_of(end_tokens: tuple[int, ...] = (), capacity: int = 1 << 15) -> History:
    """A history whose log grows from the start."""
    history = History(capacity, end_tokens)
    history.log = TokenLog(capacity, initial=1)
    return history


def next_tokens(found: list[Occurrence]) -> list[tuple[int, int]]:
    """The next token and how much agrees, of each occurrence; sorted."""
    return sorted((after[0], length) for after, length in found)


def found(history: History, context: list[int]) -> list[tuple[int, int]]:
    return next_tokens(occurrences(history.log, context))


def content(text: int, generation: int) -> list[int]:
    """What a text says: the same whoever sends it."""
    rng = random.Random(f"{text} {generation}")
    return [rng.randrange(5) for _ in range(rng.choice([0, 1, 70, 200]))]


@dataclass
class ModelText:
    known: dict[int, int] = field(default_factory=dict)
    end: int | None = None
    dead: bool = False
    past: list[list[int]] = field(default_factory=list)  # complete texts of the name before

    def prefix(self) -> list[int]:
        tokens: list[int] = []
        while len(tokens) in self.known:
            tokens.append(self.known[len(tokens)])
        return tokens

    def complete(self) -> bool:
        return self.end is not None and len(self.prefix()) >= self.end


@dataclass
class Model:
    end_tokens: tuple[int, ...]
    texts: dict[int, ModelText] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)
    generation: Counter[int] = field(default_factory=Counter)

    def start(self, text: int) -> None:
        old = self.texts.setdefault(text, ModelText())
        if old.dead or old.complete():
            self.texts[text] = ModelText(past=[] if old.dead else [*old.past, old.prefix()])
            self.generation[text] += 1

    def extend(self, text: int, offset: int, tokens: list[int], final: bool) -> None:
        if text not in self.texts and (text >> 16 in self.removed or not (tokens or final)):
            return
        entry = self.texts.setdefault(text, ModelText())
        if not entry.dead and not entry.complete():
            entry.known.update(enumerate(tokens, offset))
            entry.end = offset + len(tokens) if final else entry.end

    def remove(self, text: int) -> None:
        self.texts[text] = ModelText(dead=True)

    def remove_requests(self, names: list[int]) -> None:
        self.removed.update(names)
        for text in [text for text in self.texts if text >> 16 in names]:
            self.remove(text)

    def clear(self, dead: bool) -> None:
        dying = [text for text, entry in self.texts.items() if entry.dead or (dead and not entry.complete())]
        self.texts = {text: ModelText(dead=True) for text in dying}

    def segments(self) -> list[list[int]]:
        whole = [text for entry in self.texts.values() for text in (*entry.past, entry.prefix())]
        parts: list[list[int]] = []
        for text in whole:
            parts.append([])
            for token in text:
                if token in self.end_tokens:
                    parts.append([])
                else:
                    parts[-1].append(token)
        return [part for part in parts if part]


def check(history: History, model: Model) -> None:
    segments = model.segments()
    numbers = np.unique(history.log.arrays.owners)
    read = [history.log.tokens_of(number).tolist() for number in numbers if number >= 0]
    assert sorted(read) == sorted(segments)
    assert history.num_tokens == sum(map(len, segments))
    counts = Counter(token for segment in segments for token in segment)
    assert {t: n for t, n in enumerate(history.frequencies.tolist()) if n} == counts
    for context in ([0], [1, 2], [3, 3], [2, 0, 1, 3]):
        assert found(history, context) == next_tokens(naive_occurrences(segments, context))
    for text in KEYS:
        entry = model.texts.get(text)
        tail = [] if entry is None or entry.complete() or entry.dead else entry.prefix()
        grows = bool(tail) and tail[-1] not in model.end_tokens
        assert (history.number(text) >= 0) == grows


ACTIONS = st.one_of(
    *[st.tuples(st.just("piece"), st.sampled_from(KEYS), st.integers(0, 200), st.integers(0, 120)) for _ in range(8)],
    *[st.tuples(st.just("next"), st.sampled_from(KEYS), st.integers(0, 90)) for _ in range(8)],
    st.tuples(st.just("remove"), st.sampled_from(KEYS), st.booleans()),
    st.tuples(st.just("remove_requests"), st.lists(st.sampled_from([request_hash("a"), request_hash("b")]))),
    st.tuples(st.just("clear"), st.booleans()),
    *[st.tuples(st.just("start"), st.sampled_from(KEYS)) for _ in range(2)],
)


@settings(max_examples=50, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.sampled_from([(), (END,), (0, END)]))
def test_whatever_happens_the_log_holds_what_the_model_holds(actions: list[tuple], end_tokens: tuple[int, ...]) -> None:
    history, model = history_of(end_tokens), Model(end_tokens)
    for name, *args in actions:
        if name in ("piece", "next"):
            text, *rest = args
            whole = content(text, model.generation[text])
            known = len(model.texts[text].prefix()) if text in model.texts else 0
            offset = min(rest[0] if name == "piece" else known, len(whole))
            tokens = whole[offset : offset + rest[-1]]
            piece = (text, offset, tokens, offset + len(tokens) == len(whole))
            history.extend(*piece)
            model.extend(*piece)
        elif name == "remove":
            history.remove(args[0], rescued=args[1])
            model.remove(args[0])
        else:
            getattr(history, name)(*args)
            getattr(model, name)(*args)
    check(history, model)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([(), (END,)]))
def test_pieces_in_any_order_and_twice_make_the_whole_texts(rng: random.Random, end_tokens: tuple[int, ...]) -> None:
    texts = {text_key(f"r{number}"): [rng.randrange(5) for _ in range(rng.randrange(150))] for number in range(4)}
    pieces = []
    for text, tokens in texts.items():
        for _ in range(2):  # cut in two ways: pieces overlap
            cuts = sorted({0, len(tokens), *(rng.randrange(len(tokens) + 1) for _ in range(rng.randrange(8)))})
            bounds = list(pairwise(cuts)) or [(0, 0)]
            pieces += [(text, start, tokens[start:end], end == len(tokens)) for start, end in bounds]
    pieces += rng.sample(pieces, len(pieces) // 2)
    rng.shuffle(pieces)
    mixed, model = history_of(end_tokens), Model(end_tokens)
    for piece in pieces:
        mixed.extend(*piece)
    for text, tokens in texts.items():
        model.extend(text, 0, tokens, True)
    check(mixed, model)
    assert not len(mixed._held) and not mixed._held.num_tokens and not mixed.log._open


def test_a_removed_text_stays_removed_until_it_starts_again() -> None:
    history, text, late = History(1000), text_key("a/0"), text_key("a/1")
    history.start(text)
    history.extend(text, 0, [1, 2, 3])
    history.remove_requests([request_hash("a")])
    history.extend(text, 3, [1, 2, 3])
    history.extend(late, 0, [1, 2, 3])
    assert not found(history, [1]) and history.num_tokens == 0 and not history.frequencies.any()
    history.clear(dead=False)
    history.extend(text, 0, [1, 2, 3])
    assert history.num_tokens == 0
    history.start(text)
    history.extend(text, 0, [1, 5])
    history.extend(late, 0, [1, 2, 3])
    assert found(history, [1]) == [(5, 1)]


def test_a_request_that_starts_before_a_deletion_and_writes_after_it_writes_nothing() -> None:
    history = History(1000)
    history.start(1)
    history.clear(dead=True)
    history.extend(1, 0, [1, 2])
    assert history.num_tokens == 0


def test_a_name_used_again_keeps_both_texts_and_removes_both() -> None:
    history = History(1000)
    for follower_token in (5, 6):
        history.start(1)
        history.extend(1, 0, [1, follower_token], final=True)
    assert found(history, [1]) == [(5, 1), (6, 1)]
    history.remove(1)
    assert found(history, [1]) == [] and history.num_tokens == 0


def test_what_waits_behind_gaps_is_bounded() -> None:
    history = History(1 << 14)
    for text in range(HELD_TEXTS + 1):
        history.extend(text, 1, [8, 9])
        history.extend(text, 1, [8, 9])
    for text in (0, 1, HELD_TEXTS):
        history.extend(text, 0, [7])
    assert found(history, [7, 8]) == [(9, 2)] * 2  # of the first nothing is left
    history.extend(1000, 1, list(range(HELD_TOKENS // 2)))
    history.extend(1001, 1, list(range(HELD_TOKENS // 2 + 1)))
    assert history._held.num_tokens == HELD_TOKENS // 2 + 1
    history.extend(1001, 0, [5])
    assert history._held.num_tokens == 0 and history.num_tokens > 8000


def test_of_pieces_with_one_offset_the_longer_waits_and_those_behind_the_end_do_not() -> None:
    history = History(1000)
    for piece in ([3], [3, 4, 5], [3, 4]):
        history.extend(1, 2, piece)
    assert history._held.num_tokens == 3
    history.extend(1, 9, [9])
    history.extend(1, 0, [1, 2])
    assert history.log.tokens_of(history.number(1)).tolist() == [1, 2, 3, 4, 5] and history._held.num_tokens == 1
    history.extend(1, 5, [6], final=True)
    assert history.num_tokens == 6 and history._held.num_tokens == 0 and len(history._held) == 0


def test_names_are_bounded_and_those_of_texts_that_are_there_are_kept() -> None:
    history = History(4 * BLOCK)
    for text in range(5000):
        history.extend(text, 0, [text % 50, 1], final=True)
        if text % 3 == 0:
            history.remove(1_000_000 + text, rescued=False)
    assert len(history._texts) <= 1024 and not history.log._open
    before = history.num_tokens
    history.extend(4999, 0, [4999 % 50, 1], final=True)
    assert history.num_tokens == before
    for text in range(5000):  # never complete, and behind a gap
        history.extend(text, 5, [1, 2])
        history.extend(30_000 + text, 0, [1])
    assert len(history._texts) <= 1024 and len(history.log._open) <= 1024 and len(history._held) <= HELD_TEXTS


def test_of_an_evicted_text_only_what_is_left_is_subtracted_and_its_surviving_runs_go() -> None:
    history, rng = History(16 * BLOCK), np.random.default_rng(0)
    for text in range(3):
        history.extend(text, 0, [90, 91, 92, 93, 94, 95], final=True)
    long = rng.integers(1000, 2000, 30 * BLOCK)
    history.extend(50, 0, long)
    assert found(history, [90, 91, 92, 93]) and history.frequencies[90] == 3
    history.remove(0, rescued=False)
    assert found(history, [90, 91, 92, 93]) and history.frequencies[90] == 3  # its tokens have left before
    left = history.log.tokens_of(history.number(50))
    assert 8 * BLOCK <= len(left) < 16 * BLOCK and left.tolist() == long[-len(left) :].tolist()
    history.remove(50)
    assert not found(history, [90]) and not found(history, left[-2:].tolist()) and history.num_tokens == 0
    assert (history.frequencies[1000:] == np.bincount(long[: -len(left)], minlength=len(history.frequencies))[1000:]).all()


def test_tenants_have_histories_of_their_own() -> None:
    memory = Histories(1 << 20)
    memory.end_tokens = (9,)
    a, b = memory.of("a"), memory.of("b")
    assert a is not None and b is not None and memory.of(None) is None
    assert memory.of("a") is a and memory.of(PUBLIC) is memory.public
    for history in (a, memory.public):
        history.extend(1, 0, [1, 9, 2, 3])
    assert a.num_tokens == 3 and a.number(1) >= 0 and b.num_tokens == 0
    assert memory.nbytes < 3 << 20  # a tenant with little text takes little
    a.clear(dead=True)
    a.extend(1, 4, [5, 6])
    assert a.num_tokens == 0 and memory.public.num_tokens == 3
