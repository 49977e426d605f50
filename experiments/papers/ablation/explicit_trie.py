"""The published trie as a drafter, explicit nodes in plain Python, and what each of its parts brings.

The ablation of Alipay's Lookahead (arXiv 2312.12728, tables 5 and 6) on known outputs, replayed without a model: the trie runs
without each of its parts, and with each capacity, nodes that outputs may add to each first token's tree, in multiples of the
decoding length. The paper measures tokens per second on a GPU; here it is tokens per step, and the processor time of the trie
itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from decoding.budget.latency import StepLoad
from decoding.drafters.base import Drafter, TargetRows
from decoding.replay import KnownText, replay_workload
from decoding.request import Acceptance, Request
from decoding.tree import SOURCES, DraftTree, Int32Array
from experiments.papers.ablation.frequency_trie import FrequencyTrie
from experiments.papers.numbers.trie import CAPACITIES, FULL

_SOURCE = SOURCES.index("trie")
_EVERYBODY = "everybody"  # owns the prompts where none is eliminated
_NEVER = 1 << 62  # changed trees before a pruning
BRANCH_LENGTH = 12
DECODING_LENGTH = 64
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class TrieParts:
    """What of the method is there."""

    prompts: bool = True
    outputs: bool = True
    pruning: bool = True
    elimination: bool = True
    capacity: int = 16  # in multiples of the decoding length; the paper's choice (its Table 6)


class ExplicitTrieDrafter(Drafter):
    """Alipay's Lookahead (arXiv 2312.12728, section 4.3) on ``FrequencyTrie``, for one request at a
    time.

    As published: the prompt's branches go in at the prefill, the output's after each step, a branch once it is whole, and the
    request's end eliminates its prompt and, where 1024 trees changed, prunes those above their capacity: ``capacity`` times the
    decoding length nodes made by outputs, or twice as many nodes. Branches are stored one token longer than they are drafted.

    Without elimination a prompt counts as much for later requests as for its own: there is one owner of all prompts, as in the
    published code for one request at a time.

    Work is done where it can be timed apart: retrieval in ``propose``, insertion in ``observe``, and what a request's end brings
    (the last branches, elimination, pruning) in ``finish``.
    """

    def __init__(
        self,
        parts: TrieParts,
        decoding_length: int = 64,
        branch_length: int = 12,
        max_query_length: int = 2,
        prune_after: int = 1024,
    ) -> None:
        """
        Args:
            parts: what is there.
            decoding_length: most rows of a tree, the root counted.
            branch_length: most tokens of a branch.
            max_query_length: tokens to look up.
            prune_after: trees that must have changed before a pruning.
        """
        nodes = parts.capacity * decoding_length
        due = prune_after if parts.pruning else _NEVER
        self.trie = FrequencyTrie(max_nodes=2 * nodes, max_output_nodes=nodes, prune_after=due)
        self._parts, self._max_query_length = parts, max_query_length
        self._decoding_length, self._branch_length = decoding_length, branch_length
        self._inserted: dict[str, int] = {}  # request -> tokens of it that were inserted

    def warm(self, outputs: Sequence[Int32Array]) -> None:
        """Inserts outputs of requests that came before, as their ends left them."""
        for output in outputs:
            self._stream("", output, True)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """One tree per request."""
        return [self._propose(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def _propose(self, request: Request, budget: int) -> DraftTree:
        draft = self.trie.hierarchical(
            request.tokens[-self._max_query_length :].tolist(),
            min(self._decoding_length, budget + 1),
            min(self._branch_length, request.remaining - 1),
            request=self._owner(request),
        )
        sources = np.full(len(draft.tokens), _SOURCE, np.int8)
        sources[0] = 0
        return DraftTree(np.asarray(draft.tokens, np.int32), np.asarray(draft.parents, np.int32), sources, len(draft.tokens))

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """Inserts what the step emitted; after the prefill the prompt too."""
        self._insert(request, False)

    def finish(self, request: Request) -> None:
        """Completes the output's branches, eliminates the prompt, prunes."""
        self._insert(request, True)
        del self._inserted[request.request_id]

    def _insert(self, request: Request, final: bool) -> None:
        if request.request_id not in self._inserted:
            self._inserted[request.request_id] = request.num_prompt
            if self._parts.prompts:
                self.trie.put(request.prompt_ids, self._branch_length + 1, self._owner(request))
        self._stream(request.request_id, request.tokens[self._inserted[request.request_id] :], final)
        self._inserted[request.request_id] = request.num_tokens

    def _stream(self, request_id: str, tokens: Int32Array, final: bool) -> None:
        self.trie.stream(request_id, tokens if self._parts.outputs else (), self._branch_length + 1, final)

    def _owner(self, request: Request) -> Hashable:
        return request.request_id if self._parts.elimination else _EVERYBODY


PARTS = {
    FULL: TrieParts(),
    "without prompt branches": TrieParts(prompts=False),
    "without output branches": TrieParts(outputs=False),
    "without pruning": TrieParts(pruning=False),
    "without elimination": TrieParts(elimination=False),
}


@dataclass(frozen=True, slots=True)
class Reached:
    """What a replay came to."""

    tokens_per_step: float
    trie_s: float  # of the trie itself in a step
    texts: tuple[tuple[int, int, float], ...]  # of each: tokens, steps, seconds of the trie


def ablate(
    before: Sequence[KnownText], texts: Sequence[KnownText], vocab_size: int, say: Callable[[str], None]
) -> tuple[dict[str, Reached], dict[str, Reached]]:
    """By label, the method without each part, and with each capacity.

    Args:
        before: whose outputs are in the trie before, as the paper warms its own with a training split.
        texts: that are replayed; their references are left out, as the published method has none.
        vocab_size: of the tokenizer that cut them.
        say: is told what runs.
    """
    bare = [replace(text, references=()) for text in texts]
    sized = {f"capacity {capacity}x": TrieParts(capacity=capacity) for capacity in CAPACITIES}
    found: dict[str, list[tuple[int, int, float]]] = {}
    for number in range(_ROUNDS):  # in turns, of which the shortest count: the first to run at all takes longer
        for label, parts in (PARTS | sized).items():
            say(f"the explicit trie, {label}, {number + 1} of {_ROUNDS}")
            laps = _replayed(parts, before, bare, vocab_size)
            found[label] = [min(pair) for pair in zip(found.get(label, laps), laps, strict=True)]
    by_part, by_size = ({label: _reached(found[label]) for label in labels} for labels in (PARTS, sized))
    return by_part, by_size


def _replayed(
    parts: TrieParts, before: Sequence[KnownText], texts: Sequence[KnownText], vocab_size: int
) -> list[tuple[int, int, float]]:
    """Tokens, steps and seconds of the trie, of each text."""
    drafter, laps = ExplicitTrieDrafter(parts, DECODING_LENGTH, BRANCH_LENGTH), []
    drafter.warm([text.output_ids for text in before])
    # The processor's time: what else runs on the machine does not count.
    for number, text in enumerate(texts):
        counts = replay_workload(
            [text], lambda: drafter, DECODING_LENGTH - 1, vocab_size, time.thread_time, id_prefix=f"{number}-"
        )
        spent = sum(counts.propose_s) + sum(counts.observe_s) + sum(counts.finish_s)
        laps.append((counts.tokens, counts.steps, spent))
    return laps


def _reached(laps: Sequence[tuple[int, int, float]]) -> Reached:
    tokens, steps, spent = map(sum, zip(*laps, strict=True))
    return Reached(tokens / steps, spent / steps, tuple(laps))
