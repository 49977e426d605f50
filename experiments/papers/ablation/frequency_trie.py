"""Explicit frequency trie of Alipay's Lookahead in plain Python, the reference of the compiled one."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Literal, NamedTuple

from outrider.decoding.arrays import Int32Array

Mode = Literal["mix", "input", "output"]
Tokens = Sequence[int] | Int32Array

_PROMPT_WEIGHT = 9999  # relative to an output's frequency: the published (1 - 1e-4) to 1e-4, in exact numbers


class Draft(NamedTuple):
    """A draft tree as lists. Row 0 is the last token of the query and ``parents[i] < i``."""

    tokens: list[int]  # [n]
    parents: list[int]  # [n], parents[0] == -1


class Branch(NamedTuple):
    """A node's path and its frequencies for one request."""

    path: tuple[int, ...]
    prompt: float
    output: float

    def weight(self, mode: Mode) -> float:
        """Return the weight by which nodes are ranked."""
        if mode == "mix":
            return _PROMPT_WEIGHT * self.prompt + self.output
        return self.prompt if mode == "input" else self.output


class Node:
    """A token of a branch, which is its key in ``children`` of its parent."""

    __slots__ = ("children", "output", "prompts")

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}  # in order of insertion
        self.output = 0.0  # outputs that passed through, shared by all requests
        self.prompts: dict[Hashable, float] = {}  # request -> branches of its prompt that passed through

    def branch(self, path: tuple[int, ...], request: Hashable) -> Branch:
        """Return the node as one request sees it."""
        return Branch(path, self.prompts.get(request, 0.0), self.output)


class Tree(Node):
    """Continuations of one token, with counters of created nodes; a prompt's node never counts as an output's."""

    __slots__ = ("num_nodes", "num_output_nodes")

    def __init__(self) -> None:
        super().__init__()
        self.num_nodes = self.num_output_nodes = 0


