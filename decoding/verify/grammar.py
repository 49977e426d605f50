"""Interface of a grammar, which decides the allowed tokens at each row of a draft tree."""

from __future__ import annotations

from typing import Protocol

from outrider.decoding.arrays import BoolArray, Int32Array


class Grammar(Protocol):
    """Grammar state of one request, which can move forwards and backwards over the output tokens.

    End tokens are allowed only where the grammar may end. After an end token or a forbidden token ``push`` allows no token.
    """

    @property
    def fault(self) -> str | None:
        """Return why the request cannot continue (its output violates the grammar, or a library limit was hit), or None."""
        ...

    @property
    def slow_s(self) -> float:
        """Return the seconds of the request's last step in this grammar if they delay other requests too much; else 0."""
        ...

    @property
    def length(self) -> int:
        """Return the number of pushed tokens."""
        ...

    def end_step(self) -> None:
        """Sum up the time of a step's calls; too much in total is a fault. Only the engine calls it, never a rank."""
        # Ranks must agree on the allowed tokens, but their times differ.
        ...

    def push(self, token: int) -> bool:
        """Append a token to the output, and return whether it is allowed there."""
        ...

    def truncate(self, length: int) -> None:
        """Remove tokens from the end until at most ``length`` are left."""
        ...

    def catch_up(self, output_ids: Int32Array) -> None:
        """Make the output equal to ``output_ids``. The shorter of the two must be a prefix of the longer."""
        ...

    def accepts(self, token: int) -> bool:
        """Return whether a token may come next."""
        ...

    def allowed(self) -> BoolArray | None:
        """Return [vocab] bool of the next tokens allowed (read-only, valid until the next call), or None if unknown."""
        ...

    def forced(self) -> list[int]:
        """Return the tokens of the only possible continuation, as the tokenizer encodes it; empty if there is a choice."""
        ...
