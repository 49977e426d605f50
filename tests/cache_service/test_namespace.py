"""Names that isolate."""

from __future__ import annotations

import hashlib
import hmac
import struct

import pytest

from outrider.cache_service.namespace import hash_key, namespace

SECRET = b"of the cluster"
FIELDS = ("acme", "a1b2", "c3d4")


def test_is_the_documented_hmac() -> None:
    message = b"\0\0\0\4acme" + b"\0\0\0\4a1b2" + b"\0\0\0\4c3d4" + b"\0\0\0\0011"
    assert namespace(SECRET, *FIELDS) == hmac.digest(SECRET, message, "sha256").hex()[:32]
    spelled = b"".join(struct.pack(">I", len(field)) + field for field in ("é".encode(), b"", b"c3d4", b"1"))
    assert namespace(SECRET, "é", "", "c3d4") == hmac.digest(SECRET, spelled, "sha256").hex()[:32], "lengths are of bytes"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c", "d"), ("a", "bc", "d")),
        (("a", "bc", "d"), ("a", "b", "cd")),
        (("ab", "", "d"), ("a", "b", "d")),
        (("", "ab", "d"), ("ab", "", "d")),
        (("a", "b", "c1"), ("a", "b", "c")),
        (("a\0\0\0\1b", "c", "d"), ("a", "b", "cd")),
    ],
)
def test_boundaries_cannot_be_shifted(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert namespace(SECRET, *one) == namespace(SECRET, *one) != namespace(SECRET, *other)


def test_every_field_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {namespace(SECRET, *FIELDS), namespace(b"of another", *FIELDS)}
    for at in range(3):
        changed = list(FIELDS)
        changed[at] = "other"
        names.add(namespace(SECRET, *changed))
    names.add(namespace(SECRET, "*", *FIELDS[1:]))
    monkeypatch.setattr("outrider.cache_service.namespace.SCHEMA", 2)
    names.add(namespace(SECRET, *FIELDS))
    assert len(names) == 7
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in names)


def test_no_secret() -> None:
    with pytest.raises(ValueError, match="OUTRIDER_CACHE_SECRET"):
        namespace(b"", *FIELDS)


def test_hash_key() -> None:
    assert hash_key("abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-4, example
    assert hash_key("abc") != hash_key("abc ")
    assert hash_key("é") == "sha256:" + hashlib.sha256(b"\xc3\xa9").hexdigest()
