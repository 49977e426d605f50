"""Rules of verification: the law of what they emit, enumerated, and the lossy ones against their definitions."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from outrider.decoding.arrays import Float64Array
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sampling.penalties import LogitRules
from outrider.decoding.sampling.sampler import warp
from outrider.decoding.tree import Acceptance, DraftTree, Rule
from outrider.decoding.verify.rules import KSeqRule, RejectionRule
from outrider.decoding.verify.target_probabilities import TargetDistributions, request_distribution

VOCAB, GAMMA, PROMPT = 3, 2, (1, 2)
Text = tuple[int, ...]
SAMPLED = SamplingParams(temperature=0.9, max_tokens=GAMMA + 1)
NO_END: frozenset[int] = frozenset()


class AllOutcomes(TargetDistributions):
    """Takes the branch that a script says at each random decision, and keeps what else could have come of it."""

    script: Sequence[int]
    known: dict[int, Float64Array]  # laws by row

    def warped(self, row: int) -> Float64Array:
        if row not in self.known:
            self.known[row] = super().warped(row)
        return self.known[row]

    def follow(self, script: Sequence[int]) -> None:
        self.script, self.weight = script, 1.0
        self.taken: list[int] = []
        self.forks: list[list[int]] = []  # scripts that were not taken

    def accepts(self, row: int, probability: float, index: int = 0) -> bool:
        return bool(self.branch([1.0 - min(probability, 1.0), min(probability, 1.0)]))

    def draw(self, row: int, distribution: Float64Array) -> int:
        return self.branch(distribution.tolist())

    def choose(self, row: int) -> int:
        return self.branch(self.warped(row).tolist())

    def branch(self, probs: list[float]) -> int:
        options = [option for option, prob in enumerate(probs) if prob > 0.0]
        if len(self.taken) < len(self.script):
            option = self.script[len(self.taken)]
        else:
            option = options[0]
            self.forks += [[*self.taken, other] for other in options[1:]]
        self.taken.append(option)
        self.weight *= probs[option]
        return option


@cache
def table(prefix: Text, salt: int) -> torch.Tensor:
    """A model: logits as a function of the whole prefix."""
    return torch.from_numpy(np.random.default_rng([salt, *prefix]).normal(0.0, 1.5, VOCAB))


@cache
def plain_law(prefix: Text, params: SamplingParams, end: frozenset[int], salt: int = 0) -> Float64Array:
    """What a plain request draws from after a prefix, with the prompt."""
    rules = LogitRules(params, PROMPT) if params.alters_logits else None
    if rules is not None:
        rules.counts.catch_up(np.array(prefix[len(PROMPT) :], np.int32))
    barred = end if len(prefix) - len(PROMPT) < params.min_tokens else ()
    return request_distribution(table(prefix, salt), params, rules, barred)


def texts(params: SamplingParams, end: frozenset[int]) -> dict[Text, float]:
    """The law of plain decoding's text."""
    return complete({(): 1.0}, params, end)


def complete(begun: dict[Text, float], params: SamplingParams, end: frozenset[int]) -> dict[Text, float]:
    """Texts that were begun, decoded plainly to their end."""
    whole: dict[Text, float] = defaultdict(float)
    while begun:
        text, weight = begun.popitem()
        if len(text) == params.max_tokens or (text and text[-1] in end):
            whole[text] += weight
            continue
        for token, prob in enumerate(plain_law(PROMPT + text, params, end)):
            if prob > 0.0:
                begun[(*text, token)] = begun.get((*text, token), 0.0) + weight * prob
    return whole


def outcomes(tree: DraftTree, rule: Rule, params: SamplingParams, end: frozenset[int]) -> Iterator[tuple[Text, float]]:
    """All that a rule may emit of a tree, with the probability of each; the rule runs once for every way to get there."""
    request = Request("a", PROMPT, params)
    logits = torch.stack([table(PROMPT + path_tokens(tree, row), 0) for row in range(len(tree))])
    rules = LogitRules(params, PROMPT) if params.alters_logits else None
    distributions = AllOutcomes(request, tree, logits, end, rules)
    distributions.known = {}
    scripts: list[list[int]] = [[]]
    while scripts:
        distributions.follow(scripts.pop())
        emitted = path_and_token(tree, rule.accept(tree, distributions))
        distributions.settle()
        scripts += distributions.forks
        assert 1 <= len(emitted) <= request.remaining and not end.intersection(emitted[:-1])
        yield emitted, distributions.weight


def path_tokens(tree: DraftTree, row: int) -> Text:
    return tuple(int(token) for token in tree.tokens[tree.path(row)])


