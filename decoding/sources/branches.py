"""Draft trees built from several continuations of a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.decoding.tree import DraftTree


def tree_of(
    root: int, rows: Iterable[tuple[Sequence[int], int]], budget: int, most: int | None = None, merged: bool = True
) -> DraftTree:
    """Build a draft tree from continuations below the root, adding them in order until the budget is used.

    Example: ``1 2 3``, ``1 2`` and ``1 4`` with a budget of 4 or more give the rows 1, 2, 3 and, below the same 1, 4. The second
    one adds nothing; with ``most`` 2 the third one is the last to be looked at.

    Args:
        rows: continuations with their source ids.
        budget: maximum number of rows below the root.
        most: maximum number of continuations that add a row; unlimited if None.
        merged: whether continuations share the rows of a common prefix.
    """
    tokens, parents, sources = [root], [-1], [0]
    children: dict[tuple[int, int], int] = {}
    branches = 0
    for row, source in rows:
        before, parent = len(tokens), 0
        for token in row:
            child = children.get((parent, token)) if merged else None
            if child is None:
                if len(tokens) > budget:
                    break
                child = children[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                sources.append(source)
            parent = child
        branches += len(tokens) > before
        if branches == most or len(tokens) > budget:
            break
    return DraftTree.of(tokens, parents, sources)
