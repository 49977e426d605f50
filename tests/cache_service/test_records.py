"""Batches in bytes: the layout as documented, and nothing but a valid batch or CorruptRecordError from any bytes."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service import records
from cache_service.records import CacheDelta, CorruptRecordError, TextBatch, decode_batch, encode_batch, split_deltas

FEW = settings(max_examples=40)  # each draws a batch, which is what takes the time


def plain(batch: TextBatch) -> tuple[object, ...]:
    """All of a batch, comparable."""
    deltas = [(delta.text, delta.offset, delta.tokens.tolist(), delta.final) for delta in batch.deltas]
    return batch.origin, batch.sequence, batch.epoch, deltas, batch.removed, batch.evicted


def delta(text: int, offset: int, tokens: list[int], final: bool = False) -> CacheDelta:
    return CacheDelta(text, offset, np.array(tokens, np.int32), final)


@st.composite
def batches(draw: st.DrawFn, vocab_size: int) -> TextBatch:
    tokens = st.lists(st.one_of(st.integers(0, vocab_size - 1), st.sampled_from([0, vocab_size - 1])), max_size=20)
    deltas = draw(
        st.lists(st.builds(delta, st.integers(0, 2**80 - 1), st.integers(0, 2**31 - 21), tokens, st.booleans()), max_size=4)
    )
    removed = draw(st.lists(st.integers(0, 2**64 - 1), max_size=3))
    evicted = draw(st.lists(st.integers(0, 2**80 - 1), max_size=3))
    numbers = draw(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)))
    return TextBatch(*numbers, tuple(deltas), tuple(removed), tuple(evicted))


def sealed(body: bytes) -> bytes:
    """With a checksum that is right, so that what comes after it is tested."""
    return body + struct.pack("<I", zlib.crc32(body))


def test_the_documented_bytes() -> None:
    batch = TextBatch(1, 2, 3, (delta((5 << 16) | 1, 4, [7, 8], final=True),))
    spelled = (
        "01 02 0100 0000 0000 0100000000000000 02000000 03000000", "0500000000000000 0100 04000080 0200", "0700 0800", "a3750361",
    )  # fmt: skip
    data = encode_batch(batch, 100)
    assert data == bytes.fromhex("".join(spelled))
    assert all(line in (records.__doc__ or "").replace("\n", " ") for line in spelled)
    assert plain(decode_batch(data, 100)) == plain(batch)


@pytest.mark.parametrize(("vocab_size", "width"), [(2, 2), (1 << 16, 2), ((1 << 16) + 1, 3), (1 << 24, 3)])
def test_bytes_of_a_token(vocab_size: int, width: int) -> None:
    empty = len(encode_batch(TextBatch(0, 0, 0), vocab_size))
    assert empty == 28
    full = TextBatch(0, 0, 0, (delta(1, 0, [vocab_size - 1, 0, 1] * 1000),), (5,), (6, 7))
    data = encode_batch(full, vocab_size)
    assert len(data) == empty + 16 + 3000 * width + 8 + 2 * 10
    assert plain(decode_batch(data, vocab_size)) == plain(full)


@pytest.mark.parametrize("vocab_size", [1 << 16, 150_000])
@FEW
@given(data=st.data())
def test_round_trip(vocab_size: int, data: st.DataObject) -> None:
    batch = data.draw(batches(vocab_size))
    assert plain(decode_batch(encode_batch(batch, vocab_size), vocab_size)) == plain(batch)


@FEW
@given(batches(150_000), st.data())
def test_damage_is_found(batch: TextBatch, data: st.DataObject) -> None:
    encoded = encode_batch(batch, 150_000)
    at = data.draw(st.integers(0, len(encoded) - 1))
    flipped = bytearray(encoded)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), encoded[:at], encoded + encoded[: at + 1], encoded[at + 1 :]):
        with pytest.raises(CorruptRecordError):
            decode_batch(damaged, 150_000)


@given(st.one_of(st.binary(max_size=120), st.binary(max_size=120).map(sealed)))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(CorruptRecordError):  # the header's counts never fit by chance
        decode_batch(b"\x02" + data, 100)
    try:
        batch = decode_batch(data, 100)
    except CorruptRecordError:
        return
    assert encode_batch(batch, 100) == data


@FEW
@given(batches(100), st.data())
def test_a_right_checksum_saves_nothing(batch: TextBatch, data: st.DataObject) -> None:
    """Whoever makes a record with a valid checksum gets a batch that says exactly these bytes, or is refused."""
    body = bytearray(encode_batch(batch, 100)[:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_batch(sealed(bytes(body)), 100)
    except CorruptRecordError:
        return
    assert encode_batch(decoded, 100) == sealed(bytes(body))
    assert all(token < 100 for piece in decoded.deltas for token in piece.tokens)
    assert all(piece.offset + len(piece.tokens) < 2**31 for piece in decoded.deltas)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (struct.pack("<BBHHHQII", 1, 2, 0xFFFF, 0xFFFF, 0xFFFF, 0, 0, 0), "too few"),
        (struct.pack("<BBHHHQII", 2, 2, 0, 0, 0, 0, 0, 0), "schema version 2; known: 1"),
        (struct.pack("<BBHHHQII", 1, 3, 0, 0, 0, 0, 0, 0), "tokens of 3 bytes"),
        (struct.pack("<BBHHHQII", 1, 2, 0, 0, 0, 0, 0, 0) + b"\0\0", "do not hold"),
        (struct.pack("<BBHHHQIIQHIH", 1, 2, 1, 0, 0, 0, 0, 0, 5, 0, 0, 0xFFFF), "do not hold"),
        (struct.pack("<BBHHHQIIQHIHH", 1, 2, 1, 0, 0, 0, 0, 0, 5, 0, 0, 1, 100), "token 100 of a vocabulary of 100"),
        (struct.pack("<BBHHHQIIQHIHH", 1, 2, 1, 0, 0, 0, 0, 0, 5, 0, 2**31 - 1, 1, 1), "at most 2147483647"),
        (b"\1" * (records.MAX_BATCH_BYTES + 1), "a record takes between 28 and 1048576"),
        (b"", "a record takes between"),
    ],
)
def test_what_is_refused_and_why(body: bytes, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError, match=message):
            decode_batch(sealed(body), 100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body) + (1 << 16), "counts are checked before anything is allocated"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"origin": 2**64}, "origin must be"),
        ({"sequence": -1}, "sequence must be"),
        ({"epoch": 2**32}, "epoch must be"),
        ({"removed": (2**64,)}, "removed must hold"),
        ({"evicted": (2**80,)}, "evicted must hold"),
        ({"evicted": (0,) * (records.MAX_ITEMS + 1)}, "at most 65535 items"),
        ({"deltas": (delta(2**80, 0, [1]),)}, "text must be"),
        ({"deltas": (delta(1, 2**31 - 1, [1]),)}, "offset must be"),
        ({"deltas": (delta(1, -1, [1]),)}, "offset must be"),
        ({"deltas": (delta(1, 0, [100]),)}, "tokens must be between 0 and 99"),
        ({"deltas": (delta(1, 0, [-1]),)}, "tokens must be between 0 and 99"),
        ({"deltas": (delta(1, 0, [1] * 65536),)}, "tokens of a delta must be at most 65535"),
        ({"deltas": (delta(1, 0, [1] * 65535),) * 9}, "at most 1048576 bytes"),
    ],
)
def test_what_no_field_holds(changes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_batch(dataclasses.replace(TextBatch(1, 2, 3), **changes), 100)  # type: ignore[arg-type]


def test_vocabularies_beyond_three_bytes() -> None:
    with pytest.raises(ValueError, match="vocab_size must be between 1 and 16777216, got 16777217"):
        encode_batch(TextBatch(0, 0, 0), (1 << 24) + 1)


def test_split_deltas() -> None:
    rng = np.random.default_rng(0)
    lengths = {1: 200_000, 2: 0, 3: 70_000, 4: 65_535, 5: 400_000, 6: 3}
    texts = {text: rng.integers(0, 100_000, length).astype(np.int32) for text, length in lengths.items()}
    groups = list(split_deltas([CacheDelta(text, 10 * text, tokens, text != 4) for text, tokens in texts.items()], 100_000))
    assert len(groups) == 3, "738,000 tokens of 3 bytes"
    found: dict[int, list[CacheDelta]] = {}
    for group in groups:
        for piece in decode_batch(encode_batch(TextBatch(0, 0, 0, group), 100_000), 100_000).deltas:
            found.setdefault(piece.text, []).append(piece)
    for text, pieces in found.items():
        assert np.array_equal(np.concatenate([piece.tokens for piece in pieces]), texts[text])
        assert [piece.offset for piece in pieces] == [10 * text + at for at in range(0, max(1, lengths[text]), 65535)]
        assert [piece.final for piece in pieces] == [False] * (len(pieces) - 1) + [text != 4]
    assert list(split_deltas([], 100)) == []
    assert [len(group) for group in split_deltas([delta(1, 0, [])] * 65_600, 100)] == [65_534, 66]
