"""Documents that requests of a tenant brought along: each is kept once, for requests that resemble."""

from __future__ import annotations

from collections.abc import Container

from decoding.sources.text_keys import document_hash, request_of
from decoding.tree import Int32Array

_FEWEST_TOKENS = 16  # of a passage that is kept


class Passages:
    """The latest passages, by the key of the request that brought each first."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: tokens to hold; when there are more the oldest passages leave."""
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forgets all of them."""
        self.num_tokens = 0
        self._passages: dict[int, Int32Array] = {}  # the oldest comes first
        self._by_request: dict[int, list[int]] = {}  # keys
        self._keys: dict[int, int] = {}  # by the hash of the document

    def add(self, key: int, tokens: Int32Array, removed: Container[int]) -> None:
        """Keeps a passage, if it is not there already and its document's hash is not among those that were removed."""
        name = document_hash(tokens)
        if key in self._passages or name in self._keys or name in removed or not _FEWEST_TOKENS <= len(tokens) <= self._capacity:
            return
        self._passages[key], self._keys[name] = tokens.copy(), key
        self._by_request.setdefault(request_of(key), []).append(key)
        self.num_tokens += len(tokens)
        while self.num_tokens > self._capacity:
            self.remove(next(iter(self._passages)))

    def of_request(self, request: int) -> list[tuple[int, Int32Array]]:
        """Those that a request brought first, by its hash."""
        return [(key, self._passages[key]) for key in self._by_request.get(request, ())]

    def remove(self, key: int) -> None:
        """Takes a passage out; one that is not there is no error."""
        tokens = self._passages.pop(key, None)
        if tokens is None:
            return
        self.num_tokens -= len(tokens)
        del self._keys[document_hash(tokens)]
        keys = self._by_request[request_of(key)]
        keys.remove(key)
        if not keys:
            del self._by_request[request_of(key)]

    def remove_request(self, name: int) -> None:
        """Takes out what a request brought, by its hash, or a document, by its own."""
        for key in [*self._by_request.get(name, ()), *([self._keys[name]] if name in self._keys else ())]:
            self.remove(key)
