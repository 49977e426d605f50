"""Batches and snapshots in bytes: the layout as documented, and from any bytes nothing but a valid one or the one named error."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache_service import records
from outrider.cache_service.records import CacheDelta, CorruptRecordError, TextBatch, decode_batch, encode_batch, split_deltas
from outrider.cache_service.server.snapshot import (
    CorruptSnapshotError,
    Snapshot,
    SnapshotText,
    TextTable,
    decode_snapshot,
    encode_snapshot,
)
from tests.helpers.shared_memory import delta

FEW = settings(max_examples=40)  # each draws a batch or a snapshot, which is what takes the time


def text(key: int, tokens: list[int], final: bool = True, updated_s: float = 0.0, offset: int = 0) -> SnapshotText:
    return SnapshotText(key, np.array(tokens, np.int32), final, updated_s, offset)


def plain(value: TextBatch | Snapshot) -> tuple[object, ...]:
    """All of it, comparable."""
    if isinstance(value, TextBatch):
        deltas = [(delta.text, delta.offset, delta.tokens.tolist(), delta.final) for delta in value.deltas]
        return value.origin, value.sequence, value.epoch, deltas, value.removed, value.evicted
    texts = [(*text[:1], text.tokens.tolist(), *text[2:]) for text in value.texts]
    head = (value.stream_id, value.epoch, value.vocab_size, value.tokenizer_revision, value.created_s)
    return *head, texts, value.removed, value.evicted


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


def use_snapshot(snapshot: Snapshot) -> None:
    assert all(0 <= token < snapshot.vocab_size for piece in snapshot.texts for token in piece.tokens)
    assert all(piece.offset + len(piece.tokens) < 2**31 and np.isfinite(piece.updated_s) for piece in snapshot.texts)
    assert plain(decode_snapshot(encode_snapshot(snapshot))) == plain(snapshot)


@dataclass(frozen=True)
class Format:
    """Of batches of one vocabulary, or of snapshots."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    error: type[ValueError]
    checksum: Callable[[bytes], bytes]
    magic: bytes  # in which no byte is changed where the checksum is right
    use: Callable[[Any], None]  # asserts that what was read is sound
    values: st.SearchStrategy[Any]

    def sealed(self, body: bytes) -> bytes:
        """With a checksum that is right, so that what comes after it is tested."""
        return body + self.checksum(body)


def batch_format(vocab_size: int) -> Format:
    def use(batch: TextBatch) -> None:
        assert all(token < vocab_size for piece in batch.deltas for token in piece.tokens)
        assert all(piece.offset + len(piece.tokens) < 2**31 for piece in batch.deltas)

    return Format(
        lambda batch: encode_batch(batch, vocab_size), lambda data: decode_batch(data, vocab_size), CorruptRecordError,
        lambda body: struct.pack("<I", zlib.crc32(body)), b"", use, batches(vocab_size),
    )  # fmt: skip


BATCH, WIDE_BATCH = batch_format(100), batch_format(150_000)  # tokens of 2 and of 3 bytes
SNAPSHOT = Format(
    encode_snapshot, decode_snapshot, CorruptSnapshotError, lambda body: hashlib.blake2b(body, digest_size=16).digest(),
    b"OUTRSNAP", use_snapshot, snapshots(),
)  # fmt: skip
FORMATS = pytest.mark.parametrize("format", [BATCH, WIDE_BATCH, SNAPSHOT], ids=["batch", "wide batch", "snapshot"])


@FORMATS
@FEW
@given(data=st.data())
def test_round_trip(format: Format, data: st.DataObject) -> None:
    value = data.draw(format.values)
    encoded = format.encode(value)
    decoded = format.decode(encoded)
    assert plain(decoded) == plain(value) and format.encode(decoded) == encoded


@FORMATS
@FEW
@given(data=st.data())
def test_damage_is_found(format: Format, data: st.DataObject) -> None:
    encoded = format.encode(data.draw(format.values))
    at = data.draw(st.integers(0, len(encoded) - 1))
    flipped = bytearray(encoded)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), encoded[:at], encoded + encoded[: at + 1], encoded[at + 1 :]):
        with pytest.raises(format.error):
            format.decode(damaged)


