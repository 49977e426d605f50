"""Binary snapshot of a tenant's texts at one stream position, from which a new replica starts.

Little endian. A header (``_HEADER``: magic, version, width ``W`` of a token, epoch, vocabulary, time, the numbers of pieces,
removed requests, evicted texts and tokens, and the lengths of two strings), then the strings (stream id, tokenizer revision;
ASCII), then columns, each one array. Per piece: request hash (8 bytes), choice (2), offset, plus 2**31 if final (4), number of
tokens (4), time (8). Per removed request: hash (8), time (8). Per evicted text: key (10). Then all tokens (``W`` each), and 16
bytes of BLAKE2b over everything before. A text costs 26 bytes and its tokens: 10 million tokens in 100,000 texts take 22.6 MB.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.cache_service.namespace import Identity
from outrider.cache_service.records import KEY, MAX_TOKENS, MAX_VOCAB, pack_tokens, token_width, unpack_keys, unpack_tokens
from outrider.decoding.arrays import Int32Array

SNAPSHOT_VERSION = 1
_MAGIC = b"OUTRSNAP"
_HEADER = struct.Struct("<8sHBxIIdIIIQBB")
_CHECKSUM_BYTES = 16
_FINAL = 1 << 31
_STREAM_ID = re.compile(r"\d{1,20}-\d{1,20}", re.ASCII)
_REVISION = re.compile(r"[0-9a-zA-Z]{0,255}", re.ASCII)
_COLUMNS = (("requests", "<u8"), ("choices", "<u2"), ("offsets", "<u4"), ("lengths", "<u4"), ("updated_s", "<f8"))
_REMOVED = (("request", "<u8"), ("at_s", "<f8"))


class SnapshotText(NamedTuple):
    """Text, or a piece of one whose beginning is missing. A tuple, because 100,000 are created at a time."""

    text: int  # text key
    tokens: Int32Array  # [n]
    final: bool  # the text ends with them
    updated_s: float  # time of last growth, Unix seconds
    offset: int = 0  # tokens of the text before these; above 0 for a piece after a gap


class TextTable:
    """Texts as columns, which is fast for 100,000 texts; iterating creates them one by one."""

    def __init__(
        self, requests: npt.NDArray[Any], choices: npt.NDArray[Any], offsets: npt.NDArray[Any], lengths: npt.NDArray[Any],
        updated_s: npt.NDArray[Any], tokens: Int32Array,
    ) -> None:  # fmt: skip
        # [n] columns: upper 64 and lower 16 bits of the text keys; tokens before the piece, plus 2**31 if the text ends with it;
        # tokens of the piece; time of last growth. Then [sum of lengths] tokens of all pieces.
        self.requests, self.choices = requests.astype("<u8", copy=False), choices.astype("<u2", copy=False)
        self.offsets, self.lengths = offsets.astype("<u4", copy=False), lengths.astype("<u4", copy=False)
        self.updated_s, self.tokens = updated_s.astype("<f8", copy=False), tokens

    @classmethod
    def of(cls, texts: Sequence[SnapshotText]) -> TextTable:
        """Return the columns of these texts."""
        keys = [text.text for text in texts]
        return cls(
            np.array([key >> 16 for key in keys], "<u8"),
            np.array([key & 0xFFFF for key in keys], "<u2"),
            np.array([text.offset | (_FINAL if text.final else 0) for text in texts], "<u4"),
            np.array([len(text.tokens) for text in texts], "<u4"),
            np.array([text.updated_s for text in texts], "<f8"),
            np.concatenate([np.asarray(text.tokens, np.int32) for text in texts]) if texts else np.empty(0, np.int32),
        )

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[SnapshotText]:
        tokens, end = self.tokens, 0
        columns = (self.requests, self.choices, self.offsets, self.lengths, self.updated_s)
        for request, choice, offset, length, updated_s in zip(*(column.tolist() for column in columns), strict=True):
            start, end = end, end + length
            yield SnapshotText(request << 16 | choice, tokens[start:end], offset >= _FINAL, updated_s, offset & ~_FINAL)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Texts and deletions of a tenant after applying everything up to and including a stream entry."""

    stream_id: str  # "ms-seq" of that entry; "0-0" before the first
    epoch: int  # number of deletions of the tenant
    vocab_size: int
    tokenizer_revision: str
    created_s: float  # Unix seconds
    texts: TextTable | Sequence[SnapshotText] = ()  # a table if decoded
    removed: tuple[tuple[int, float], ...] = ()  # deleted request hashes, and the times of deletion
    evicted: tuple[int, ...] = ()  # text keys evicted lately, oldest first: late pieces of them are refused


