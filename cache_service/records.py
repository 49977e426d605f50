"""Binary format of stream entries: batches of new tokens and of deletions.

Little endian. ``W`` is the width of a token: 2 bytes in vocabularies of up to 65,536 tokens, else 3.

==========================  =====================================================================
bytes                       field
==========================  =====================================================================
0                           schema version, 1
1                           ``W``
2-3, 4-5, 6-7               number of deltas ``D``, of removed requests ``R``, of evicted texts ``E``
8-15                        origin
16-19                       sequence
20-23                       epoch
16 for each of ``D``        text: request hash (8), choice (2); offset, plus 2**31 if final (4); number of tokens (2)
8 for each of ``R``         request hash
10 for each of ``E``        request hash (8), choice (2)
``W`` for each token        the tokens of all deltas, concatenated
4                           crc32 of all bytes before
==========================  =====================================================================

So a batch takes 28 bytes, a delta 16 and a token 2 or 3: a batch of 100 tokens of one text costs 2.44 bytes a token, one of 8
tokens 7.5. Example: ``TextBatch(1, 2, 3, deltas=(CacheDelta((5 << 16) | 1, 4, [7, 8], True),))`` of a vocabulary of 100 tokens
is, in hexadecimal, ``01 02 0100 0000 0000 0100000000000000 02000000 03000000`` (header: origin 1, sequence 2, epoch 3),
``0500000000000000 0100 04000080 0200`` (delta), ``0700 0800`` (tokens), ``a3750361`` (crc32): 48 bytes.

The checksum detects damage, not forgery: Redis' access control decides which clients may write. For any bytes a reader gets a
valid batch or ``CorruptRecordError``, and allocates at most a small multiple of their size.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from outrider.decoding.arrays import Int32Array

SCHEMA = 1  # another layout gets another number, and so other namespaces
MAX_BATCH_BYTES = 1 << 20  # longer batches are refused by writer and reader
MAX_DELTA_TOKENS = 0xFFFF  # per delta
MAX_ITEMS = 0xFFFF  # deltas, removed requests and evicted texts of one batch, each
MAX_VOCAB = 1 << 24  # what fits in 3 bytes
MAX_TOKENS = 2**31 - 1  # per text

_HEADER = struct.Struct("<BBHHHQII")
_CHECKSUM = struct.Struct("<I")
_FINAL = 1 << 31
KEY = np.dtype([("request", "<u8"), ("choice", "<u2")])  # a text key, 10 bytes
_DELTA = np.dtype([("request", "<u8"), ("choice", "<u2"), ("offset", "<u4"), ("count", "<u2")])  # 16 bytes


@dataclass(frozen=True, slots=True)
class CacheDelta:
    """Tokens of a text from a position on."""

    text: int  # text key, below 2**80
    offset: int  # tokens of the text before these
    tokens: Int32Array  # [n]
    final: bool  # the text ends with them


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Content of one stream entry."""

    origin: int  # uint64, random per process
    sequence: int  # uint32, numbers the batches of this origin and namespace from 0
    epoch: int  # uint32, number of deletions of the tenant when the batch was created
    deltas: tuple[CacheDelta, ...] = ()
    removed: tuple[int, ...] = ()  # hashes of deleted requests and documents
    evicted: tuple[int, ...] = ()  # text keys evicted by the service


class CorruptRecordError(ValueError):
    """Error of bytes that are not a batch; the message names the fault."""


def token_width(vocab_size: int) -> int:
    """Return the bytes per token. Raises ``ValueError`` if 3 bytes are not enough for the vocabulary."""
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size must be between 1 and {MAX_VOCAB}, got {vocab_size}")
    return 2 if vocab_size <= 1 << 16 else 3


