"""Exact verification of a draft tree: the walk down the tokens that the target itself chooses."""

from __future__ import annotations

from collections.abc import Callable, Set

from outrider.decoding.tree import Acceptance, DraftTree


def verify_exact(tree: DraftTree, choose: Callable[[int], int], max_tokens: int, end_tokens: Set[int]) -> Acceptance:
    """Verify a tree by matching: emit the target's own token at each row, and descend if a child holds it.

    Lossless for any draft, greedy and sampled, if ``choose`` depends on the row's prefix alone (position-keyed randomness, see
    ``decoding.sampling.sampler``). It has the distribution of the published multi-candidate rule (Lookahead Decoding, arXiv
    2402.02057, Algorithm 4) with one draw per visited row. It emits 1 to ``max_tokens`` tokens.

    Example: root 7 with branches 1 2 and 3; the target chooses 1 at the root, 2 after 1, 9 after 1 2: 1, 2 and 9 are emitted.

    Args:
        choose: row -> the target's token after the path to that row. Called once for each visited row, from the root down.
        end_tokens: tokens after which nothing is emitted, even if a child holds them.
    """
    if tree.num_candidates == 1:
        return Acceptance((), choose(0))
    tokens, parents, last = tree.tokens.tolist(), tree.parents.tolist(), int(tree.num_candidates)
    reached, depth = [0], 0  # rows with the same path: branches may begin with the same tokens
    while True:
        token = choose(reached[0])
        below = _children(tokens, parents, last, reached, token)
        # An end token is emitted as the bonus token even if a child holds it: nothing may follow it.
        if not below or token in end_tokens or depth + 1 >= max_tokens:
            break
        reached, depth = below, depth + 1
    path, row = [], reached[0]
    while row > 0:
        path.append(row)
        row = parents[row]
    return Acceptance(tuple(path[::-1]), token)


def _children(tokens: list[int], parents: list[int], last: int, rows: list[int], token: int) -> list[int]:
    """Return ``DraftTree.children`` of ascending ``rows``, computed on lists."""
    found, row = [], rows[0]
    try:
        while True:
            row = tokens.index(token, row + 1, last)
            if parents[row] in rows:
                found.append(row)
    except ValueError:  # no further row holds the token
        return found
