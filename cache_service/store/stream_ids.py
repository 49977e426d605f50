"""Ids of stream entries, ``MILLISECONDS-NUMBER``."""

from __future__ import annotations

START = "0-0"  # before every entry of a stream


def compare_ids(a: str, b: str) -> int:
    """Return -1, 0 or 1 if stream id ``a`` is before, at or after ``b``: ``compare_ids("9-1", "10-0") == -1``."""
    one, other = _pair(a), _pair(b)
    return (one > other) - (one < other)


def _pair(id: str) -> tuple[int, int]:
    ms, _, sequence = id.partition("-")
    return int(ms), int(sequence or 0)


def written_s(id: str) -> float:
    """Return the time at which Redis added an entry, in seconds since 1970: ``written_s("1500-0") == 1.5``."""
    return _pair(id)[0] / 1000


def text_of(value: bytes | str) -> str:
    """Return a reply of Redis as a string."""
    return value.decode() if isinstance(value, bytes) else value


def id_of(value: bytes | str) -> str:
    """Return a reply as a stream id. Raises ``ValueError`` if it is none."""
    text = text_of(value)
    _pair(text)
    return text
