"""Ablation of Alipay's Lookahead (arXiv 2312.12728, tables 5 and 6): the published trie without each part, and by capacity.

Known outputs are replayed without a model. The result is tokens per step, and the processor time of the trie itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.decoding.arrays import Int32Array
from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.replay import KnownText, replay_workload
from outrider.decoding.request import Request
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree
from outrider.experiments.papers.ablation.frequency_trie import FrequencyTrie

_SOURCE = SOURCES.index("trie")
_EVERYBODY = "everybody"  # owner of all prompts without elimination
_NEVER = 1 << 62  # changed trees before a pruning
BRANCH_LENGTH, DECODING_LENGTH = 12, 64
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class TrieParts:
    """Enabled parts of the method."""

    prompts: bool = True
    outputs: bool = True
    pruning: bool = True
    elimination: bool = True
    capacity: int = 16  # in multiples of the decoding length; the paper's choice (its table 6)


PARTS = {  # by the labels of table 5
    "full": TrieParts(),
    "without prompt branches": TrieParts(prompts=False),
    "without output branches": TrieParts(outputs=False),
    "without pruning": TrieParts(pruning=False),
    "without elimination": TrieParts(elimination=False),
}
CAPACITIES = {f"capacity {capacity}x": TrieParts(capacity=capacity) for capacity in (1, 2, 4, 8, 16, 32, 64, 128)}


class ExplicitTrieDrafter(Drafter):
    """Alipay's Lookahead (arXiv 2312.12728, section 4.3) on ``FrequencyTrie``, for one request at a time.

    As published: the prompt's branches are inserted at the prefill, the output's after each step once they are whole, and the
    request's end eliminates its prompt and, if 1024 trees changed, prunes those above their capacity: ``capacity`` times the
    decoding length nodes made by outputs, or twice as many nodes. Branches are stored one token longer than they are drafted.
    Without elimination, all prompts have one owner, as in the published code for one request at a time.

    ``propose`` retrieves, ``observe`` inserts, and ``finish`` does the work of a request's end, so that each can be timed.
    """

    def __init__(
        self,
        parts: TrieParts,
        decoding_length: int = DECODING_LENGTH,
        branch_length: int = BRANCH_LENGTH,
        max_query_length: int = 2,
        prune_after: int = 1024,
    ) -> None:
        nodes = parts.capacity * decoding_length
        due = prune_after if parts.pruning else _NEVER
        self.trie = FrequencyTrie(max_nodes=2 * nodes, max_output_nodes=nodes, prune_after=due)
        self._parts, self._max_query_length = parts, max_query_length
        self._decoding_length, self._branch_length = decoding_length, branch_length
        self._inserted: dict[str, int] = {}  # request -> number of its inserted tokens

    def warm(self, outputs: Sequence[Int32Array]) -> None:
        """Insert outputs of earlier requests, as after their ends."""
        for output in outputs:
            self._stream("", output, True)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """See ``Drafter``."""
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
        """Insert the emitted tokens; after the prefill the prompt too."""
        self._insert(request, False)

    def finish(self, request: Request) -> None:
        """Complete the output's branches, eliminate the prompt, and prune if due."""
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


@dataclass(frozen=True, slots=True)
class Reached:
    """Result of a replay."""

    tokens_per_step: float
    trie_s: float  # seconds of the trie per step
    texts: tuple[tuple[int, int, float], ...]  # tokens, steps and seconds of the trie, of each text


def ablate(
    before: Sequence[KnownText], texts: Sequence[KnownText], vocab_size: int, say: Callable[[str], None]
) -> tuple[dict[str, Reached], dict[str, Reached]]:
    """Replay the method without each part, and with each capacity; both by label.

    Args:
        before: texts whose outputs are in the trie before, as the paper warms its own with a training split.
        texts: to replay, without references, as the published method has none.
        vocab_size: of the tokenizer.
        say: receives the progress.
    """
    bare = [replace(text, references=()) for text in texts]
    found: dict[str, list[tuple[int, int, float]]] = {}
    for number in range(_ROUNDS):  # in turns, and the shortest time counts: the first run takes longer
        for label, parts in (PARTS | CAPACITIES).items():
            say(f"the explicit trie, {label}, {number + 1} of {_ROUNDS}")
            laps = _replayed(parts, before, bare, vocab_size)
            found[label] = [min(pair) for pair in zip(found.get(label, laps), laps, strict=True)]
    by_part, by_size = ({label: _reached(found[label]) for label in labels} for labels in (PARTS, CAPACITIES))
    return by_part, by_size


def _replayed(
    parts: TrieParts, before: Sequence[KnownText], texts: Sequence[KnownText], vocab_size: int
) -> list[tuple[int, int, float]]:
    """Return tokens, steps and processor seconds of the trie, of each text."""
    drafter, laps = ExplicitTrieDrafter(parts), []
    drafter.warm([text.output_ids for text in before])
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
