"""The nodes of the frequency trie and drafts made of them: frequencies, ranking, pruning."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, NamedTuple

Mode = Literal["mix", "input", "output"]

_PROMPT_WEIGHT = 9999  # beside an output's frequency: the published (1 - 1e-4) to 1e-4, in numbers that add up without rounding


class Draft(NamedTuple):
    """A draft tree as lists. Row 0 is the last token of the query and ``parents[i] < i``."""

    tokens: list[int]  # [n]
    parents: list[int]  # [n], parents[0] == -1


class Branch(NamedTuple):
    """A node with the tokens that lead to it and its frequencies for one request."""

    path: tuple[int, ...]
    prompt: float
    output: float

    def weight(self, mode: Mode) -> float:
        """What nodes are ranked by."""
        if mode == "mix":
            return _PROMPT_WEIGHT * self.prompt + self.output
        return self.prompt if mode == "input" else self.output


class Node:
    """A token of a branch; the token itself is the key under which its parent holds it."""

    __slots__ = ("children", "output", "prompts")

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}  # in order of insertion
        self.output = 0.0  # outputs that went through, shared by all requests
        self.prompts: dict[Hashable, float] = {}  # branches of a request's prompt that went through

    def branch(self, path: tuple[int, ...], request: Hashable) -> Branch:
        """The node as one request sees it."""
        return Branch(path, self.prompts.get(request, 0.0), self.output)


class Tree(Node):
    """What followed one token. The counters are of nodes created: one made by a prompt never counts as an output's."""

    __slots__ = ("num_nodes", "num_output_nodes")

    def __init__(self) -> None:
        super().__init__()
        self.num_nodes = self.num_output_nodes = 0


def descend(node: Node, path: Sequence[int], mode: Mode, request: Hashable | None) -> Node | None:
    """The live node at the end of a path, or None."""
    for token in path:
        child = node.children.get(token)
        if child is None or child.branch((), request).weight(mode) <= 0:
            return None
        node = child
    return node


def ranked(node: Node, path: tuple[int, ...], mode: Mode, request: Hashable | None) -> list[tuple[Branch, Node]]:
    """The live children, the best first, ties by age."""
    children = [(child.branch((*path, token), request), child) for token, child in node.children.items()]
    live = [pair for pair in children if pair[0].weight(mode) > 0]
    return sorted(live, key=lambda pair: -pair[0].weight(mode))


def preorder(node: Node, path: tuple[int, ...], depth: int, mode: Mode, request: Hashable | None) -> Iterator[Branch]:
    """The live nodes at most ``depth`` below a node, each before those below it, the best child first."""
    if depth > 0:
        for branch, child in ranked(node, path, mode, request):
            yield branch
            yield from preorder(child, branch.path, depth - 1, mode, request)


def best(branches: list[Branch], room: int, min_input: int, min_output: int, mode: Mode) -> list[Branch]:
    """At most ``room`` of some branches in pre-order, parents among them since frequencies never rise along a path.

    In the published code one node too many is cut off by the build, and where one frequency counts, ties are. Both are kept: with
    ``room`` for 2 of the nodes 5, 5 6 and 7 in pre-order, 5 and 5 6 stay.
    """
    if len(branches) <= room + 1:
        return branches[:room]
    if mode != "mix":
        bar = sorted((branch.weight(mode) for branch in branches), reverse=True)[room]
        return [branch for branch in branches if branch.weight(mode) >= bar][:room]
    chosen: set[int] = set()
    reserved: tuple[tuple[Mode, int], ...] = (("input", min_input), ("output", min_output))
    for by, count in reserved:
        chosen.update(_order(branches, by)[: min(count, room - len(chosen))])
    rest = [i for i in _order(branches, "mix") if i not in chosen]
    chosen.update(rest[: room - len(chosen)])
    return [branches[i] for i in sorted(chosen)]


def _order(branches: list[Branch], by: Mode) -> list[int]:
    """Indices of the branches that live by some frequency, the best first, ties in pre-order."""
    weights = [branch.weight(by) for branch in branches]
    return sorted((i for i, weight in enumerate(weights) if weight > 0), key=lambda i: -weights[i])


def forget(node: Node, request: Hashable) -> None:
    """Drops a request's frequencies below a node; where a node has none, none below it has."""
    for child in node.children.values():
        if child.prompts.pop(request, None) is not None:
            forget(child, request)


def halve(node: Node) -> None:
    """Drops the nodes that at most one output went through, with all below them, and halves the others' frequency."""
    node.children = {token: child for token, child in node.children.items() if child.output > 1}
    for child in node.children.values():
        child.output /= 2
        halve(child)


def count_nodes(node: Node) -> int:
    """Nodes below a node."""
    return sum(1 + count_nodes(child) for child in node.children.values())


def by_age(node: Node, path: tuple[int, ...], request: Hashable | None) -> Iterator[Branch]:
    """All nodes below a node in pre-order, dead ones too, the oldest child first."""
    for token, child in node.children.items():
        branch = child.branch((*path, token), request)
        yield branch
        yield from by_age(child, branch.path, request)


def chains(tree: Draft) -> Draft:
    """The paths to the leaves of a tree as disjoint chains below the root, in the order of the leaves, cut to as many rows.

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