def path_and_token(tree: DraftTree, acceptance: Acceptance) -> Text:
    if acceptance.rows:
        assert tree.path(acceptance.rows[-1]) == list(acceptance.rows)
    return (*(int(tree.tokens[row]) for row in acceptance.rows), acceptance.next_token)


def draft_texts(params: SamplingParams, depth: int) -> dict[Text, float]:
    """Chains that a draft model draws, with their probabilities. Its laws are warped as the target's, from other logits."""
    chains: dict[Text, float] = {(): 1.0}
    for _ in range(depth):
        chains = {
            (*chain, token): weight * prob
            for chain, weight in chains.items()
            for token, prob in enumerate(draft_law(chain, params))
            if prob > 0.0
        }
    return chains


def draft_law(chain: Text, params: SamplingParams) -> Float64Array:
    return plain_law(PROMPT + chain, params, NO_END, salt=1)


def assert_same(found: dict[Text, float], expected: dict[Text, float]) -> None:
    assert found.keys() <= {*expected, *(text for text, weight in found.items() if weight < 1e-15)}
    for text, weight in expected.items():
        assert found.get(text, 0.0) == pytest.approx(weight, abs=1e-12), text


KINDS = {
    "plain": (SAMPLED, NO_END),
    "nucleus": (replace(SAMPLED, top_p=0.8), NO_END),
    "one token": (replace(SAMPLED, top_k=1), NO_END),
    "penalties": (replace(SAMPLED, repetition_penalty=1.4, frequency_penalty=0.8, presence_penalty=-0.5), NO_END),
    "bias": (replace(SAMPLED, logit_bias=((0, 1.0), (2, -100.0))), NO_END),
    "end": (SAMPLED, frozenset({2})),
    "min tokens": (replace(SAMPLED, min_tokens=2), frozenset({1})),
    "short": (replace(SAMPLED, max_tokens=GAMMA), frozenset({0})),
    "shorter": (replace(SAMPLED, max_tokens=1), NO_END),
    "two tokens": (replace(SAMPLED, max_tokens=2), NO_END),
    "longer": (replace(SAMPLED, max_tokens=GAMMA + 2), frozenset({0})),
    "greedy": (replace(SAMPLED, temperature=0.0, frequency_penalty=1.0), frozenset({0})),
}


def check_law(drafts: Iterable[tuple[float, DraftTree, Rule]], params: SamplingParams, end: frozenset[int]) -> None:
    """Whatever is drafted with these chances, the text has the law of plain decoding."""
    begun: dict[Text, float] = defaultdict(float)
    for weight, tree, rule in drafts:
        for text, chance in outcomes(tree, rule, params, end):
            begun[text] += weight * chance
    assert_same(complete(begun, params, end), texts(params, end))


@pytest.mark.parametrize(("kind", "rows"), [*((kind, GAMMA + 1) for kind in KINDS), ("plain", 2)])
def test_speculative_sampling_has_the_law_of_plain_decoding(kind: str, rows: int) -> None:
    """Also where a chain is cut to its first rows."""
    params, end = KINDS[kind]

    def drafts() -> Iterator[tuple[float, DraftTree, Rule]]:
        for chain, weight in draft_texts(params, GAMMA).items():
            tree = DraftTree.chain(PROMPT[-1], chain).clipped(rows, 9, VOCAB)
            assert len(tree) == rows
            yield weight, tree, RejectionRule([draft_law(chain[:depth], params) for depth in range(GAMMA)])

    check_law(drafts(), params, end)


def sequences_tree(sequences: Sequence[Text], merged: bool) -> tuple[DraftTree, list[list[int]], dict[int, Text]]:
    """Sequences as a tree, the rows of each, and the tokens above each row."""
    tokens, parents, rows, above = [PROMPT[-1]], [-1], [], {0: ()}
    for sequence in sequences:
        row, path = 0, []
        for depth, token in enumerate(sequence):
            known = [at for at in above if merged and parents[at] == row and tokens[at] == token]
            if known:
                row = known[0]
            else:
                tokens.append(token)
                parents.append(row)
                row = len(tokens) - 1
                above[row] = sequence[: depth + 1]
            path.append(row)
        rows.append(path)
    n = len(tokens)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(n, np.int8), n), rows, above


