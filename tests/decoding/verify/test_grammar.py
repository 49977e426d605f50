"""Grammars in verification: a list of all texts says what is allowed where, and a naive loop what has to be chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.decoding.arrays import BoolArray, Int32Array
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sampling.penalties import FORBIDDEN, LogitRules
from outrider.decoding.sampling.sampler import choose
from outrider.decoding.tree import DraftTree, permitted
from outrider.decoding.verify.exact import verify_exact
from outrider.decoding.verify.target_probabilities import TargetDistributions

VOCAB, END = 7, 0
TEXTS = ((1, 2, 3), (1, 2, 4, 4), (1, 5), (6, 6, 6, 1), (6,))
ENDS = frozenset((END,))


class ListedTexts:
    """A ``decoding.verify.grammar.Grammar`` of a few texts."""

    def __init__(self, texts: Sequence[Sequence[int]] = TEXTS) -> None:
        self._texts = [(*text, END) for text in texts]
        self._output: list[int] = []
        self.fault: str | None = None
        self.slow_s = 0.0

    def end_step(self) -> None:
        pass

    @property
    def length(self) -> int:
        return len(self._output)

    def push(self, token: int) -> bool:
        allowed = token in self._next()
        self._output.append(token)
        return allowed

    def truncate(self, length: int) -> None:
        del self._output[length:]

    def catch_up(self, output_ids: Int32Array) -> None:
        self._output = output_ids.tolist()

    def accepts(self, token: int) -> bool:
        return not self._known or token in self._next()

    def allowed(self) -> BoolArray | None:
        return np.isin(np.arange(VOCAB), list(self._next())) if self._known else None

    def forced(self) -> list[int]:
        return []

    @property
    def _known(self) -> bool:
        return bool(self._next())

    def _next(self) -> set[int]:
        size = len(self._output)
        return {text[size] for text in self._texts if size < len(text) and list(text[:size]) == self._output}


def random_tree(rng: np.random.Generator, rows: int) -> DraftTree:
    parents = [-1, *(int(rng.integers(0, row)) for row in range(1, rows))]
    tokens = rng.integers(0, VOCAB, rows).astype(np.int32)
    return DraftTree(tokens, np.array(parents, np.int32), np.zeros(rows, np.int8), int(rng.integers(1, rows + 1)))


def test_permitted_is_what_the_list_of_texts_allows() -> None:
    rng = np.random.default_rng(1)
    cut = 0
    for _ in range(300):
        output = list(TEXTS[rng.integers(len(TEXTS))][: int(rng.integers(0, 3))])
        grammar, tree = ListedTexts(), random_tree(rng, int(rng.integers(1, 25)))
        grammar.catch_up(np.array(output, np.int32))
        found = permitted(tree, grammar)
        found.check()
        assert grammar.length == len(output)
        beginnings = {(*text, END)[:size] for text in TEXTS for size in range(len(text) + 2)}
        kept = [0]
        for row in range(1, len(tree)):
            if row < tree.num_candidates:
                if (*output, *tree.tokens[tree.path(row)].tolist()) in beginnings:
                    kept.append(row)
            elif tree.parents[row] in kept:
                kept.append(row)
        expected = tree.take(np.array(kept, np.int32))
        assert found.tokens.tolist() == expected.tokens.tolist() and found.parents.tolist() == expected.parents.tolist()
        assert found.num_candidates == expected.num_candidates
        cut += len(kept) < len(tree)
    assert 100 < cut < 300


SHAPES = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=2.0, top_p=0.7),
    "top_k": SamplingParams(temperature=0.8, top_k=2),
    "min_p": SamplingParams(temperature=1.3, min_p=0.4),
    "biased": SamplingParams(logit_bias=((3, 100.0), (1, -100.0)), temperature=1.0),
    "penalized": SamplingParams(repetition_penalty=100.0, presence_penalty=2.0, frequency_penalty=-2.0),
    "min_tokens": SamplingParams(temperature=1.0, min_tokens=3),
}


def naive(logits: torch.Tensor, params: SamplingParams, output: list[int], position: int) -> int:
    """What is chosen among the allowed tokens alone: all others are taken out before anything else happens."""
    grammar = ListedTexts()
    grammar.catch_up(np.array(output, np.int32))
    allowed = grammar.allowed()
    assert allowed is not None
    ids = np.flatnonzero(allowed)
    if len(output) < params.min_tokens and set(ids.tolist()) != ENDS:
        ids = ids[ids != END]
    rules = LogitRules(params, [2, 3])
    rules.catch_up(np.array(output, np.int32))
    scores = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
    scores[ids] = rules.apply(logits)[ids].to(torch.float64)
    plain = SamplingParams(1, params.temperature, params.top_k, params.top_p, params.seed, min_p=params.min_p)
    return choose(scores, plain, position)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_walks_choose_among_what_is_allowed(name: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(7)
    params = SHAPES[name]
    texts = set()
    for trial in range(40):
        request = Request(str(trial), [2, 3], SamplingParams(**{**_fields(params), "seed": trial, "max_tokens": 6}))
        tree = permitted(random_tree(rng, 30), ListedTexts())
        logits = torch.from_numpy(rng.normal(0.0, 3.0, (len(tree), VOCAB))).to(dtype)
        rules = LogitRules(request.params, request.prompt_ids, ListedTexts())
        distributions = TargetDistributions(request, tree, logits, ENDS, rules)
        acceptance = verify_exact(tree, distributions.choose, request.remaining, ENDS)
        distributions.settle()
        assert rules.grammar is not None and rules.grammar.length == 0
        emitted = [*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token]
        row, output = 0, list[int]()
        for token, below in zip(emitted, (*acceptance.rows, -1), strict=True):
            assert token == naive(logits[row], request.params, output, 2 + len(output)), (trial, output)
            output.append(token)
            row = below
        texts.add(tuple(output))
        if END not in output:
            distribution = distributions.warped(0)
            outside = [token for token in range(VOCAB) if token not in (1, 6)]
            assert distribution[outside].max() == 0.0 and distribution.sum() == pytest.approx(1.0)
    assert len(texts) > 1


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def test_nothing_makes_up_for_being_forbidden() -> None:
    extremes = SamplingParams(logit_bias=((3, 100.0),), repetition_penalty=0.01, temperature=1.1e-5)
    rules = LogitRules(extremes, [3], ListedTexts())
    scores = rules.apply(torch.tensor([1e4] * VOCAB))
    assert torch.isfinite(scores / extremes.temperature).all()
    assert scores[3] < FORBIDDEN / 1000 and choose(torch.tensor([1e4] * VOCAB), extremes, 9, rules) in (1, 6)


def test_behind_what_is_forbidden_nothing_is_known() -> None:
    """Lossy rules look at rows that exact ones never reach."""
    rules = LogitRules(SamplingParams(), [], ListedTexts())
    rules.push(5)
    assert torch.equal(rules.apply(torch.arange(7.0)), torch.arange(7.0))
    rules.truncate(0)
    assert (rules.apply(torch.arange(7.0)) > FORBIDDEN).tolist() == [False, True, False, False, False, False, True]


def test_a_grammar_and_ignore_eos_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(grammar="start: /a/", ignore_eos=True)
    assert SamplingParams(grammar="start: /a/").alters_logits
