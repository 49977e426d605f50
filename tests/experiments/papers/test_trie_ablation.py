"""The ablation of the trie from end to end on few texts, and the published trie without each of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.decoding.replay import KnownText, replay_workload
from outrider.experiments.papers.ablation.explicit_trie import CAPACITIES, PARTS, ExplicitTrieDrafter, TrieParts, ablate
from outrider.experiments.papers.ablation.frequency_trie import FrequencyTrie
from outrider.experiments.papers.numbers.published import load

PHRASE = list(range(1, 10))
EVERYTHING = TrieParts()


def known(prompt: Sequence[int], output: Sequence[int]) -> KnownText:
    return KnownText("", np.asarray(prompt, np.int32), (), np.asarray(output, np.int32))


def steps(drafter: ExplicitTrieDrafter, *texts: KnownText) -> int:
    """Of a replay. Outputs here repeat nothing of themselves: without help a step emits one token."""
    return replay_workload(texts, lambda: drafter, 15, 1000, lambda: 0.0).steps


def contents(trie: FrequencyTrie) -> dict[int, list[tuple[tuple[int, ...], float]]]:
    return {first: [(branch.path, branch.output) for branch in trie.branches(first)] for first in trie.firsts()}


def test_a_prompt_is_drafted_from_unless_its_branches_are_left_out() -> None:
    copied = known([*PHRASE, 99], [2, *PHRASE[2:], 0])
    assert steps(ExplicitTrieDrafter(EVERYTHING), copied) == 2  # the prefill, then the phrase with the end after it
    assert steps(ExplicitTrieDrafter(replace(EVERYTHING, prompts=False)), copied) == len(copied.output_ids)


def test_an_earlier_output_is_drafted_from_unless_output_branches_are_left_out() -> None:
    first, again = known([50], PHRASE), known([60], PHRASE)
    alone = len(PHRASE)
    assert steps(ExplicitTrieDrafter(EVERYTHING), first, again) == alone + 2
    assert steps(ExplicitTrieDrafter(replace(EVERYTHING, outputs=False)), first, again) == 2 * alone


def test_an_earlier_prompt_is_drafted_from_only_without_elimination() -> None:
    first, later = known(PHRASE, range(50, 60)), known([60], PHRASE)
    assert steps(ExplicitTrieDrafter(EVERYTHING), first, later) == 10 + len(PHRASE)
    assert steps(ExplicitTrieDrafter(replace(EVERYTHING, elimination=False)), first, later) == 10 + 2


def test_pruning_keeps_what_is_frequent_and_follows_the_capacity() -> None:
    outputs = [[7, 8, 100 + number] for number in range(20)]
    texts = [known([5], output) for output in outputs]

    def left(parts: TrieParts) -> tuple[int, set[tuple[int, ...]]]:
        drafter = ExplicitTrieDrafter(parts, decoding_length=4, prune_after=1)
        steps(drafter, *texts)
        created = sum(drafter.trie.size(first)[1] for first in drafter.trie.firsts())
        return created, {branch.path for branch in drafter.trie.branches(7)}

    unpruned, small, large = (left(parts) for parts in (TrieParts(pruning=False), TrieParts(capacity=1), TrieParts(capacity=8)))
    assert unpruned[0] == large[0] == 1 + 20 + 20  # below 7: 8 and what follows it; below 8: the same
    assert small[0] < 12 and (8,) in small[1]


def test_warming_inserts_what_the_end_of_a_request_leaves() -> None:
    outputs = [[1, 2, 3, 1, 2, 4], [2, 3], list(range(20))]
    warmed, replayed = ExplicitTrieDrafter(EVERYTHING), ExplicitTrieDrafter(replace(EVERYTHING, prompts=False))
    warmed.warm([np.asarray(output, np.int32) for output in outputs])
    steps(replayed, *(known([300 + number], output) for number, output in enumerate(outputs)))
    assert contents(warmed.trie) == contents(replayed.trie) != {}


def test_every_part_and_capacity_is_replayed() -> None:
    texts = [known([60 + number], [*PHRASE, number]) for number in range(4)]
    said: list[str] = []
    parts, capacities = ablate(texts[:2], texts[2:], 1000, said.append)
    labels = [load("trie").rows_of(table)["AntRAG"].keys() for table in ("table 5", "table 6")]
    assert [parts.keys(), capacities.keys()] == labels
    assert parts["without output branches"].tokens_per_step < parts["full"].tokens_per_step  # what outputs share is in no prompt
    assert capacities["capacity 16x"].tokens_per_step == parts["full"].tokens_per_step
    assert all(reached.trie_s > 0 for reached in (*parts.values(), *capacities.values()))
    assert len(said) == 3 * (len(PARTS) + len(CAPACITIES))  # in turns
