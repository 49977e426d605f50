"""Drafts as published, where only one row pays: the trees of each method equal those of the method alone without a row budget.

The other tests of the drafters compare the methods alone with the published rules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.drafters.registry import build_drafter, build_drafters
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.verify.exact import verify_exact
from tests.helpers.targets import Target

STEEP = LatencyCurve((1, 512), (0.01, 5.12), 0, 0.0, 0.0)  # each row takes as long as a step
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "jacobi": [
        {"window": 15, "ngram": 5, "guesses": 15}, {"window": 15, "ngram": 5, "guesses": 15, "prompt_as_reference": False},
        {"window": 60, "ngram": 8, "guesses": 12}, {"window": 3, "ngram": 3, "guesses": 1}, {"window": 20, "ngram": 2},
    ],
    "ngrammys": [{}, {"k": 25, "w": 14}, {"k": 10, "w": 10, "layout": "batched"}, {"k": 1, "w": 1}],
    "trie": [{}, {"decoding_length": 128, "branch_length": 32}, {"decoding_length": 1}, {"layout": "parallel"}],
    "llma": [{}, {"copy_length": 300}, {"match_length": 4, "copy_length": 1}],
    "suffix": [{"max_spec_tokens": 500}],
    "prompt_lookup": [{"num_tokens": 100}],
}  # fmt: skip


def scripted(prefix: list[int]) -> int:
    """Return the next token of a model of the last two tokens and the position."""
    before = prefix[-2] if len(prefix) > 1 else 0
    return (2 * prefix[-1] + before + (len(prefix) // 7) % 2) % 9 + 3


def trees(drafter: Drafter, as_published: bool) -> list[list[list[int]]]:
    """Return tokens and parents of the trees of a request by greedy decoding; ``drafter`` is new."""
    drafter.prepare(Target(60, (2,), STEEP))
    prompt = [3, 4, 5, 6, 7, 3, 4, 5, 8, 9, 4, 5]
    request = Request("r", prompt, SamplingParams(120), [[*prompt[4:], 5, 5, 6]], tenant="t")
    request.as_published = as_published
    found = []
    while request.remaining > 1:
        (tree,) = drafter.propose([request], [512])
        text = request.tokens.tolist()
        below = [scripted([*text, *(int(tree.tokens[at]) for at in tree.path(row))]) for row in range(len(tree))]
        acceptance = verify_exact(tree, below.__getitem__, request.remaining, frozenset())
        request.commit([*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token])
        drafter.observe(request, tree, TargetRows(np.array(below, np.int32), None), acceptance)
        found.append([tree.tokens.tolist(), tree.parents.tolist()])
    drafter.finish(request)
    return found


@pytest.mark.parametrize(("strategy", "options"), [(name, one) for name, options in SETTINGS.items() for one in options])
def test_trees_are_the_published_ones(strategy: str, options: dict[str, Any]) -> None:
    published = trees(build_drafters(strategy, options, (), most_rows=64), as_published=True)
    assert published == trees(build_drafter(strategy, options), as_published=False)
    wanted = build_drafter(strategy, options).published_rows
    assert max(len(tokens) for tokens, _ in published) - 1 <= wanted


def test_a_window_without_the_prompt_emits_more_than_one_token_a_step() -> None:
    options = {"window": 15, "ngram": 5, "guesses": 15, "prompt_as_reference": False}
    published = trees(build_drafters("jacobi", options, (), most_rows=64), as_published=True)
    usual = trees(build_drafters("jacobi", options, (), most_rows=64), as_published=False)
    assert len(published) < 80 < len(usual) == 119
    assert all(len(tokens) == 1 for tokens, _ in usual)
