"""Rules of verification in an engine over a real model: drafts that are drawn from a law, and the law of the texts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from outrider.decoding.arrays import Float64Array
from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.drafters.by_request import ByRequest
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams, SpecStats
from outrider.decoding.sampling.penalties import LogitRules
from outrider.decoding.sampling.probabilities import DRAFT, pick, uniform
from outrider.decoding.tree import DraftTree
from outrider.decoding.verify.rules import KSeqRule, MjsdRule, RejectionRule
from outrider.decoding.verify.target_probabilities import request_distribution
from tests.helpers.models import SLOTS, VOCAB, TinyModel, engine_over, prepared, run, tiny_model, tree_of

PROMPT = (5, 9, 5, 31, 7)
REQUESTS = 800
PLAIN = {"temperature": 1.2, "top_k": 3}
KINDS = {"plain": PLAIN, "penalties": {**PLAIN, "repetition_penalty": 1.3, "frequency_penalty": 0.7}}


@cache
def stock_logits(prefix: tuple[int, ...]) -> torch.Tensor:
    """[vocab] what the stock model says after a prefix."""
    with torch.inference_mode():
        logits: torch.Tensor = tiny_model("llama", "float32").stock(torch.tensor([prefix])).logits[0, -1]
    return logits


def draft_law(prefix: tuple[int, ...]) -> Float64Array:
    """A draft model: the target with its ranks turned a little, and more tokens."""
    logits = stock_logits(prefix)
    return request_distribution(logits + 0.8 * torch.sin(torch.arange(VOCAB) * 12.9), SamplingParams(temperature=0.4, top_k=5))


class LawDrafter(Drafter):
    """Draws sequences from ``draft_law``, and says how they are verified."""

    def __init__(self, sequences: int, gamma: int = 2) -> None:
        self._sequences, self._gamma = sequences, gamma
        self.counts = SpecStats()

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        return [self._tree(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def _tree(self, request: Request, budget: int) -> DraftTree:
        gamma = min(self._gamma, budget // self._sequences, request.remaining - 1)
        tokens, parents, rows, drawn = [request.root], [-1], [], []
        distributions: dict[int, Float64Array] = {}  # by row
        for sequence in range(self._sequences):
            path = [0]
            for depth in range(gamma):
                distributions[path[-1]] = draft_law((*request.tokens.tolist(), *(tokens[row] for row in path[1:])))
                number = uniform(request.params.seed, request.num_tokens + depth, DRAFT + sequence)
                path.append(self._row(tokens, parents, path[-1], pick(distributions[path[-1]], number)))
            rows.append(path[1:])
            drawn.append([tokens[row] for row in path[1:]])
        alone = self._sequences == 1
        rule = RejectionRule([distributions[row] for row in range(gamma)]) if alone else KSeqRule(drawn, rows, distributions)
        return dataclasses.replace(tree_of(tokens, parents), rule=rule)

    @staticmethod
    def _row(tokens: list[int], parents: list[int], parent: int, token: int) -> int:
        """The row of a token below another one, which sequences that begin alike share."""
        for row in range(1, len(tokens)):
            if parents[row] == parent and tokens[row] == token:
                return row
        tokens.append(token)
        parents.append(parent)
        return len(tokens) - 1

    def finish(self, request: Request) -> None:
        self.counts.drafted += request.stats.drafted
        self.counts.accepted += request.stats.accepted


def joint_law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The law of three tokens of plain decoding, by the stock model on every prefix."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for text, weight in texts.items():
            rules = LogitRules(params, PROMPT)
            rules.counts.catch_up(np.array(text, np.int32))
            distribution = request_distribution(stock_logits(PROMPT + text), params, rules if params.alters_logits else None)
            grown |= {(*text, token): weight * distribution[token] for token in np.flatnonzero(distribution).tolist()}
        texts = grown
    return texts


def p_value(counts: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float], total: int) -> float:
    """Of Pearson's chi-squared test; texts that are expected less than five times are one cell."""
    assert counts.keys() <= distribution.keys()
    rare = [text for text, prob in distribution.items() if prob * total < 5]
    cells = [(counts[text], prob * total) for text, prob in distribution.items() if prob * total >= 5]
    if rare:
        cells.append((sum(counts[text] for text in rare), sum(distribution[text] for text in rare) * total))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    assert len(cells) >= 10, len(cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))


