"""Lossy rules of verification against their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sampling.penalties import LogitRules
from outrider.decoding.tree import Acceptance, DraftTree
from outrider.decoding.verify.rules import BildRule, MjsdRule
from outrider.decoding.verify.target_probabilities import TargetDistributions

NO_END: frozenset[int] = frozenset()


def target_laws(
    logprobs: Sequence[Sequence[float]], tree: DraftTree, params: SamplingParams, end: frozenset[int] = NO_END
) -> TargetDistributions:
    return TargetDistributions(
        Request("a", [int(tree.tokens[0])], params), tree, torch.tensor(logprobs, dtype=torch.float64), end
    )


GREEDY = SamplingParams(max_tokens=20)


def rows_of(probs: Sequence[float]) -> list[list[float]]:
    """Rows below which token 1 has the given probability, token 2 half of what is left, and tokens 0 and 3 a quarter each."""
    return [[math.log(x) for x in (0.25 * (1 - prob), prob, 0.5 * (1 - prob), 0.25 * (1 - prob))] for prob in probs]


def bild(probs: Sequence[float], rule: BildRule, params: SamplingParams = GREEDY, end: frozenset[int] = NO_END) -> Acceptance:
    tree = DraftTree.chain(7, [1] * (len(probs) - 1))
    return rule.accept(tree, target_laws(rows_of(probs), tree, params, end))


def test_bild_replaces_the_first_unlikely_token() -> None:
    assert bild([0.6, 0.001, 0.9, 0.3], BildRule(5.0)) == Acceptance((1,), 2)  # the example of the docstring
    assert bild([0.6, 0.01, 0.9, 0.3], BildRule(5.0)) == Acceptance((1, 2, 3), 2)
    assert bild([0.6, 0.01, 0.9, 0.9], BildRule(5.0)) == Acceptance((1, 2, 3), 1)
    assert bild([0.001, 0.9, 0.9], BildRule(5.0)) == Acceptance((), 2)
    assert bild([0.4, 0.9, 0.9], BildRule(0.9)) == Acceptance((1, 2), 1)  # -log 0.4 = 0.92, but it is the target's own token
    assert bild([0.3, 0.9, 0.9], BildRule(0.9)) == Acceptance((), 2)


def test_bild_of_warped_laws_keeps_to_the_nucleus() -> None:
    cold = SamplingParams(temperature=1.0, top_k=1, max_tokens=20)
    assert bild([0.6, 0.3, 0.9, 0.3], BildRule(5.0), cold) == Acceptance((1, 2, 3), 2)
    assert bild([0.6, 0.3, 0.9, 0.3], BildRule(5.0, "mjsd"), cold) == Acceptance((1,), 2)


def test_lossy_rules_keep_to_lengths_and_ends() -> None:
    probs = [0.9, 0.9, 0.9, 0.3]
    for limit in range(1, 6):
        params = SamplingParams(max_tokens=limit)
        accepted = bild(probs, BildRule(5.0), params)
        assert accepted.count == min(limit, 4) == mjsd(probs, [0.9] * 3, 0.5, params).count
    assert bild(probs, BildRule(5.0), end=frozenset({1})) == Acceptance((), 1) == mjsd(probs, [0.9] * 3, 0.5, end=frozenset({1}))
    assert bild(probs, BildRule(5.0), end=frozenset({2})) == Acceptance((1, 2, 3), 2) == mjsd(probs, [0.9] * 3, 0.5)


def test_lossy_rules_keep_to_what_a_request_bans() -> None:
    banned = SamplingParams(max_tokens=20, logit_bias=((1, -100.0),))
    tree = DraftTree.chain(7, [1, 1])
    for rule in (BildRule(5.0), BildRule(5.0, "mjsd"), MjsdRule([-0.1, -0.1], 0.01), MjsdRule([-0.1, -0.1], 0.01, "warped")):
        rows = torch.tensor(rows_of([0.9] * 3))
        distributions = TargetDistributions(Request("a", [7], banned), tree, rows, NO_END, LogitRules(banned, [7]))
        assert rule.accept(tree, distributions) == Acceptance((), 2)


def mjsd(
    probs: Sequence[float],
    draft: Sequence[float],
    threshold: float,
    params: SamplingParams = GREEDY,
    end: frozenset[int] = NO_END,
) -> Acceptance:
    tree = DraftTree.chain(7, [1] * (len(probs) - 1))
    rule = MjsdRule([math.log(prob) for prob in draft], threshold)
    return rule.accept(tree, target_laws(rows_of(probs), tree, params, end))


def test_a_prefix_that_fails_may_be_part_of_one_that_passes() -> None:
    assert mjsd([0.2, 0.9, 0.3], [0.5, 0.3], 0.5) == Acceptance((1, 2), 2)  # the example of the docstring
    assert mjsd([0.2, 0.9, 0.3], [0.5, 0.9], 0.5) == Acceptance((), 2)
    assert mjsd([0.2, 0.9, 0.1, 0.3], [0.5, 0.3, 0.9], 0.5) == Acceptance((1, 2), 2)


def test_mjsd_accepts_the_longest_prefix_that_passes() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        gamma, threshold = int(rng.integers(0, 6)), float(rng.uniform(0.0, 1.0))
        probs, draft = rng.uniform(0.01, 0.99, gamma + 1), rng.uniform(0.01, 0.99, gamma)
        passing = [
            j for j in range(1, gamma + 1) if min(1.0, math.prod(probs[:j].tolist()) / math.prod(draft[:j].tolist())) > threshold
        ]
        found = mjsd(probs.tolist(), draft.tolist(), threshold)
        assert found.rows == tuple(range(1, max(passing, default=0) + 1))
        assert found.next_token == (1 if probs[len(found.rows)] > (1 - probs[len(found.rows)]) / 2 else 2)


def test_thresholds_beyond_the_ratio_accept_nothing_or_all() -> None:
    for threshold in (1.0, 1.5):
        assert mjsd([0.9, 0.9, 0.3], [0.1, 0.1], threshold) == Acceptance((), 1)
    assert mjsd([1e-9, 1e-9, 0.3], [0.9, 0.9], -0.1) == Acceptance((1, 2), 2)
    assert mjsd([0.1, 0.1, 0.3], [0.1, 0.1], 0.999) == Acceptance((1, 2), 2)  # draft and target alike


def test_a_threshold_of_one_is_plain_decoding_of_the_seed() -> None:
    tree = DraftTree.chain(7, [1, 1])
    for seed in range(20):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=20)
        distributions = target_laws(rows_of([0.3, 0.3, 0.3]), tree, params)
        assert MjsdRule([-9.0, -9.0], 1.0).accept(tree, distributions) == Acceptance((), distributions.choose(0))


def test_what_follows_an_end_token_has_no_say() -> None:
    """Token 3 would end the text, and with it alone the prefix fails; with what is drafted after it, it would pass."""
    tree, rows = DraftTree.chain(7, [3, 1]), rows_of([0.6, 0.9, 0.3])
    rule = MjsdRule([math.log(0.5), math.log(0.05)], 0.5)
    assert rule.accept(tree, target_laws(rows, tree, GREEDY)).rows == (1, 2)
    assert rule.accept(tree, target_laws(rows, tree, GREEDY, frozenset({3}))) == Acceptance((), 1)


def test_warped_joint_laws_exclude_what_is_outside_the_nucleus() -> None:
    params, tree = SamplingParams(temperature=1.0, top_k=1, max_tokens=20), DraftTree.chain(7, [1, 1])
    distributions = target_laws(rows_of([0.9, 0.3, 0.9]), tree, params)
    assert MjsdRule([-0.1, -1.0], 0.1).accept(tree, distributions).rows == (1, 2)
    assert MjsdRule([-0.1, -1.0], 0.1, "warped").accept(tree, distributions).rows == (1,)