@FORMATS
@given(rest=st.binary(max_size=200), right=st.booleans())
def test_any_bytes(format: Format, rest: bytes, right: bool) -> None:
    begun = rest if not format.magic else format.magic + b"\1\0" + rest
    data = format.sealed(begun) if right else rest
    with pytest.raises(format.error):  # what a header counts never fits by chance
        format.decode(b"\x02" + data)
    try:
        value = format.decode(data)
    except format.error:
        return
    assert format.encode(value) == data


@FORMATS
@FEW
@given(data=st.data())
def test_a_right_checksum_saves_nothing(format: Format, data: st.DataObject) -> None:
    """Whoever makes a record with a valid checksum gets one that can be used and says exactly these bytes, or is refused."""
    whole = format.encode(data.draw(format.values))
    body = bytearray(whole[: -len(format.checksum(b""))])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(len(format.magic), len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = format.decode(format.sealed(bytes(body)))
    except format.error:
        return
    format.use(decoded)
    if format is not SNAPSHOT:
        assert format.encode(decoded) == format.sealed(bytes(body))


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


def header(**changes: int | float | bytes) -> bytes:
    """Of an empty snapshot, with changes."""
    fields: dict[str, int | float | bytes] = {
        "magic": b"OUTRSNAP", "version": 1, "width": 2, "epoch": 0, "vocab_size": 100, "created_s": 0.0, "texts": 0, "removed": 0,
        "evicted": 0, "tokens": 0, "stream_id": 3, "revision": 0,
    }  # fmt: skip
    return struct.pack("<8sHBxIIdIIIQBB", *(fields | changes).values())


def of_one_token(offset: int, updated_s: float, token: int) -> bytes:
    return header(texts=1, tokens=1) + b"0-0" + struct.pack("<QHIIdH", 1, 0, offset, 1, updated_s, token)


@pytest.mark.parametrize(
    ("format", "body", "message"),
    [
        (BATCH, struct.pack("<BBHHHQII", 1, 2, 0xFFFF, 0xFFFF, 0xFFFF, 0, 0, 0), "too few"),
        (BATCH, struct.pack("<BBHHHQII", 2, 2, 0, 0, 0, 0, 0, 0), "schema version 2; known: 1"),
        (BATCH, struct.pack("<BBHHHQII", 1, 3, 0, 0, 0, 0, 0, 0), "tokens of 3 bytes"),
        (BATCH, struct.pack("<BBHHHQII", 1, 2, 0, 0, 0, 0, 0, 0) + b"\0\0", "do not match the header"),
        (BATCH, struct.pack("<BBHHHQIIQHIH", 1, 2, 1, 0, 0, 0, 0, 0, 5, 0, 0, 0xFFFF), "do not match the header"),
        (BATCH, struct.pack("<BBHHHQIIQHIHH", 1, 2, 1, 0, 0, 0, 0, 0, 5, 0, 0, 1, 100), "token 100 of a vocabulary of 100"),
        (BATCH, struct.pack("<BBHHHQIIQHIHH", 1, 2, 1, 0, 0, 0, 0, 0, 5, 0, 2**31 - 1, 1, 1), "at most 2147483647"),
        (BATCH, b"\1" * (records.MAX_BATCH_BYTES + 1), "a record takes between 28 and 1048576"),
        (BATCH, b"", "a record takes between"),
        (SNAPSHOT, header(version=7) + b"0-0", "a snapshot of version 7; known: 1"),
        (SNAPSHOT, header(magic=b"OUTRSNAQ") + b"0-0", "do not begin like a snapshot"),
        (SNAPSHOT, b"", "do not begin like a snapshot"),
        (SNAPSHOT, header(texts=2**32 - 1) + b"0-0", "4294967295 texts"),
        (SNAPSHOT, header(removed=2**32 - 1) + b"0-0", "do not match the header"),
        (SNAPSHOT, header(tokens=2**64 - 1) + b"0-0", "18446744073709551615 tokens"),
        (SNAPSHOT, header(vocab_size=0) + b"0-0", "a vocabulary of 0"),
        (SNAPSHOT, header(vocab_size=2**32 - 1) + b"0-0", "a vocabulary of 4294967295"),
        (SNAPSHOT, header(width=3) + b"0-0", "do not match the header"),
        (SNAPSHOT, header(created_s=float("nan")) + b"0-0", "a time is not a number"),
        (SNAPSHOT, header() + b"0/0", "malformed"),
        (SNAPSHOT, header(revision=1) + b"0-0\xff", "malformed"),
        (SNAPSHOT, header(texts=1) + b"0-0" + struct.pack("<QHIId", 1, 0, 0, 1, 0.0), "do not add up to 0 tokens"),
        (SNAPSHOT, of_one_token(2**31 - 1, 0.0, 5), "a text of 2147483648 tokens"),
        (SNAPSHOT, of_one_token(0, 0.0, 100), "token 100 of a vocabulary of 100"),
        (SNAPSHOT, of_one_token(0, float("inf"), 5), "a time is not a number"),
    ],
)
def test_what_is_refused_and_why(format: Format, body: bytes, message: str) -> None:
    assert decode_snapshot(SNAPSHOT.sealed(header() + b"0-0")).stream_id == "0-0", "the header alone is right"
    tracemalloc.start()
    try:
        with pytest.raises(format.error, match=message):
            format.decode(format.sealed(body))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body) + (1 << 16), "counts are checked before anything is allocated"


