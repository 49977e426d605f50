"""Snapshots in bytes: what goes in comes out, and nothing but a valid snapshot or CorruptSnapshotError from any bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.keeper.snapshot import (
    CorruptSnapshotError,
    Snapshot,
    SnapshotText,
    TextTable,
    decode_snapshot,
    encode_snapshot,
)

FEW = settings(max_examples=40)


def plain(snapshot: Snapshot) -> tuple[object, ...]:
    """All of a snapshot, comparable."""
    texts = [(*text[:1], text.tokens.tolist(), *text[2:]) for text in snapshot.texts]
    head = (snapshot.stream_id, snapshot.epoch, snapshot.vocab_size, snapshot.tokenizer_revision, snapshot.created_s)
    return *head, texts, snapshot.removed, snapshot.evicted


def text(key: int, tokens: list[int], final: bool = True, updated_s: float = 0.0, offset: int = 0) -> SnapshotText:
    return SnapshotText(key, np.array(tokens, np.int32), final, updated_s, offset)


def sealed(body: bytes) -> bytes:
    """With a checksum that is right, so that what comes after it is tested."""
    return body + hashlib.blake2b(body, digest_size=16).digest()


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    vocab_size = draw(st.sampled_from([100, 1 << 16, 150_000]))
    times = st.floats(0, 1e10)
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=12)
    texts = draw(
        st.lists(st.builds(text, st.integers(0, 2**80 - 1), tokens, st.booleans(), times, st.integers(0, 2**30)), max_size=4)
    )
    removed = draw(st.lists(st.tuples(st.integers(0, 2**64 - 1), times), max_size=3))
    evicted = draw(st.lists(st.integers(0, 2**80 - 1), max_size=3))
    stream_id, revision = draw(st.sampled_from([("0-0", ""), ("1732195528000-17", "c0ffee" * 10)]))
    epoch, created_s = draw(st.integers(0, 2**32 - 1)), draw(times)
    return Snapshot(stream_id, epoch, vocab_size, revision, created_s, tuple(texts), tuple(removed), tuple(evicted))


SMALL = Snapshot("5-1", 2, 100, "ab", 3.0, (text(1 << 16, [4, 5]), text(2 << 16, [6], False, 1.5, 7)), ((8, 2.5),), (9,))


@FEW
@given(snapshots())
def test_round_trip(snapshot: Snapshot) -> None:
    data = encode_snapshot(snapshot)
    decoded = decode_snapshot(data)
    assert plain(decoded) == plain(snapshot)
    assert encode_snapshot(decoded) == data


@FEW
@given(snapshots(), st.data())
def test_damage_is_found(snapshot: Snapshot, data: st.DataObject) -> None:
    encoded = encode_snapshot(snapshot)
    at = data.draw(st.integers(0, len(encoded) - 1))
    flipped = bytearray(encoded)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), encoded[:at], encoded + encoded[: at + 1], encoded[at + 1 :]):
        with pytest.raises(CorruptSnapshotError):
            decode_snapshot(damaged)


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda rest: sealed(b"OUTRSNAP\1\0" + rest))))
def test_any_bytes(data: bytes) -> None:
    try:
        snapshot = decode_snapshot(data)
    except CorruptSnapshotError:
        return
    assert encode_snapshot(snapshot) == data


@FEW
@given(snapshots(), st.data())
def test_a_right_checksum_saves_nothing(snapshot: Snapshot, data: st.DataObject) -> None:
    """Whoever makes a snapshot with a valid checksum gets one that can be used, or is refused."""
    body = bytearray(encode_snapshot(snapshot)[:-16])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(8, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_snapshot(sealed(bytes(body)))
    except CorruptSnapshotError:
        return
    assert all(0 <= token < decoded.vocab_size for piece in decoded.texts for token in piece.tokens)
    assert all(piece.offset + len(piece.tokens) < 2**31 and np.isfinite(piece.updated_s) for piece in decoded.texts)
    assert plain(decode_snapshot(encode_snapshot(decoded))) == plain(decoded)


def header(**changes: int | float | bytes) -> bytes:
    """Of an empty snapshot, with changes."""
    fields: dict[str, int | float | bytes] = {
        "magic": b"OUTRSNAP", "version": 1, "width": 2, "epoch": 0, "vocab_size": 100, "created_s": 0.0, "texts": 0, "removed": 0,
        "evicted": 0, "tokens": 0, "stream_id": 3, "revision": 0,
    }  # fmt: skip
    return struct.pack("<8sHBxIIdIIIQBB", *(fields | changes).values())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (header(version=7) + b"0-0", "a snapshot of version 7; known: 1"),
        (header(magic=b"OUTRSNAQ") + b"0-0", "do not begin like a snapshot"),
        (b"", "do not begin like a snapshot"),
        (header(texts=2**32 - 1) + b"0-0", "4294967295 texts"),
        (header(removed=2**32 - 1) + b"0-0", "do not hold"),
        (header(tokens=2**64 - 1) + b"0-0", "18446744073709551615 tokens"),
        (header(vocab_size=0) + b"0-0", "a vocabulary of 0"),
        (header(vocab_size=2**32 - 1) + b"0-0", "a vocabulary of 4294967295"),
        (header(width=3) + b"0-0", "do not hold"),
        (header(created_s=float("nan")) + b"0-0", "a time is not a number"),
        (header() + b"0/0", "malformed"),
        (header(revision=1) + b"0-0\xff", "malformed"),
        (header(texts=1) + b"0-0" + struct.pack("<QHIId", 1, 0, 0, 1, 0.0), "do not add up to 0 tokens"),
        (header(texts=1, tokens=1) + b"0-0" + struct.pack("<QHIIdH", 1, 0, 2**31 - 1, 1, 0.0, 5), "a text of 2147483648 tokens"),
        (header(texts=1, tokens=1) + b"0-0" + struct.pack("<QHIIdH", 1, 0, 0, 1, 0.0, 100), "token 100 of a vocabulary of 100"),
        (header(texts=1, tokens=1) + b"0-0" + struct.pack("<QHIIdH", 1, 0, 0, 1, float("inf"), 5), "a time is not a number"),
    ],
)
def test_what_is_refused_and_why(body: bytes, message: str) -> None:
    assert decode_snapshot(sealed(header() + b"0-0")).stream_id == "0-0", "the header alone is right"
    tracemalloc.start()
    try:
        with pytest.raises(CorruptSnapshotError, match=message):
            decode_snapshot(sealed(body))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 17, "counts are checked before anything is allocated"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream_id": "now"}, "stream_id must be MS-SEQ, got 'now'"),
        ({"stream_id": "٣-0"}, "stream_id must be"),
        ({"tokenizer_revision": "a b"}, "tokenizer_revision must be"),
        ({"epoch": -1}, "epoch must be"),
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"texts": (text(1, [100]),)}, "tokens must be between 0 and 99, got 100"),
        ({"texts": (text(1, [-1]),)}, "tokens must be between 0 and 99, got -1"),
    ],
)
def test_what_no_field_holds(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_snapshot(dataclasses.replace(SMALL, **changes))  # type: ignore[arg-type]


def test_a_table_is_a_sequence() -> None:
    table = decode_snapshot(encode_snapshot(SMALL)).texts
    assert isinstance(table, TextTable) and len(table) == 2
    assert [entry.text for entry in table] == [1 << 16, 2 << 16]
    assert table[1].tokens.tolist() == table[-1].tokens.tolist() == [6]
    assert table[1][2:] == (False, 1.5, 7) and table[0][2:] == (True, 0.0, 0)
    assert [entry.text for entry in table[1:]] == [2 << 16]
    with pytest.raises(IndexError):
        table[2]
    with pytest.raises(ValueError, match="read-only"):
        table[0].tokens[0] = 1


def test_many_texts() -> None:
    """As large as makes a difference to a loop, and of the size that the layout says."""
    rng, count = np.random.default_rng(0), 20_000
    requests, tokens = rng.integers(0, 2**64, count, np.uint64), rng.integers(0, 50_000, count * 10).astype(np.int32)
    table = TextTable(
        requests,
        np.zeros(count, np.uint16),
        np.full(count, 1 << 31, np.uint32),
        np.full(count, 10, np.uint32),
        np.arange(count),
        tokens,
    )
    data = encode_snapshot(Snapshot("1-0", 0, 50_000, "", 0.0, table))
    assert len(data) == struct.calcsize("<8sHBxIIdIIIQBB") + 3 + count * (26 + 20) + 16
    decoded = decode_snapshot(data).texts
    assert isinstance(decoded, TextTable)
    assert np.array_equal(decoded.requests, requests) and np.array_equal(decoded.tokens, tokens)
    last = list(decoded)[-1]
    assert (last.text, last.final, last.updated_s) == (int(requests[-1]) << 16, True, count - 1)
    assert last.tokens.tolist() == tokens[-10:].tolist()
