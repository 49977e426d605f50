"""Interface of a grammar, which decides the allowed tokens at each row of a draft tree."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from outrider.decoding.tree import BoolArray, DraftTree, Int32Array


class Grammar(Protocol):
    """Grammar state of one request, which can move forwards and backwards over the output tokens.

    The model's end tokens are allowed only where the grammar may end. After an end token or a forbidden token the state is
    unknown: ``push`` allows no token there.

    Example: of the choice between ``ab`` and ``a`` over single letters, ``a`` alone is allowed first, then ``b`` and the end
    tokens, after ``ab`` the end tokens alone.
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


def permitted(tree: DraftTree, grammar: Grammar) -> DraftTree:
    """Return the tree without candidates that the grammar forbids, and without the rows below them, in the same order.

    The tree is below the grammar's last output token. The grammar's state is restored.

    Example: root ``{`` with the branches ``"a"`` and ``}``, where an object must have a member: the second branch goes.
    """
    if len(tree) == 1:
        return tree
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    children: dict[int, list[int]] = {}
    for row in range(tree.num_candidates - 1, 0, -1):  # reversed, so that the first child is on top of the stack
        children.setdefault(parents[row], []).append(row)
    kept = np.zeros(len(tokens), np.bool_)
    kept[0] = True
    begin = grammar.length
    stack = [(row, begin) for row in children.get(0, ())]
    while stack:
        row, length = stack.pop()
        grammar.truncate(length)
        if grammar.push(tokens[row]):
            kept[row] = True
            stack.extend((below, length + 1) for below in children.get(row, ()))
    grammar.truncate(begin)
    for row in range(tree.num_candidates, len(tokens)):  # window rows are never emitted, but need their ancestors
        kept[row] = kept[parents[row]]
    return tree if kept.all() else tree.take(np.flatnonzero(kept).astype(np.int32))
