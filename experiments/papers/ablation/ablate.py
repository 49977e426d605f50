"""The ablation of Alipay's Lookahead (arXiv 2312.12728, tables 5 and 6) on known outputs, replayed without a model.

The explicit trie as published runs without each of its parts, and with each capacity: nodes that outputs may add to each first
token's tree, in multiples of the decoding length. The paper measures tokens per second on a GPU; here it is tokens per step, and
the processor time of the trie itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from decoding.replay import KnownText, replay_workload
from experiments.papers.ablation.explicit_trie import ExplicitTrieDrafter, TrieParts
from experiments.papers.numbers.trie import CAPACITIES, FULL

BRANCH_LENGTH = 12
DECODING_LENGTH = 64
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

    def run(label: str, parts: TrieParts) -> Reached:
        say(f"the explicit trie, {label}")
        drafter = ExplicitTrieDrafter(parts, DECODING_LENGTH, BRANCH_LENGTH)
        drafter.warm([text.output_ids for text in before])
        # The processor's time: what else runs on the machine does not count.
        counts = replay_workload(bare, lambda: drafter, DECODING_LENGTH - 1, vocab_size, time.thread_time)
        spent = sum(counts.propose_s) + sum(counts.observe_s) + sum(counts.finish_s)
        return Reached(counts.tokens_per_step, spent / counts.steps)

    sized = {f"capacity {capacity}x": TrieParts(capacity=capacity) for capacity in CAPACITIES}
    return {label: run(label, parts) for label, parts in PARTS.items()}, {
        label: run(label, parts) for label, parts in sized.items()
    }