class FrequencyTrie:
    """Trie of token branches with frequencies (Lookahead, arXiv 2312.12728, section 4).

    There is one tree per first token. A sequence is inserted once for each of its positions, with the ``branch_length`` tokens
    that follow. A node counts outputs, shared by all requests, and for each request the branches of its prompt. A draft is looked
    up by the last tokens of a text, the longest suffix first; prompt frequencies weigh 9,999 times as much as output frequencies.

    Example: after ``put([100, 1, 30, 31], 3)``, ``put([100, 1, 40, 41], 3)`` and ``put([100, 1, 40, 42], 3)``,
    ``hierarchical([100], 7, 4)`` has the tokens ``100 1 40 41 42 30 31`` and the parents ``-1 0 1 2 2 1 5``.

    Departures from the published code, all where it contradicts its paper or itself: nodes without frequency for a request are
    never drafted; row 0 is always the query's last token, also if that is token 0; ``single`` weighs prompts and outputs as
    ``hierarchical`` does; a sequence is split at end tokens and not cut at the first; nodes of a longer suffix are kept and those
    of shorter ones appended; of more nodes than fit, the best are taken as the paper says; eliminating one request's prompt
    leaves those of others.
    """

    def __init__(
        self,
        end_token_ids: Collection[int] = (),
        max_nodes: int = 65536,
        max_output_nodes: int = 512,
        prune_after: int = 1024,
    ) -> None:
        """
        Args:
            end_token_ids: never stored and never drafted; no branch crosses one.
            max_nodes: of one tree; a larger one is pruned.
            max_output_nodes: of one tree, created by outputs.
            prune_after: changed trees before the end of an output prunes them.

        Raises:
            ValueError: a limit below 1.
        """
        for name, value in (("max_nodes", max_nodes), ("max_output_nodes", max_output_nodes), ("prune_after", prune_after)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._ends = frozenset(end_token_ids)
        self._max_nodes, self._max_output_nodes, self._prune_after = max_nodes, max_output_nodes, prune_after
        self._trees: dict[int, Tree] = {}
        self._changed: set[int] = set()  # first tokens of trees that changed since the last pruning
        self._prompt_trees: dict[Hashable, set[int]] = {}  # request -> first tokens of trees with its prompt
        self._pending: dict[Hashable, list[int]] = {}  # request -> output tokens without a complete branch

    def put(self, tokens: Tokens, branch_length: int, request: Hashable | None = None) -> None:
        """Insert a whole sequence: the prompt of ``request``, or an output.

        ``branch_length`` tokens are stored after each position; one more than is drafted serves queries of two tokens.
        """
        for segment in self._segments(tokens):
            for start in range(len(segment) - 1):
                self._insert(segment[start : start + branch_length + 1], request)

    def stream(self, request: Hashable, tokens: Tokens, branch_length: int, final: bool = False) -> None:
        """Insert the next tokens of a growing output; the final branches equal those of one ``put``.

        A position is inserted once ``branch_length`` tokens follow it; an end token and the end of the output insert the shorter
        branches. ``final`` eliminates the request's prompt and prunes the trie if due.
        """
        pending = self._pending.setdefault(request, [])
        for token in map(int, tokens):
            if token in self._ends:
                self._flush(pending)
                continue
            pending.append(token)
            if len(pending) > branch_length:
                self._open(pending)
                del pending[0]
        if final:
            self._flush(pending)
            del self._pending[request]
            self.eliminate(request)
            if len(self._changed) >= self._prune_after:
                self.prune()

    def eliminate(self, request: Hashable) -> None:
        """Remove the frequencies of a request's prompt; nodes stay until a pruning."""
        for first in self._prompt_trees.pop(request, ()):
            if first in self._trees:
                _forget(self._trees[first], request)

    def prune(self) -> None:
        """Prune the changed trees that exceed a limit.

        Nodes of output frequency 1 or less are removed with all below them; the frequency of the others is halved.
        """
        for first in self._changed:
            tree = self._trees[first]
            if tree.num_nodes > self._max_nodes or tree.num_output_nodes > self._max_output_nodes:
                _halve(tree)
                tree.num_nodes = tree.num_output_nodes = sum(1 for _ in _by_age(tree, (), None))
                if not tree.children:
                    del self._trees[first]
        self._changed.clear()

    def hierarchical(
        self, query: Tokens, decoding_length: int, branch_length: int, min_input: int = 0, min_output: int | None = None,
        mode: Mode = "mix", request: Hashable | None = None,
    ) -> Draft:  # fmt: skip
        """Return the draft tree for a text that ends in ``query``.

        Suffixes of the query are looked up from the longest on, until there are ``branch_length`` rows. Each adds its nodes that
        are not in the draft yet: all if they fit, else the ``min_input`` best by prompt frequency, then the ``min_output`` best
        by output frequency, then the best by mixed frequency. Rows of one suffix are in pre-order, children by frequency and
        then by age.

        Args:
            query: [m] the last tokens of the text, at least one.
            decoding_length: maximum rows, the root included.
            branch_length: maximum edges below the root.
            min_input: nodes reserved for the prompt, in mode ``mix``.
            min_output: nodes reserved for outputs, in mode ``mix``; half of ``decoding_length`` if None.
            mode: frequencies that count: the prompt's, outputs', or both.
            request: whose prompt counts.
        """
        reserved_output = max(decoding_length // 2, 1) if min_output is None else min_output
        draft = Draft([int(query[-1])], [-1])
        rows: dict[tuple[int, ...], int] = {(): 0}
        for node in self._matches(query, mode, request):
            room = decoding_length - len(draft.tokens)
            if room <= 0:
                break
            new = [branch for branch in _preorder(node, (), branch_length, mode, request) if branch.path not in rows]
            for branch in _best(new, room, min_input, reserved_output, mode):
                rows[branch.path] = len(draft.tokens)
                draft.tokens.append(branch.path[-1])
                draft.parents.append(rows[branch.path[:-1]])
            if 1 < len(draft.tokens) >= branch_length:
                break
        return draft

    def single(
        self, query: Tokens, decoding_length: int, branch_length: int, mode: Mode = "mix", request: Hashable | None = None
    ) -> Draft:
        """Return the chain of the best child of the best child, continued by shorter suffixes; arguments of ``hierarchical``.

        Suffixes are tried until there are ``branch_length // 2`` rows.
        """
        chain: list[int] = []
        longest = min(branch_length, decoding_length - 1)
        for match in self._matches(query, mode, request):
            node: Node | None = _descend(match, chain, mode, request)
            while node is not None and len(chain) < longest:
                children = _ranked(node, (), mode, request)
                node = children[0][1] if children else None
                chain.extend(children[0][0].path if children else ())
            if chain and len(chain) + 1 >= branch_length // 2:
                break
        return Draft([int(query[-1]), *chain], list(range(-1, len(chain))))

    def size(self, first: int) -> tuple[int, int]:
        """Return the number of nodes, and of nodes created by outputs, of the tree of a first token."""
        tree = self._trees.get(first)
        return (tree.num_nodes, tree.num_output_nodes) if tree else (0, 0)

    def branches(self, first: int, request: Hashable | None = None) -> Iterator[Branch]:
        """Yield all nodes of the tree of a first token in pre-order by age, including those without frequency."""
        if first in self._trees:
            yield from _by_age(self._trees[first], (), request)

    def firsts(self) -> list[int]:
        """Return the first tokens that have a tree, by age."""
        return list(self._trees)

    def _segments(self, tokens: Tokens) -> Iterator[list[int]]:
        segment: list[int] = []
        for token in map(int, tokens):
            if token in self._ends:
                yield segment
                segment = []
            else:
                segment.append(token)
        yield segment

    def _insert(self, branch: Sequence[int], request: Hashable | None) -> None:
        first = branch[0]
        tree = self._trees.setdefault(first, Tree())
        node: Node = tree
        created = 0
        for token in branch[1:]:
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = Node()
                created += 1
            node = child
            if request is None:
                node.output += 1
            else:
                node.prompts[request] = node.prompts.get(request, 0.0) + 1
        tree.num_nodes += created
        if request is None:
            tree.num_output_nodes += created
        else:
            self._prompt_trees.setdefault(request, set()).add(first)
        self._changed.add(first)

    def _open(self, branch: Sequence[int]) -> None:
        if len(branch) > 1:
            self._insert(branch, None)

    def _flush(self, pending: list[int]) -> None:
        for start in range(len(pending)):
            self._open(pending[start:])
        pending.clear()

    def _matches(self, query: Tokens, mode: Mode, request: Hashable | None) -> Iterator[Node]:
        """Yield the nodes of the query's suffixes, the longest first."""
        for start in range(len(query)):
            first, *rest = map(int, query[start:])
            if first not in self._trees:
                continue
            node = _descend(self._trees[first], rest, mode, request)
            if node is not None:
                yield node


def _descend(node: Node, path: Sequence[int], mode: Mode, request: Hashable | None) -> Node | None:
    """Return the node at the end of a path; None unless all its nodes have a frequency."""
    for token in path:
        child = node.children.get(token)
        if child is None or child.branch((), request).weight(mode) <= 0:
            return None
        node = child
    return node


def _ranked(node: Node, path: tuple[int, ...], mode: Mode, request: Hashable | None) -> list[tuple[Branch, Node]]:
    """Return the children with a frequency, the best first, ties by age."""
    children = [(child.branch((*path, token), request), child) for token, child in node.children.items()]
    live = [pair for pair in children if pair[0].weight(mode) > 0]
    return sorted(live, key=lambda pair: -pair[0].weight(mode))


def _preorder(node: Node, path: tuple[int, ...], depth: int, mode: Mode, request: Hashable | None) -> Iterator[Branch]:
    """Yield the nodes with a frequency at most ``depth`` below a node, the best child first."""
    if depth > 0:
        for branch, child in _ranked(node, path, mode, request):
            yield branch
            yield from _preorder(child, branch.path, depth - 1, mode, request)


def _best(branches: list[Branch], room: int, min_input: int, min_output: int, mode: Mode) -> list[Branch]:
    """Return at most ``room`` of branches in pre-order, parents included since frequencies never rise along a path.

    The published code cuts one node too many in the build, and ties if one frequency counts. Both are kept: with ``room`` for 2
    of the nodes 5, 5 6 and 7 in pre-order, 5 and 5 6 stay.
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
    """Return the indices of the branches with a frequency, the best first, ties in pre-order."""
    weights = [branch.weight(by) for branch in branches]
    return sorted((i for i, weight in enumerate(weights) if weight > 0), key=lambda i: -weights[i])


def _forget(node: Node, request: Hashable) -> None:
    """Remove a request's frequencies below a node; below a node without one there is none."""
    for child in node.children.values():
        if child.prompts.pop(request, None) is not None:
            _forget(child, request)


def _halve(node: Node) -> None:
    """Remove the nodes of output frequency at most 1 with all below them, and halve the others' frequency."""
    node.children = {token: child for token, child in node.children.items() if child.output > 1}
    for child in node.children.values():
        child.output /= 2
        _halve(child)


def _by_age(node: Node, path: tuple[int, ...], request: Hashable | None) -> Iterator[Branch]:
    """Yield all nodes below a node in pre-order, the oldest child first."""
    for token, child in node.children.items():
        branch = child.branch((*path, token), request)
        yield branch
        yield from _by_age(child, branch.path, request)
