"""Windows of texts as a trie of bounded size: what followed the ends of a text, and how often (RACER's retrieval)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence


class TrieNode:
    """The place that some tokens lead to."""

    __slots__ = ("children", "count", "parent", "token")

    def __init__(self, token: int, parent: TrieNode | None) -> None:
        self.token, self.parent = token, parent
        self.count = 0  # windows through it
        self.children: dict[int, TrieNode] = {}


class WindowTrie:
    """A trie of all windows of ``window`` tokens; where it holds more than ``capacity`` nodes, those seen longest ago go.

    A visit makes a node and all above it the latest, the node first: so a node never goes before those below it.

    Example: of the windows of 4 of ``1 2 3 4 1 2 5 4 1`` one begins with ``4 1 2``, which ``5`` follows, and two with ``1 2``,
    which ``3 4`` and ``5 4`` follow: after a further 2 the ends of the text are ``4 1 2`` and ``1 2``.
    """

    def __init__(self, window: int, capacity: int) -> None:
        """
        Args:
            window: tokens of a window, at least 2.
            capacity: nodes to keep, at least ``window``.
        """
        self._window, self._capacity = window, capacity
        self._root = TrieNode(-1, None)
        self._nodes: dict[TrieNode, None] = {}  # the one seen longest ago first

    def __len__(self) -> int:
        return len(self._nodes)

    def learn(self, tokens: Sequence[int], known: int) -> None:
        """Adds the windows of a text that end behind its first ``known`` tokens."""
        for end in range(max(known + 1, self._window), len(tokens) + 1):
            node = self._root
            for token in tokens[end - self._window : end]:
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = TrieNode(token, node)
                    self._nodes[child] = None
                child.count += 1
                node = child
            self._visit(node)
            while len(self._nodes) > self._capacity:
                oldest = next(iter(self._nodes))
                del self._nodes[oldest]
                assert oldest.parent is not None and not oldest.children, oldest.token
                del oldest.parent.children[oldest.token]

    def ends(self, tokens: Sequence[int], least: int) -> list[TrieNode]:
        """The nodes of the ends of a text that windows begin with, of ``least`` tokens and more, the longest first."""
        found = []
        for length in range(min(self._window - 1, len(tokens)), least - 1, -1):
            node = self._root
            for token in tokens[len(tokens) - length :]:
                child = node.children.get(token)
                if child is None:
                    break
                node = child
            else:
                found.append(node)
                self._visit(node)
        return found

    def _visit(self, node: TrieNode) -> None:
        nodes = self._nodes
        while node.parent is not None:
            del nodes[node]
            nodes[node] = None
            node = node.parent


def likeliest(ends: Sequence[TrieNode], count: int) -> Iterator[tuple[TrieNode, TrieNode, int]]:
    """The ``count`` nodes at and below some ends that were seen most often, of equals the nearest to its end.

    Yields:
        (node, the end that it is below, tokens from there to it), a node after the one above it. What two ends have in common is
        there twice.
    """
    heap = [(-end.count, 0, order, end, end) for order, end in enumerate(ends)]
    heapq.heapify(heap)
    entered = len(heap)
    for _ in range(count):
        if not heap:
            return
        _, depth, _, node, end = heapq.heappop(heap)
        yield node, end, depth
        for child in node.children.values():
            heapq.heappush(heap, (-child.count, depth + 1, entered, child, end))
            entered += 1