class CorruptSnapshotError(ValueError):
    """Error of bytes that are not a snapshot of a known version; the message names the fault."""


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return a snapshot as bytes. Raises ``ValueError`` for a value that does not fit its field."""
    width = token_width(snapshot.vocab_size)
    stream_id, revision = snapshot.stream_id, snapshot.tokenizer_revision
    if not _STREAM_ID.fullmatch(stream_id):
        raise ValueError(f"stream_id must be MS-SEQ, got {stream_id!r}")
    if not _REVISION.fullmatch(revision):
        raise ValueError(f"tokenizer_revision must be up to 255 letters and digits, got {revision!r}")
    if not 0 <= snapshot.epoch < 1 << 32:
        raise ValueError(f"epoch must be between 0 and 2**32 - 1, got {snapshot.epoch}")
    table = snapshot.texts if isinstance(snapshot.texts, TextTable) else TextTable.of(snapshot.texts)
    tokens = table.tokens
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < snapshot.vocab_size:
        raise ValueError(f"tokens must be between 0 and {snapshot.vocab_size - 1}, got {tokens.min()} to {tokens.max()}")
    header = _HEADER.pack(
        _MAGIC, SNAPSHOT_VERSION, width, snapshot.epoch, snapshot.vocab_size, snapshot.created_s,
        len(table), len(snapshot.removed), len(snapshot.evicted), len(tokens), len(stream_id), len(revision),
    )  # fmt: skip
    body = b"".join((
        header, stream_id.encode(), revision.encode(), *(getattr(table, name).tobytes() for name, _ in _COLUMNS),
        np.array([request for request, _ in snapshot.removed], "<u8").tobytes(),
        np.array([at_s for _, at_s in snapshot.removed], "<f8").tobytes(),
        np.array([divmod(key, 1 << 16) for key in snapshot.evicted], KEY).tobytes(), pack_tokens(tokens, width),
    ))  # fmt: skip
    return body + hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()


def decode_snapshot(data: bytes) -> Snapshot:
    """Return the snapshot that bytes encode. Raises ``CorruptSnapshotError``, and no other exception, for any invalid bytes."""
    _check_frame(data)
    header = _HEADER.unpack_from(data)
    _, _, said_width, epoch, vocab_size, created_s, num_texts, num_removed, num_evicted, num_tokens, *lengths = header
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise CorruptSnapshotError(f"a vocabulary of {vocab_size}")
    width = token_width(vocab_size)
    row_bytes, removed_bytes = (sum(np.dtype(kind).itemsize for _, kind in columns) for columns in (_COLUMNS, _REMOVED))
    size = _HEADER.size + sum(lengths) + num_texts * row_bytes
    size += num_removed * removed_bytes + num_evicted * KEY.itemsize + num_tokens * width
    if said_width != width or size + _CHECKSUM_BYTES != len(data):
        raise CorruptSnapshotError(f"{len(data)} bytes do not match the header: {num_texts} texts, {num_tokens} tokens")
    reader = _Reader(memoryview(data), _HEADER.size)
    stream_id, revision = (bytes(reader.take(length)).decode("latin-1") for length in lengths)
    if not _STREAM_ID.fullmatch(stream_id) or not _REVISION.fullmatch(revision):
        raise CorruptSnapshotError("the stream id or the tokenizer revision is malformed")
    columns = {name: reader.array(kind, num_texts) for name, kind in _COLUMNS}
    removed, removed_s = (reader.array(kind, num_removed) for _, kind in _REMOVED)
    evicted = unpack_keys(reader.array(KEY, num_evicted))
    table = TextTable(**columns, tokens=unpack_tokens(reader.take(num_tokens * width), width))
    table.tokens.setflags(write=False)  # the texts share it
    _check_values(table, vocab_size, num_tokens)
    if not (np.isfinite(created_s) and np.isfinite(removed_s).all() and np.isfinite(table.updated_s).all()):
        raise CorruptSnapshotError("a time is not a number")
    removals = tuple(zip(removed.tolist(), removed_s.tolist(), strict=True))
    return Snapshot(stream_id, epoch, vocab_size, revision, created_s, table, removals, tuple(evicted))


def read_snapshot(data: bytes, identity: Identity) -> Snapshot:
    """Return the snapshot. Raises ``CorruptSnapshotError`` if it is invalid or of another tokenizer."""
    snapshot = decode_snapshot(data)
    if snapshot.vocab_size != identity.vocab_size:
        raise CorruptSnapshotError(f"a vocabulary of {snapshot.vocab_size} tokens, not {identity.vocab_size}")
    if snapshot.tokenizer_revision != identity.tokenizer_revision:
        raise CorruptSnapshotError(f"tokenizer revision {snapshot.tokenizer_revision}, not {identity.tokenizer_revision}")
    return snapshot


def _check_frame(data: bytes) -> None:
    """Check magic, version and checksum, in this order, so that the message names the first difference."""
    if len(data) < _HEADER.size + _CHECKSUM_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise CorruptSnapshotError(f"{len(data)} bytes that do not begin like a snapshot")
    version = _HEADER.unpack_from(data)[1]
    if version != SNAPSHOT_VERSION:
        raise CorruptSnapshotError(f"a snapshot of version {version}; known: {SNAPSHOT_VERSION}")
    body, checksum = memoryview(data)[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest() != checksum:
        raise CorruptSnapshotError("the checksum is wrong")


def _check_values(table: TextTable, vocab_size: int, num_tokens: int) -> None:
    if int(table.lengths.sum(dtype=np.int64)) != num_tokens:
        raise CorruptSnapshotError(f"the lengths of the texts do not add up to {num_tokens} tokens")
    ends = (table.offsets & np.uint32(_FINAL - 1)).astype(np.int64) + table.lengths
    if len(ends) and int(ends.max()) > MAX_TOKENS:
        raise CorruptSnapshotError(f"a text of {int(ends.max())} tokens; at most {MAX_TOKENS}")
    if num_tokens and int(table.tokens.max()) >= vocab_size:
        raise CorruptSnapshotError(f"token {int(table.tokens.max())} of a vocabulary of {vocab_size}")


class _Reader:
    """Reader of consecutive parts of bytes whose total length was checked."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self._at = data, at

    def take(self, size: int) -> memoryview:
        part = self._data[self._at : self._at + size]
        self._at += size
        return part

    def array(self, kind: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
        return np.frombuffer(self.take(count * np.dtype(kind).itemsize), kind, count)
