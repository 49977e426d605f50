"""A drafter whose trees are verified part by part, as ranks do, beside one whose trees are verified whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.drafters.jacobi import JacobiDrafter
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import Acceptance, DraftTree, TreePart
from outrider.decoding.verify.exact import verify_exact

VOCABULARY, NOBODY = 12, -1
Steps = list[list[list[int]]]


class ScriptedModel:
    """Ranks all tokens after a prefix by hashes of its last two tokens: few enough contexts for text to come back."""

    def __init__(self, seed: int) -> None:
        self._seed, self._ranked = seed, dict[tuple[int, ...], list[int]]()

    def ranked(self, prefix: Sequence[int]) -> list[int]:
        key = tuple(token % 5 for token in prefix[-2:])
        if key not in self._ranked:
            digest = hashlib.blake2b(bytes([self._seed, *key]), digest_size=VOCABULARY).digest()
            self._ranked[key] = sorted(range(VOCABULARY), key=lambda token: (digest[token], token))
        return self._ranked[key]

    def below(self, of: Request, tree: DraftTree) -> Int32Array:
        """[n, vocabulary] what the model says below each row, the likeliest first."""
        committed = of.tokens.tolist()
        return np.array([self.ranked([*committed, *tree.tokens[tree.path(row)].tolist()]) for row in range(len(tree))], np.int32)

    def plain(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.ranked(tokens)[0])
        return tokens[len(prompt) :]


def logits_of(ranked: Int32Array) -> torch.Tensor:
    logits = np.empty(ranked.shape, np.float32)
    np.put_along_axis(logits, ranked, -np.arange(VOCABULARY, dtype=np.float32)[None].repeat(len(ranked), 0), 1)
    return torch.from_numpy(logits)


def walk(tree: DraftTree, ids: Int32Array, of: Request) -> Acceptance:
    return verify_exact(tree, lambda row: int(ids[row]), of.remaining, frozenset())


def computed(of: Request, parts: list[TreePart], n: int, model: ScriptedModel, lost: int) -> tuple[Acceptance, Int32Array]:
    """Each rank computes and verifies its part alone: the longest walk, of the lowest rank among equals, and what was said.

    Rows of the walk are of the whole tree; of rows that only the lost rank held nothing was said: -1.
    """
    ranked = np.full((n, VOCABULARY), -1, np.int32)
    walks: list[Acceptance] = []
    for rank, part in enumerate(parts):
        if rank == lost:
            continue
        said = model.below(of, part.tree)
        before = ranked[part.rows]
        assert ((before < 0) | (before == said)).all()  # a row that several ranks hold has the same path on each
        ranked[part.rows] = said
        found = walk(part.tree, said[:, 0], of)
        walks.append(Acceptance(tuple(part.rows[list(found.rows)].tolist()), found.next_token))
    return max(walks, key=lambda found: found.count), ranked  # the first of equals


def step(drafter: Drafter, of: Request, model: ScriptedModel, budget: int, ranks: int, lost: int = NOBODY) -> list[list[int]]:
    """One step of ``ranks`` ranks, of which one may be lost in it; the tree as it was proposed and what was accepted."""
    (tree,) = drafter.propose([of], [budget])
    acceptance, ranked = computed(of, tree.partition(ranks), len(tree), model, lost)
    kept = np.flatnonzero(ranked[:, 0] >= 0).astype(np.int32)
    rest = tree.take(kept)
    assert lost != NOBODY or len(rest) == len(tree)
    found = Acceptance(tuple(np.searchsorted(kept, acceptance.rows).tolist()), acceptance.next_token)
    assert found == walk(rest, ranked[kept, 0], of)  # as on one rank
    of.commit([*rest.tokens[list(found.rows)].tolist(), found.next_token])
    if of.remaining:
        drafter.observe(of, rest, TargetRows(ranked[kept, 0], logits_of(ranked[kept])), found)
    return [tree.tokens.tolist(), tree.parents.tolist(), [tree.num_candidates], list(acceptance.rows), [acceptance.next_token]]


def run(drafter: Drafter, prompt: list[int], model: ScriptedModel, budget: int, ranks: int) -> tuple[Steps, Request]:
    """The steps of a request of 40 tokens."""
    of = Request("r", prompt, SamplingParams(max_tokens=40), tenant="a")
    of.commit([model.ranked(prompt)[0]])
    steps: Steps = []
    while of.remaining:
        steps.append(step(drafter, of, model, budget, ranks))
    return steps, of


PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=10)
SEEDS = st.integers(0, 255)


@settings(deadline=None, max_examples=25)
@given(SEEDS, PROMPTS, st.integers(1, 7), st.integers(3, 5), st.booleans(), st.integers(2, 4))
def test_jacobi_has_the_same_steps_window_and_pool_on_any_number_of_ranks(
    seed: int, prompt: list[int], width: int, ngram: int, from_prompt: bool, ranks: int
) -> None:
    model = ScriptedModel(seed)
    alone, partitioned = (JacobiDrafter(width, ngram, 3, from_prompt) for _ in range(2))
    steps, of = run(alone, prompt, model, 1000, 1)
    assert run(partitioned, prompt, model, 1000, ranks)[0] == steps
    assert of.output_ids.tolist() == model.plain(prompt, 40)
    one, other = alone._states["r"], partitioned._states["r"]
    assert one._pool._values == other._pool._values  # type: ignore[union-attr]
    assert np.array_equal(one._window.entries, other._window.entries)  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", ["auto", "trie", "jacobi", "prompt_lookup"])
def test_strategies_have_the_same_steps_on_any_number_of_ranks(strategy: str) -> None:
    options: dict[str, object] = {"all_rows": True} if strategy == "auto" else {}
    longest = 0
    for seed in range(3):
        model, prompt = ScriptedModel(seed), [seed, 1, 2, 3, 1, 2, 4, 1, 2]
        steps, of = run(build_drafter(strategy, options), prompt, model, 24, 1)
        assert of.output_ids.tolist() == model.plain(prompt, 40)
        for ranks in (2, 3, 4):
            assert run(build_drafter(strategy, options), prompt, model, 24, ranks)[0] == steps
        longest = max(longest, *(len(accepted) for *_, accepted, _ in steps))
    assert longest >= 2, "drafts that are never accepted show nothing"


@settings(deadline=None, max_examples=50)
@given(SEEDS, PROMPTS, st.integers(1, 5), st.lists(st.tuples(st.integers(2, 4), st.integers(-1, 3)), min_size=1, max_size=6))
def test_whatever_rank_is_lost_the_others_say_what_the_model_says(
    seed: int, prompt: list[int], width: int, losses: list[tuple[int, int]]
) -> None:
    model, drafter = ScriptedModel(seed), JacobiDrafter(width, 4, 3)
    of = Request("r", prompt, SamplingParams(max_tokens=30))
    of.commit([model.ranked(prompt)[0]])
    at = 0
    while of.remaining:
        ranks, lost = losses[at % len(losses)]
        step(drafter, of, model, 1000, ranks, lost)
        at += 1
    assert of.output_ids.tolist() == model.plain(prompt, 30)


@settings(max_examples=100)
@given(st.data(), SEEDS, st.integers(1, 5))
def test_parts_of_any_tree_emit_what_the_whole_tree_does(data: st.DataObject, seed: int, ranks: int) -> None:
    model = ScriptedModel(seed)
    of = Request("r", [1, 2], SamplingParams(max_tokens=30))
    tokens, parents = [2], [-1]
    for row in range(1, data.draw(st.integers(1, 25))):  # branches that begin alike are in it, and often what the model says
        parents.append(data.draw(st.integers(max(0, row - 4), row - 1)))
        tree = DraftTree(np.array(tokens, np.int32), np.array(parents[:row], np.int32), np.zeros(row, np.int8), row)
        ranked = model.ranked([1, 2, *tree.tokens[tree.path(parents[-1])].tolist()])
        tokens.append(ranked[data.draw(st.sampled_from([0, 0, 1]))])
    n = len(tokens)
    candidates = data.draw(st.integers(1, n))
    tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(n, np.int8), candidates)
    whole = walk(tree, model.below(of, tree)[:, 0], of)
    merged, _ = computed(of, tree.partition(ranks), n, model, NOBODY)
    assert tree.tokens[list(merged.rows)].tolist() == tree.tokens[list(whole.rows)].tolist()
    assert merged.next_token == whole.next_token