def outputs(
    drafter: Drafter, settings: dict[str, float], seeds: Sequence[int], max_tokens: int, batch: int = SLOTS
) -> list[list[int]]:
    model: TinyModel = tiny_model("llama", "float32")
    engine = engine_over(model.runner, prepared(drafter, model), batch=batch)
    found = []
    for first in range(0, len(seeds), 40):
        requests = [
            Request(str(seed), PROMPT, SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **settings))  # type: ignore[arg-type]
            for seed in seeds[first : first + 40]
        ]
        found += run(engine, *requests)
    return found


@pytest.mark.parametrize(("kind", "sequences"), [("plain", 1), ("penalties", 3)])
def test_three_tokens_have_the_joint_law_of_plain_decoding(kind: str, sequences: int) -> None:
    drafter = LawDrafter(sequences)
    texts = outputs(drafter, KINDS[kind], range(REQUESTS), 3)
    distribution = joint_law(SamplingParams(**KINDS[kind]))  # type: ignore[arg-type]
    value = p_value(Counter(map(tuple, texts)), distribution, REQUESTS)
    assert value > 0.001
    assert 0.1 * REQUESTS < drafter.counts.accepted < 0.9 * drafter.counts.drafted  # accepted and rejected both


def test_a_wrong_draft_law_is_noticed() -> None:
    """The test above has power: with another law than the tokens were drawn from, the texts have not the target's law."""

    class Wrong(LawDrafter):
        def _tree(self, request: Request, budget: int) -> DraftTree:
            tree = super()._tree(request, budget)
            assert isinstance(tree.rule, RejectionRule)
            tree.rule = RejectionRule([(one > 0) / (one > 0).sum() for one in tree.rule._draft_probs])
            return tree

    texts = outputs(Wrong(1), PLAIN, range(REQUESTS), 3)
    assert p_value(Counter(map(tuple, texts)), joint_law(SamplingParams(**PLAIN)), REQUESTS) < 1e-4  # type: ignore[arg-type]


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_seed_has_one_text_whatever_the_batch(sequences: int) -> None:
    alone = outputs(LawDrafter(sequences, 4), KINDS["penalties"], range(4), 12, batch=1)
    assert outputs(LawDrafter(sequences, 4), KINDS["penalties"], range(4), 12) == alone
    assert len({tuple(text) for text in alone}) == 4 and all(len(text) == 12 for text in alone)


@pytest.mark.parametrize("sequences", [1, 3])
def test_rules_of_drawn_drafts_keep_greedy_outputs(sequences: int) -> None:
    plain = outputs(build_drafter("autoregressive", {}), {"frequency_penalty": 0.4}, range(2), 16)
    assert outputs(LawDrafter(sequences, 4), {"frequency_penalty": 0.4}, range(2), 16) == plain


class Strict(Drafter):
    """Drafts a chain of which a lossy rule accepts nothing."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        trees = [DraftTree.chain(request.root, [3, 4][:budget]) for request, budget in zip(requests, budgets, strict=True)]
        for tree in trees:
            tree.rule = MjsdRule([-1.0, -1.0], 1.0)
        return trees


def test_rules_are_those_of_the_requests_own_strategy() -> None:
    """Under a threshold of 1 a text is plain decoding's; a strategy without a rule, in the same steps, is verified exactly."""
    model = tiny_model("llama", "float32")
    plain = outputs(build_drafter("autoregressive", {}), KINDS["penalties"], range(4), 24)
    drafter = ByRequest({"llma": build_drafter("llma", {}), "strict": Strict(), "drawn": LawDrafter(1)})
    engine = engine_over(model.runner, prepared(drafter, model), strategy="llma")
    names = ("llma", "strict", "drawn", None)
    requests = [
        Request(
            str(seed), PROMPT, SamplingParams(seed=seed, max_tokens=24, ignore_eos=True, **KINDS["penalties"]),  # type: ignore[arg-type]
            [[*PROMPT, *plain[seed]]], strategy=names[seed],
        )
        for seed in range(4)
    ]  # fmt: skip
    found = run(engine, *requests)
    assert [found[at] for at in (0, 1, 3)] == [plain[at] for at in (0, 1, 3)] and found[2] != plain[2]
    assert requests[0].stats.accepted > 0 and requests[1].stats.drafted > 0 and requests[1].stats.accepted == 0
    assert all(max(text) < VOCAB for text in found)