@pytest.mark.parametrize(
    ("kind", "merged", "count", "depth"),
    [
        *((kind, True, 2, GAMMA) for kind in KINDS if kind != "two tokens"),
        ("penalties", False, 2, GAMMA),
        ("end", False, 2, GAMMA),
        ("two tokens", True, 3, 1),
    ],
)
def test_spectr_has_the_law_of_plain_decoding(kind: str, merged: bool, count: int, depth: int) -> None:
    params, end = KINDS[kind]

    def drafts() -> Iterator[tuple[float, DraftTree, Rule]]:
        for chosen in itertools.product(draft_texts(params, depth).items(), repeat=count):
            chains = [chain for chain, _ in chosen]
            tree, rows, above = sequences_tree(chains, merged)
            rule = KSeqRule(chains, rows, {row: draft_law(path, params) for row, path in above.items()})
            yield math.prod(weight for _, weight in chosen), tree, rule

    check_law(drafts(), params, end)


def test_a_draft_of_the_targets_own_law_is_accepted() -> None:
    for chain, weight in complete({(): 1.0}, replace(SAMPLED, max_tokens=GAMMA), NO_END).items():
        distributions = [plain_law(PROMPT + chain[:depth], SAMPLED, NO_END) for depth in range(GAMMA)]
        found = list(outcomes(DraftTree.chain(PROMPT[-1], chain), RejectionRule(distributions), SAMPLED, NO_END))
        assert weight > 0 and all(text[:GAMMA] == chain for text, _ in found)


@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}])
def test_laws_of_rows_in_any_order_are_those_of_their_own_prefix(penalties: dict[str, float]) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, min_tokens=2, seed=4, **penalties)  # type: ignore[arg-type]
    tree, _, above = sequences_tree([(0, 1), (0, 2), (2, 1), (2, 2)], True)
    logits = torch.stack([table(PROMPT + path_tokens(tree, row), 0) for row in range(len(tree))])
    rules = LogitRules(params, PROMPT)
    distributions, end = TargetDistributions(Request("a", PROMPT, params), tree, logits, frozenset({1}), rules), frozenset({1})
    rng = np.random.default_rng(0)
    for row in [*range(len(tree)), *rng.integers(0, len(tree), 60).tolist()]:
        assert distributions.position(row) == len(PROMPT) + len(above[row])
        assert distributions.warped(row).tolist() == plain_law(PROMPT + above[row], params, end).tolist()
        unwarped = plain_law(PROMPT + above[row], replace(params, temperature=1.0, top_p=1.0), end)
        assert np.exp(distributions.raw_logprobs(row)) == pytest.approx(unwarped, abs=1e-7)  # float32 where logits are altered
        if row:
            last = Request("b", [*PROMPT, *above[row]], params)
            assert distributions.uniform(row, 1) == TargetDistributions(last, DraftTree.chain(0, ()), logits, end).uniform(0, 1)
    distributions.settle()
    assert rules.counts.counts.sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_law_of_a_row_is_that_of_the_warped_scores(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for vocab, scale in itertools.product((2, 40, 4000), (0.05, 3.0)):
        for truncation in ({}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_k": 7}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.8}):
            params = SamplingParams(temperature=0.8, **truncation)  # type: ignore[arg-type]
            logits = (torch.randn(vocab) * scale).to(dtype)
            expected = torch.softmax(warp(logits, params).double(), -1).numpy()
            found = request_distribution(logits, params)
            assert ((found > 0) == (expected > 0)).all() and found == pytest.approx(expected, rel=1e-12)


def test_spectr_of_three_sequences() -> None:
    params = replace(SAMPLED, max_tokens=2)
    begun: dict[Text, float] = defaultdict(float)
    for chosen in itertools.product(draft_texts(params, 1).items(), repeat=3):
        tree, rows, above = sequences_tree([chain for chain, _ in chosen], True)
        rule = KSeqRule([chain for chain, _ in chosen], rows, {row: draft_law(path, params) for row, path in above.items()})
        for text, chance in outcomes(tree, rule, params, NO_END):
            begun[text] += math.prod(weight for _, weight in chosen) * chance
    assert_same(complete(begun, params, NO_END), texts(params, NO_END))


def test_the_beginning_of_a_chain_is_verified_like_the_whole() -> None:
    begun: dict[Text, float] = defaultdict(float)
    for chain, weight in draft_texts(SAMPLED, GAMMA).items():
        tree = DraftTree.chain(PROMPT[-1], chain).clipped(2, 9, VOCAB)
        assert len(tree) == 2
        rule = RejectionRule([draft_law(chain[:depth], SAMPLED) for depth in range(GAMMA)])
        for text, chance in outcomes(tree, rule, SAMPLED, NO_END):
            begun[text] += weight * chance
    assert_same(complete(begun, SAMPLED, NO_END), texts(SAMPLED, NO_END))
