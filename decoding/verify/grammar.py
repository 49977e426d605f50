"""Interface of a grammar: which tokens it allows at each row of a draft tree."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from decoding.tree import BoolArray, DraftTree, Int32Array


class Grammar(Protocol):
    """The state of one request's grammar. It moves along the tokens of the output, forwards and backwards.

    The model's own end tokens are allowed where the grammar may end, and nowhere else. Behind an end token, and behind a token
    that the grammar forbids, nothing is known: any token is as good as another there, and ``push`` calls none allowed.

    Example: of the choice between ``ab`` and ``a`` over single letters, ``a`` alone is allowed first, then ``b`` and the end
    tokens, after ``ab`` the end tokens alone.
    """

    @property
    def fault(self) -> str | None:
        """Why the request cannot go on: its output is none of the grammar, or a limit of the library was met; None: it can."""
        ...

    @property
    def slow_s(self) -> float:
        """Seconds that the request's last step took here, where that is too long for the others of a step; else 0."""
        ...

    @property
    def length(self) -> int:
        """Tokens pushed."""
        ...

    def end_step(self) -> None:
        """Settles what the calls of a step took. Too much in all is a fault. Called by the engine that has the request alone:
        ranks have to agree on what is allowed, and their times differ."""
        ...

    def push(self, token: int) -> bool:
        """Appends a token to the output; whether it is allowed there."""
        ...

    def truncate(self, length: int) -> None:
        """Takes tokens from the end of the output until it holds ``length`` at most."""
        ...

    def catch_up(self, output_ids: Int32Array) -> None:
        """Makes the output equal to ``output_ids``, of which the shorter must be the beginning of the longer."""
        ...

    def accepts(self, token: int) -> bool:
        """Whether a token may come next."""
        ...

    def allowed(self) -> BoolArray | None:
        """[vocab] bool, which tokens may come next, at least one; None where nothing is known. Not to be written to, and valid
        until the next call."""
        ...

    def forced(self) -> list[int]:
        """Tokens of the only text that can come next, in the tokenizer's own spelling; empty where there is a choice."""
        ...


def permitted(tree: DraftTree, grammar: Grammar) -> DraftTree:
    """The tree without candidates that the grammar forbids at their place, and without what is below them.

    The target never chooses these, so that computing them is of no use. Rows keep their order.

    Example: root ``{`` with the branches ``"a"`` and ``}``, where an object must have a member: the second branch goes.

    Args:
        tree: below the last token of the output that the grammar holds.
        grammar: as it is before, it is afterwards.
    """
    if len(tree) == 1:
        return tree
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    children: dict[int, list[int]] = {}
    for row in range(tree.num_candidates - 1, 0, -1):  # backwards: the first child is the last on the stack
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
    for row in range(tree.num_candidates, len(tokens)):  # the window's rows are never emitted, but need their ancestors
        kept[row] = kept[parents[row]]
    return tree if kept.all() else tree.take(np.flatnonzero(kept).astype(np.int32))
