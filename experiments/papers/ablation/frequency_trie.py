"""The frequency trie of Alipay's Lookahead, in plain Python: what the compiled one is compared with."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence

from decoding.tree import Int32Array
from experiments.papers.ablation import frequency_trie_nodes as trie_nodes
from experiments.papers.ablation.frequency_trie_nodes import Branch, Draft, Mode, Node, Tree

__all__ = ["Branch", "Draft", "FrequencyTrie", "Mode"]

Tokens = Sequence[int] | Int32Array


class FrequencyTrie:
    """Trie of token branches with frequencies (Lookahead, arXiv 2312.12728, section 4).

    There is one tree per first token. A sequence is inserted once for each of its positions, with the ``branch_length`` tokens
    that follow. A node counts the outputs that went through it, which all requests share, and for each request the branches of
    its prompt. A draft is looked up by the last tokens of a text, the longest suffix first; prompt frequencies weigh 9,999 times
    as much as output frequencies.

    Example: after ``put([100, 1, 30, 31], 3)``, ``put([100, 1, 40, 41], 3)`` and ``put([100, 1, 40, 42], 3)``,
    ``hierarchical([100], 7, 4)`` has the tokens ``100 1 40 41 42 30 31`` and the parents ``-1 0 1 2 2 1 5``.

    Departures from the published code, all where it contradicts its paper or itself: nodes that are alive for nobody, or for
    another request only, are never drafted; row 0 is always the query's last token, also if that is token 0; ``single`` weighs
    prompts and outputs as ``hierarchical`` does; a sequence is split at end tokens and not cut at the first; nodes of a longer
    suffix are kept and those of shorter ones appended to them; of more nodes than fit, the best are taken as the paper says;
    eliminating one request's prompt leaves those of others.
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
            max_output_nodes: of one tree, counting those created by outputs.
            prune_after: trees that must have changed before the end of an output prunes them.

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
        self._prompt_trees: dict[Hashable, set[int]] = {}  # request -> first tokens of trees that hold its prompt
        self._pending: dict[Hashable, list[int]] = {}  # request -> output tokens that open no complete branch yet

    def put(self, tokens: Tokens, branch_length: int, request: Hashable | None = None) -> None:
        """Inserts a whole sequence.

        Args:
            tokens: [n] token ids.
            branch_length: tokens stored after each position; one more than what is drafted serves queries of two tokens.
            request: whose prompt it is; None for an output.
        """
        for segment in self._segments(tokens):
            for start in range(len(segment) - 1):
                self._insert(segment[start : start + branch_length + 1], request)

    def stream(self, request: Hashable, tokens: Tokens, branch_length: int, final: bool = False) -> None:
        """Inserts the next tokens of a growing output; in the end the branches are those of one ``put``.

        A position is inserted once ``branch_length`` tokens follow it. An end token and the end of the output insert the shorter
        branches. After the end the request's prompt is eliminated and the trie pruned where it is due.

        Args:
            request: whose output it is.
            tokens: [n] the tokens after those of the calls before; may be empty.
            branch_length: as in ``put``.
            final: nothing follows.
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
        """Takes the frequencies of a request's prompt out. Nodes stay until a pruning."""
        for first in self._prompt_trees.pop(request, ()):
            if first in self._trees:
                trie_nodes.forget(self._trees[first], request)

    def prune(self) -> None:
        """Prunes the trees that changed since the last time and are over a limit.

        Nodes of output frequency 1 or less go with all below them, those of prompts too; the frequency of the others is halved.
        """
        for first in self._changed:
            tree = self._trees[first]
            if tree.num_nodes > self._max_nodes or tree.num_output_nodes > self._max_output_nodes:
                trie_nodes.halve(tree)
                tree.num_nodes = tree.num_output_nodes = trie_nodes.count_nodes(tree)
                if not tree.children:
                    del self._trees[first]
        self._changed.clear()

    def hierarchical(
        self, query: Tokens, decoding_length: int, branch_length: int, min_input: int = 0, min_output: int | None = None,
        mode: Mode = "mix", request: Hashable | None = None,
    ) -> Draft:  # fmt: skip
        """The draft tree for a text that ends in ``query``.

        Suffixes of the query are looked up from the longest on, until there are ``branch_length`` rows. Each adds the nodes below
        its place that are not in the draft yet: all if they fit, else the ``min_input`` best by prompt frequency, then the
        ``min_output`` best by output frequency, then the best by mixed frequency. Rows of one suffix are in pre-order, the
        children of a node by the mode's frequency and then by age; ties are cut in the same order.

        Args:
            query: [m] the last tokens of the text, at least one.
            decoding_length: the most rows, the root counted.
            branch_length: the most edges below the root.
            min_input: nodes reserved for the prompt, in mode ``mix``.
            min_output: nodes reserved for outputs, in mode ``mix``; half of ``decoding_length`` when absent.
            mode: which frequencies count: the prompt's, outputs', or both.
            request: whose prompt counts.
        """
        reserved_output = max(decoding_length // 2, 1) if min_output is None else min_output
        draft = Draft([int(query[-1])], [-1])
        rows: dict[tuple[int, ...], int] = {(): 0}
        for node in self._matches(query, mode, request):
            room = decoding_length - len(draft.tokens)
            if room <= 0:
                break
            new = [branch for branch in trie_nodes.preorder(node, (), branch_length, mode, request) if branch.path not in rows]
            for branch in trie_nodes.best(new, room, min_input, reserved_output, mode):
                rows[branch.path] = len(draft.tokens)
                draft.tokens.append(branch.path[-1])
                draft.parents.append(rows[branch.path[:-1]])
            if 1 < len(draft.tokens) >= branch_length:
                break
        return draft

    def single(
        self, query: Tokens, decoding_length: int, branch_length: int, mode: Mode = "mix", request: Hashable | None = None
    ) -> Draft:
        """One chain: the best child of the best child and so on. A shorter suffix goes on where a longer one knew no more.

        Suffixes are tried until there are ``branch_length // 2`` rows. Arguments as in ``hierarchical``.
        """
        chain: list[int] = []
        longest = min(branch_length, decoding_length - 1)
        for match in self._matches(query, mode, request):
            node: Node | None = trie_nodes.descend(match, chain, mode, request)
            while node is not None and len(chain) < longest:
                children = trie_nodes.ranked(node, (), mode, request)
                node = children[0][1] if children else None
                chain.extend(children[0][0].path if children else ())
            if chain and len(chain) + 1 >= branch_length // 2:
                break
        return Draft([int(query[-1]), *chain], list(range(-1, len(chain))))

    def size(self, first: int) -> tuple[int, int]:
        """(nodes, nodes created by outputs) of the tree of a first token; zeros where there is none."""
        tree = self._trees.get(first)
        return (tree.num_nodes, tree.num_output_nodes) if tree else (0, 0)

    def branches(self, first: int, request: Hashable | None = None) -> Iterator[Branch]:
        """All nodes of the tree of a first token in pre-order, by age, dead ones too, with the frequencies for a request."""
        if first in self._trees:
            yield from trie_nodes.by_age(self._trees[first], (), request)

    def firsts(self) -> list[int]:
        """The first tokens that have a tree, by age."""
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
        """The nodes of the query's suffixes, the longest first."""
        for start in range(len(query)):
            first, *rest = map(int, query[start:])
            if first not in self._trees:
                continue
            node = trie_nodes.descend(self._trees[first], rest, mode, request)
            if node is not None:
                yield node