BEYOND: list[tuple[Format, str, list[Any]]] = [
    (BATCH, "origin", [2**64]),
    (BATCH, "sequence", [-1]),
    (BATCH, "epoch", [2**32]),
    (BATCH, "removed", [(2**64,)]),
    (BATCH, "evicted", [(2**80,), (0,) * (records.MAX_ITEMS + 1)]),
    (BATCH, "deltas", [(delta(2**80, 0, [1]),), (delta(1, 2**31 - 1, [1]),), (delta(1, -1, [1]),)]),
    (BATCH, "deltas", [(delta(1, 0, each),) for each in ([100], [-1], [1] * 65536)] + [(delta(1, 0, [1] * 65535),) * 9]),
    (SNAPSHOT, "stream_id", ["now", "٣-0"]),
    (SNAPSHOT, "tokenizer_revision", ["a b"]),
    (SNAPSHOT, "epoch", [-1]),
    (SNAPSHOT, "vocab_size", [0]),
    (SNAPSHOT, "texts", [(text(1, [100]),), (text(1, [-1]),)]),
]


@pytest.mark.parametrize(("format", "field", "value"), [(*case, value) for *case, values in BEYOND for value in values])
def test_what_no_field_holds(format: Format, field: str, value: Any) -> None:
    whole: Any = TextBatch(1, 2, 3) if format is BATCH else SMALL
    said = "text|offset|tokens|bytes" if field in ("deltas", "texts") else f"{field}|items"
    with pytest.raises(ValueError, match=said):
        format.encode(dataclasses.replace(whole, **{field: value}))
    with pytest.raises(ValueError, match="vocab_size"):  # tokens take three bytes at most
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


def test_texts_of_a_snapshot_share_its_memory_and_cannot_be_written() -> None:
    texts = decode_snapshot(encode_snapshot(SMALL)).texts
    assert isinstance(texts, TextTable) and len(texts) == 2
    first, second = texts
    assert (first.text, first[2:]) == (1 << 16, (True, 0.0, 0)) and (second.text, second[2:]) == (2 << 16, (False, 1.5, 7))
    assert second.tokens.tolist() == [6]
    with pytest.raises(ValueError, match="read-only"):
        first.tokens[0] = 1


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


def test_vocabularies_beyond_three_bytes() -> None:
    with pytest.raises(ValueError, match="vocab_size must be between 1 and 16777216, got 16777217"):
        encode_batch(TextBatch(0, 0, 0), (1 << 24) + 1)
