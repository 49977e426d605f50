"""K-SEQ against its definition, and the random numbers and draws that the rules share."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from outrider.decoding.arrays import Float64Array
from outrider.decoding.sampling.philox import fill_raw, raw_stream
from outrider.decoding.sampling.probabilities import ACCEPT, DRAFT, RESIDUAL, pick, residual, uniform
from outrider.decoding.sampling.sampler import gumbel, gumbel_noise
from outrider.decoding.verify.rules import KSeq, rho_star


def distributions(vocab: int, seed: int, excluded: int = 0) -> Float64Array:
    """A random law; the first tokens have no probability."""
    weights = np.random.default_rng(seed).gamma(0.5, size=vocab)
    weights[:excluded] = 0.0
    return weights / weights.sum()


CASES = [
    (distributions(vocab, seed, seed % 2), distributions(vocab, seed + 50)[:: 1 if seed % 3 else -1], k)
    for seed, (vocab, k) in enumerate(itertools.product((2, 3, 5), (1, 2, 3, 4)))
] + [
    (np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.3, 0.7]), 3),  # nothing in common
    (np.array([1.0, 0.0, 0.0]), np.array([0.02, 0.28, 0.7]), 3),
    (np.array([0.2, 0.3, 0.5]), np.array([0.2, 0.3, 0.5]), 4),  # alike
    (np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.0, 1.0]), 1),
]


def emitted_law(draft: Float64Array, coupling: KSeq, k: int) -> Float64Array:
    """The law of the token that comes out, over all k-tuples of draft tokens."""
    distribution = np.zeros_like(draft)
    for tokens in itertools.product(range(len(draft)), repeat=k):
        reached = math.prod(draft[list(tokens)].tolist())  # the chance that these are drawn and none was accepted so far
        for token in tokens:
            if reached > 0.0:
                distribution[token] += reached * coupling.accept_prob(token)
                reached *= 1.0 - coupling.accept_prob(token)
        distribution += reached * coupling.residual()
    return distribution


@pytest.mark.parametrize(("draft", "target", "k"), CASES)
def test_the_token_has_the_targets_law(draft: Float64Array, target: Float64Array, k: int) -> None:
    coupling = KSeq.of(target, draft, k)
    assert emitted_law(draft, coupling, k) == pytest.approx(target, abs=1e-12)
    chances = [coupling.accept_prob(token) if draft[token] > 0.0 else 0.0 for token in range(len(draft))]
    assert min(chances) >= 0.0 and max(chances) <= 1.0
    assert coupling.beta == pytest.approx(float((draft * chances).sum()), abs=1e-12)
    assert coupling.residual().sum() == pytest.approx(1.0) and (coupling.residual() >= 0).all()
    assert k > 1 or coupling.residual() == pytest.approx(residual(target, draft))  # as in speculative sampling


@pytest.mark.parametrize(
    ("draft", "target", "k"), [*CASES, *((distributions(20_000, 1), distributions(20_000, 2), k) for k in (2, 5))]
)
def test_rho_is_the_smallest_that_leaves_a_law(draft: Float64Array, target: Float64Array, k: int) -> None:
    def holds(rho: float) -> bool:
        beta = float(np.minimum(draft, target / rho).sum())
        return 1.0 - (1.0 - beta) ** k <= rho * beta + 1e-9 * beta

    rho = rho_star(target, draft, k)
    assert 1.0 <= rho <= k and holds(rho)
    if float(np.minimum(draft, target).sum()) > 0.0:
        assert all(not holds(smaller) for smaller in np.linspace(1.0, rho, 50)[:-1] if smaller < rho - 1e-6)


def test_residual_of_what_is_covered_whole_is_the_target() -> None:
    target = np.array([0.25, 0.75])
    assert residual(target, target) is target
    assert residual(np.array([0.5, 0.3, 0.2]), np.array([0.7, 0.2, 0.1])).tolist() == pytest.approx([0.0, 0.5, 0.5])


def test_picks_follow_the_law_and_never_the_impossible() -> None:
    distribution = np.array([0.0, 0.2, 0.0, 0.8, 0.0])
    assert [pick(distribution, number) for number in (2.0**-53, 0.1999, 0.2, 0.5, 1.0 - 2.0**-53)] == [1, 1, 3, 3, 3]
    assert pick(distribution * 7.0, 0.1999) == 1 and pick(distribution / 3.0, 0.21) == 3
    numbers = [uniform(5, position, RESIDUAL) for position in range(8000)]
    distribution = distributions(7, 6)
    counts = np.bincount([pick(distribution, number) for number in numbers], minlength=7)
    assert (
        float((((counts - 8000 * distribution) ** 2) / (8000 * distribution)).sum()) < 33.1
    )  # chi-squared, 6 degrees of freedom, p = 1e-5


def test_streams_are_told_apart_and_the_first_is_as_it_was() -> None:
    assert (gumbel_noise(1, 2, 50) == gumbel(raw_stream(1, 2, 50, 0))).all()
    streams = (0, ACCEPT, RESIDUAL, DRAFT, DRAFT + 1, DRAFT + 7)
    places = np.array([0, 3, 4, 900])
    for stream in streams:
        raw = raw_stream(9, 4, 901, stream)
        found = np.zeros(len(places), np.uint64)
        fill_raw(np.uint64(9), np.uint64(4), places, found, stream)
        assert (found == raw[places]).all()
    rows = np.stack([raw_stream(9, 4, 4000, stream) / 2.0**64 for stream in streams])
    correlation = np.corrcoef(rows)[np.triu_indices(len(streams), 1)]
    assert np.abs(correlation).max() < 0.08  # 5 standard deviations of the correlation of 4000 independent pairs


def test_uniform_numbers_are_a_function_of_their_place_and_pinned() -> None:
    """A text once given for a seed must come again after an upgrade: these numbers may never change."""
    numbers = [uniform(3, 10, ACCEPT, index) for index in range(3)] + [uniform(3, 10, DRAFT)]
    assert numbers == [uniform(3, 10, ACCEPT, index) for index in range(3)] + [uniform(3, 10, DRAFT)]
    assert len(set(numbers)) == 4 and all(0.0 < number < 1.0 for number in numbers)
    assert numbers == pytest.approx(PINNED, abs=1e-15)


PINNED = [0.08987911661524384, 0.990963092959665, 0.7841826929342154, 0.9783051782978426]


def test_one_draft_token_is_speculative_sampling() -> None:
    draft, target = distributions(5, 3), distributions(5, 4)
    coupling = KSeq.of(target, draft, 1)
    assert coupling.rho == 1.0
    assert [coupling.accept_prob(token) for token in range(5)] == pytest.approx(np.minimum(1.0, target / draft))
    assert coupling.residual() == pytest.approx(residual(target, draft))


def test_more_draft_tokens_are_accepted_more_often() -> None:
    draft, target = distributions(6, 8), distributions(6, 9)
    chances = [1.0 - (1.0 - KSeq.of(target, draft, k).beta) ** k for k in range(1, 7)]
    assert all(more > fewer for fewer, more in itertools.pairwise(chances)) and chances[-1] < 1.0


def test_large_vocabularies_are_summed_like_small_ones() -> None:
    draft, target = distributions(20_000, 1), distributions(20_000, 2)
    for k in (2, 5):
        low, high = 1.0, float(k)
        for _ in range(60):
            rho = 0.5 * (low + high)
            beta = float(np.minimum(draft, target / rho).sum())
            low, high = (low, rho) if 1.0 - (1.0 - beta) ** k <= rho * beta else (rho, high)
        assert rho_star(target, draft, k) == pytest.approx(high, abs=1e-9)
