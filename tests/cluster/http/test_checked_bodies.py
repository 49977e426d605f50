"""Bodies are counted in pieces before they are parsed, and refused for what they hold."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from outrider.cluster.http import checked_bodies
from outrider.cluster.http.checked_bodies import MAX_NESTED, MAX_STRINGS, parse
from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.text_threads import SHORT

FILL = {"fill": "x" * SHORT}


def counts(value: Any) -> tuple[int, int]:
    """Return the strings, and the objects and lists, of a value."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, dict | list):
        return 0, 0
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    found = [counts(part) for part in parts]
    return sum(strings for strings, _ in found), 1 + sum(nested for _, nested in found)


def drawn(rng: random.Random, depth: int = 0) -> Any:
    """Return a random value, with quotes, brackets and backslashes in its texts."""
    kind = rng.randrange(5 if depth < 4 else 2)
    if kind == 0:
        return rng.choice([None, True, 1, -2.5])
    if kind in (1, 2):
        return "".join(rng.choice('ab"\\[]{}\n') for _ in range(rng.randrange(9)))
    parts = [drawn(rng, depth + 1) for _ in range(rng.randrange(5))]
    return parts if kind == 3 else {f'{at}"\\{{': part for at, part in enumerate(parts)}


@pytest.mark.parametrize("chars", [1, 2, 3, 7, 64])
def test_what_a_body_holds_is_counted_in_pieces_as_it_is_parsed(chars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_bodies, "_PIECE_CHARS", chars)
    for seed in range(100):
        value = FILL | {"value": drawn(random.Random(seed))}
        body = json.dumps(value).encode()
        strings, nested = counts(value)
        monkeypatch.setattr(checked_bodies, "MAX_STRINGS", strings)
        monkeypatch.setattr(checked_bodies, "MAX_NESTED", nested)
        assert parse(body) == value
        monkeypatch.setattr(checked_bodies, "MAX_STRINGS", strings - 1)
        with pytest.raises(ApiError, match="names and texts"):
            parse(body)
        monkeypatch.setattr(checked_bodies, "MAX_STRINGS", strings)
        monkeypatch.setattr(checked_bodies, "MAX_NESTED", nested - 1)
        with pytest.raises(ApiError, match="objects and lists"):
            parse(body)


@pytest.mark.parametrize(
    ("value", "kind"), [(["a"] * (MAX_STRINGS + 1), "names and texts"), ([[]] * (MAX_NESTED + 1), "objects and lists")]
)
def test_a_body_with_too_much_is_refused(value: Any, kind: str) -> None:
    with pytest.raises(ApiError, match=kind) as caught:
        parse(json.dumps(value).encode())
    assert caught.value.status == 400
