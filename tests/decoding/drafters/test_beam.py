"""Beam search against all continuations, with a model that is a table of its last two tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
import pytest
import torch

from outrider.decoding.drafters.with_model.beam import Beam, beam_search, raw_score
from outrider.decoding.drafters.with_model.draft_probabilities import DraftDistributions
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import DraftTree

VOCAB = 5


class TableModel:
    """A draft model that says what a table says after its last two tokens."""

    vocab_size, max_model_len = VOCAB, 10_000

    def __init__(self, seed: int) -> None:
        self._table = torch.from_numpy(np.random.default_rng(seed).normal(size=(VOCAB, VOCAB, VOCAB))) * 2.0
        self.rows: list[int] = []  # of each forward

    def after(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._table[tokens[-2], tokens[-1]]

    def catch_up(self, requests: Sequence[Request]) -> list[bool]:
        return [True] * len(requests)

    def next_logits(self, requests: Sequence[Request], chains: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.stack([self.after([*one.tokens, *chain]) for one, chain in zip(requests, chains, strict=True)])

    def tree_logits(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> list[torch.Tensor]:
        self.rows.append(sum(map(len, trees)))
        return [
            torch.stack([self.after([*one.tokens, *tree.tokens[tree.path(row)].tolist()]) for row in range(len(tree))])
            for one, tree in zip(requests, trees, strict=True)
        ]


def request(*prompt: int, **params: object) -> Request:
    return Request("a", prompt, SamplingParams(max_tokens=50, **params))  # type: ignore[arg-type]


def joint(model: TableModel, one: Request, tokens: Sequence[int]) -> list[float]:
    prefix, found = one.tokens.tolist(), []
    for token in tokens:
        found.append(float(torch.log_softmax(model.after(prefix), -1)[token]))
        prefix.append(token)
    return found


@pytest.mark.parametrize("beams", [1, 2, 7, VOCAB**4])
def test_each_level_keeps_the_best_of_what_is_alive(beams: int) -> None:
    asked = [request(1, 2), request(3, 0), request(4, 4)]
    depths = [4, 1, 3]
    model = TableModel(9)
    found = beam_search(model, asked, depths, beams)
    for one, depth, beam in zip(asked, depths, found, strict=True):
        alive: list[tuple[int, ...]] = [()]
        for _ in range(depth):
            grown = [(*tokens, token) for tokens in alive for token in range(VOCAB)]
            alive = sorted(grown, key=lambda tokens, one=one: -sum(joint(model, one, tokens)))[:beams]  # type: ignore[misc]
        assert beam.tokens == alive[0], (one.tokens, beams)
        assert beam.logprobs == pytest.approx(joint(model, one, beam.tokens), abs=1e-12)
        assert beam.score == pytest.approx(sum(beam.logprobs), abs=1e-12)
    assert len(model.rows) == max(depths) and model.rows[0] == len(asked)  # a forward a level, the first one of roots
    assert model.rows[3] <= 1 + 3 * beams  # each beam and the rows above it


def test_excluded_tokens_are_in_no_beam() -> None:
    """By the warped law: top-k 1 leaves one continuation, and where nothing is left a beam ends."""
    distributions, model, one = DraftDistributions(), TableModel(1), request(1, 2, temperature=1.0, top_k=1)

    def warped(asked: Request, chains: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        rows = [distributions.warped(asked, chain, row) for chain, row in zip(chains, logits, strict=True)]
        return torch.from_numpy(np.stack(rows)).log()

    (beam,) = beam_search(model, [one], [3], 4, warped)
    assert beam.logprobs == (0.0, 0.0, 0.0) and beam.tokens == beam_search(model, [one], [3], 1)[0].tokens

    def ending(asked: Request, chains: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        return raw_score(asked, chains, logits) if len(chains[0]) < 2 else torch.full_like(logits, -torch.inf)

    (cut,) = beam_search(model, [one], [4], 2, ending)
    assert len(cut.tokens) == 2
    assert beam_search(model, [one], [2], 2, lambda asked, chains, logits: torch.full_like(logits, -torch.inf)) == [Beam((), ())]


def test_drawn_beams_have_the_law_of_draws_without_replacement() -> None:
    """One beam of one token is a draw from the softmax; of two, the likelier one of a pair drawn one after the other."""
    distributions, model, trials = DraftDistributions(), TableModel(3), 4000
    probs = torch.softmax(model.after([1, 2]), -1).tolist()
    for beams in (1, 2):
        asked = [request(1, 2, seed=seed) for seed in range(trials)]
        found = beam_search(model, asked, [1] * trials, beams, noise=distributions.noise)
        law = dict.fromkeys(range(VOCAB), 0.0)
        for drawn in permutations(range(VOCAB), beams):
            chance, left = 1.0, 1.0
            for token in drawn:
                chance, left = chance * probs[token] / left, left - probs[token]
            law[max(drawn, key=probs.__getitem__)] += chance
        counts = Counter(beam.tokens[0] for beam in found)
        for token, chance in law.items():
            assert abs(counts[token] - trials * chance) < 5 * (trials * chance * (1 - chance)) ** 0.5 + 1, (beams, token)


def test_drawn_beams_are_the_requests_own_and_with_room_for_all_the_likeliest() -> None:
    distributions, model = DraftDistributions(), TableModel(4)
    several = [request(1, 2, seed=seed) for seed in range(30)]
    found = beam_search(model, several, [4] * 30, 2, noise=distributions.noise)
    assert found == [beam_search(model, [one], [4], 2, noise=distributions.noise)[0] for one in several]
    assert len({beam.tokens for beam in found}) > 5
    for one, beam in zip(several, found, strict=True):
        assert beam.logprobs == pytest.approx(joint(model, one, beam.tokens), abs=1e-12)
    (all_of,) = beam_search(model, several[:1], [3], VOCAB**3, noise=distributions.noise)
    assert all_of == beam_search(model, several[:1], [3], VOCAB**3)[0]


@pytest.mark.parametrize("seed", range(6))
def test_with_room_for_all_it_is_the_likeliest_of_all(seed: int) -> None:
    model, one = TableModel(seed), request(1, 2)
    (best,) = beam_search(model, [one], [3], VOCAB**3)
    scores = {tokens: sum(joint(model, one, tokens)) for tokens in product(range(VOCAB), repeat=3)}
    assert best.tokens == max(scores, key=scores.__getitem__)
    assert best.logprobs == pytest.approx(joint(model, one, best.tokens), abs=1e-12)
    assert best.score == pytest.approx(sum(best.logprobs), abs=1e-12)


def test_one_beam_is_greedy_and_more_find_better() -> None:
    better = 0
    for seed in range(20):
        model, one = TableModel(seed), request(1, 2)
        (greedy,), (wide,) = (beam_search(model, [one], [4], beams) for beams in (1, 8))
        chain: list[int] = []
        for _ in range(4):
            chain.append(int(model.after([*one.tokens, *chain]).argmax()))
        assert list(greedy.tokens) == chain
        better += wide.score > greedy.score + 1e-9
        assert wide.score >= greedy.score - 1e-9
    assert better > 3
