"""Draft trees as lists."""

from __future__ import annotations

from outrider.experiments.papers.ablation.frequency_trie import Draft


def chains(tree: Draft) -> Draft:
    """Return the paths to the leaves as disjoint chains below the root, in the order of the leaves, cut to as many rows.

    Example: root 7 with 1, below it 2 and 3, becomes ``7 1 2 1`` with the parents ``-1 0 1 0``.
    """
    draft = Draft(tree.tokens[:1], [-1])
    for leaf in sorted(set(range(1, len(tree.tokens))).difference(tree.parents)):
        path: list[int] = []
        row = leaf
        while row > 0:
            path.append(tree.tokens[row])
            row = tree.parents[row]
        for depth, token in enumerate(path[::-1][: len(tree.tokens) - len(draft.tokens)]):
            draft.parents.append(len(draft.tokens) - 1 if depth else 0)
            draft.tokens.append(token)
    return draft