def pack_tokens(tokens: Int32Array, width: int) -> bytes:
    """Encode tokens in ``width`` bytes each. They must be below ``256 ** width``, which is not checked."""
    if width == 2:
        return tokens.astype("<u2").tobytes()
    return np.ascontiguousarray(tokens, "<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


def unpack_tokens(data: memoryview, width: int) -> Int32Array:
    """Return [n] int32 tokens from ``n * width`` bytes."""
    if width == 2:
        return np.frombuffer(data, "<u2").astype(np.int32)
    wide = np.zeros((len(data) // 3, 4), np.uint8)
    wide[:, :3] = np.frombuffer(data, np.uint8).reshape(-1, 3)
    return wide.view("<i4").reshape(-1).astype(np.int32, copy=False)


def encode_batch(batch: TextBatch, vocab_size: int) -> bytes:
    """Return a batch as bytes. Raises ``ValueError`` if it exceeds a field or ``MAX_BATCH_BYTES``; see ``split_deltas``."""
    width = token_width(vocab_size)
    for name, value, bits in (("origin", batch.origin, 64), ("sequence", batch.sequence, 32), ("epoch", batch.epoch, 32)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} must be between 0 and 2**{bits} - 1, got {value}")
    for name, items, bits in (("removed", batch.removed, 64), ("evicted", batch.evicted, 80)):
        if not all(0 <= item < 1 << bits for item in items):
            raise ValueError(f"{name} must hold numbers between 0 and 2**{bits} - 1")
    counts = len(batch.deltas), len(batch.removed), len(batch.evicted)
    if max(counts) > MAX_ITEMS:
        raise ValueError(f"deltas, removed and evicted must hold at most {MAX_ITEMS} items each, got {counts}: split the batch")
    parts = [
        _HEADER.pack(SCHEMA, width, *counts, batch.origin, batch.sequence, batch.epoch),
        np.array([_delta_fields(delta) for delta in batch.deltas], _DELTA).tobytes(),
        np.array(batch.removed, "<u8").tobytes(),
        np.array([divmod(key, 1 << 16) for key in batch.evicted], KEY).tobytes(),
    ]
    if batch.deltas:
        tokens = np.concatenate([np.asarray(delta.tokens, np.int32) for delta in batch.deltas])
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(f"tokens must be between 0 and {vocab_size - 1}, got {tokens.min()} to {tokens.max()}")
        parts.append(pack_tokens(tokens, width))
    body = b"".join(parts)
    if len(body) + _CHECKSUM.size > MAX_BATCH_BYTES:
        raise ValueError(f"a batch must take at most {MAX_BATCH_BYTES} bytes, got {len(body) + _CHECKSUM.size}: split it")
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _delta_fields(delta: CacheDelta) -> tuple[int, int, int, int]:
    count = len(delta.tokens)
    if not 0 <= delta.text < 1 << 80:
        raise ValueError(f"text must be between 0 and 2**80 - 1, got {delta.text}")
    if count > MAX_DELTA_TOKENS:
        raise ValueError(f"tokens of a delta must be at most {MAX_DELTA_TOKENS}, got {count}: split it")
    if not 0 <= delta.offset <= MAX_TOKENS - count:
        raise ValueError(f"offset must be between 0 and {MAX_TOKENS} less the tokens, got {delta.offset}")
    return delta.text >> 16, delta.text & 0xFFFF, delta.offset | (_FINAL if delta.final else 0), count


def decode_batch(data: bytes | None, vocab_size: int) -> TextBatch:
    """Return the batch of a stream entry. Raises only ``CorruptRecordError``, for None or other bytes of this vocabulary."""
    width = token_width(vocab_size)
    if data is None:
        raise CorruptRecordError("an entry without a record")
    if not _HEADER.size + _CHECKSUM.size <= len(data) <= MAX_BATCH_BYTES:
        raise CorruptRecordError(
            f"{len(data)} bytes; a record takes between {_HEADER.size + _CHECKSUM.size} and {MAX_BATCH_BYTES}"
        )
    version, said_width, num_deltas, num_removed, num_evicted, origin, sequence, epoch = _HEADER.unpack_from(data)
    if version != SCHEMA:
        raise CorruptRecordError(f"schema version {version}; known: {SCHEMA}")
    if zlib.crc32(data[: -_CHECKSUM.size]) != _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)[0]:
        raise CorruptRecordError("the checksum is wrong")
    if said_width != width:
        raise CorruptRecordError(f"tokens of {said_width} bytes; a vocabulary of {vocab_size} has {width}")
    removed_at = _HEADER.size + num_deltas * _DELTA.itemsize
    evicted_at = removed_at + num_removed * 8
    tokens_at = evicted_at + num_evicted * KEY.itemsize
    if tokens_at + _CHECKSUM.size > len(data):
        raise CorruptRecordError(f"{len(data)} bytes are too few for {num_deltas} deltas, {num_removed} and {num_evicted} keys")
    table = np.frombuffer(data, _DELTA, num_deltas, _HEADER.size)
    num_tokens = int(table["count"].sum(dtype=np.int64))
    if tokens_at + num_tokens * width + _CHECKSUM.size != len(data):
        raise CorruptRecordError(f"{len(data)} bytes do not match the header: {num_tokens} tokens from {tokens_at} on")
    tokens = unpack_tokens(memoryview(data)[tokens_at : -_CHECKSUM.size], width)
    if num_tokens and int(tokens.max()) >= vocab_size:
        raise CorruptRecordError(f"token {int(tokens.max())} of a vocabulary of {vocab_size}")
    tokens.setflags(write=False)  # the deltas share it
    return TextBatch(
        origin, sequence, epoch, tuple(_deltas(table, tokens)),
        tuple(np.frombuffer(data, "<u8", num_removed, removed_at).tolist()),
        tuple(unpack_keys(np.frombuffer(data, KEY, num_evicted, evicted_at))),
    )  # fmt: skip


def unpack_keys(table: np.ndarray[tuple[int], np.dtype[np.void]]) -> list[int]:
    """Return text keys from an array of ``KEY``."""
    return [request << 16 | choice for request, choice in table.tolist()]


def _deltas(table: np.ndarray[tuple[int], np.dtype[np.void]], tokens: Int32Array) -> Iterator[CacheDelta]:
    at = 0
    for request, choice, offset, count in table.tolist():
        start = offset & ~_FINAL
        if start > MAX_TOKENS - count:
            raise CorruptRecordError(f"{count} tokens from {start} on; a text has at most {MAX_TOKENS}")
        yield CacheDelta(request << 16 | choice, start, tokens[at : at + count], offset >= _FINAL)
        at += count


def split_deltas(deltas: Iterable[CacheDelta], vocab_size: int) -> Iterator[tuple[CacheDelta, ...]]:
    """Yield groups of deltas that each fit into a batch, splitting deltas that are too long."""
    width = token_width(vocab_size)
    limit = MAX_BATCH_BYTES - _HEADER.size - _CHECKSUM.size
    group: list[CacheDelta] = []
    used = 0
    for delta in deltas:
        for part in _parts(delta):
            size = _DELTA.itemsize + len(part.tokens) * width
            if group and (used + size > limit or len(group) == MAX_ITEMS):
                yield tuple(group)
                group, used = [], 0
            group.append(part)
            used += size
    if group:
        yield tuple(group)


def _parts(delta: CacheDelta) -> Iterator[CacheDelta]:
    count = len(delta.tokens)
    if count <= MAX_DELTA_TOKENS:
        yield delta
        return
    for at in range(0, count, MAX_DELTA_TOKENS):
        part = delta.tokens[at : at + MAX_DELTA_TOKENS]
        yield CacheDelta(delta.text, delta.offset + at, part, delta.final and at + len(part) == count)
