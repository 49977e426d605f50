"""Buffer of text pieces that arrived before the piece in front of them."""

from __future__ import annotations

from bisect import bisect_left

from outrider.decoding.tree import Int32Array

HELD_TEXTS, HELD_TOKENS = 256, 1 << 16  # limits per history


class HeldPieces:
    """Out-of-order pieces, held until the gap before them is filled; beyond the limits the longest-waiting text is dropped."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[tuple[int, Int32Array]]] = {}  # pieces by offset; the longest-waiting text first
        self.num_tokens = 0

    def __len__(self) -> int:
        """Return the number of texts with pieces behind a gap."""
        return len(self._pieces)

    def hold(self, text: int, offset: int, tokens: Int32Array) -> None:
        """Store a copy of a piece; of two pieces with one offset the longer is kept."""
        pieces = self._pieces.setdefault(text, [])
        at = bisect_left(pieces, offset, key=_offset)
        known = len(pieces[at][1]) if at < len(pieces) and pieces[at][0] == offset else 0
        if len(tokens) > known:
            pieces[at : at + (known > 0)] = [(offset, tokens.copy())]
            self.num_tokens += len(tokens) - known
        while len(self._pieces) > HELD_TEXTS or self.num_tokens > HELD_TOKENS:
            self.drop(next(iter(self._pieces)))

    def take(self, text: int, length: int) -> tuple[int, Int32Array] | None:
        """Pop the first piece if it starts within or directly behind the first ``length`` tokens; None otherwise."""
        pieces = self._pieces.get(text)
        if pieces is None or pieces[0][0] > length:
            return None
        piece = pieces.pop(0)
        self.num_tokens -= len(piece[1])
        if not pieces:
            del self._pieces[text]
        return piece

    def drop(self, text: int) -> None:
        """Discard the pieces of a text."""
        self.num_tokens -= sum(len(tokens) for _, tokens in self._pieces.pop(text, ()))

    def clear(self) -> None:
        """Discard all pieces."""
        self._pieces.clear()
        self.num_tokens = 0


def _offset(piece: tuple[int, Int32Array]) -> int:
    return piece[0]
