"""Choices: their law, and what they are a function of."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.request import SamplingParams
from outrider.decoding.sampling.penalties import LogitRules, TokenCounts
from outrider.decoding.sampling.ranking import argmax_rows
from outrider.decoding.sampling.sampler import choose, gumbel_noise, token_logprobs, warp


def params(**changes: float) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **changes})  # type: ignore[arg-type]


def test_noise_is_a_function_of_seed_and_position_and_pinned() -> None:
    """A text once given for a seed must come again after an upgrade: these numbers may never change."""
    assert np.array_equal(gumbel_noise(3, 10, 50)[:20], gumbel_noise(3, 10, 20))
    assert not np.array_equal(gumbel_noise(3, 10, 50), gumbel_noise(3, 11, 50))
    assert not np.array_equal(gumbel_noise(3, 10, 50), gumbel_noise(4, 10, 50))
    assert gumbel_noise(1, 2, 3) == pytest.approx([2.8850203336334097, 1.0120580066182074, -0.8122408019672243], abs=1e-12)


def test_noise_of_neighbouring_positions_is_independent() -> None:
    rows = np.stack([gumbel_noise(5, position, 4000) for position in range(4)])
    correlation = np.corrcoef(rows)[np.triu_indices(4, 1)]
    assert np.abs(correlation).max() < 0.08  # 5 standard deviations of the correlation of 4000 independent pairs
    assert np.abs(rows.mean() - 0.5772) < 0.05


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    distribution = torch.softmax(logits / 0.7, -1).numpy()
    draws = 4000
    counts = np.bincount([choose(logits, params(temperature=0.7, seed=9), position) for position in range(draws)], minlength=5)
    statistic = float((((counts - draws * distribution) ** 2) / (draws * distribution)).sum())
    assert statistic < 27.9  # chi-squared, 4 degrees of freedom, p = 1e-5; the draws are fixed by the seed


def kept(scores: torch.Tensor) -> list[int]:
    return torch.isfinite(scores).nonzero().flatten().tolist()


def test_top_k_keeps_the_k_most_likely_and_ties() -> None:
    assert kept(warp(torch.tensor([1.0, 3.0, 2.0, 0.0]), params(top_k=2))) == [1, 2]
    assert kept(warp(torch.tensor([1.0, 2.0, 2.0, 2.0]), params(top_k=2))) == [1, 2, 3]
    assert kept(warp(torch.tensor([1.0, 2.0]), params(top_k=9))) == [0, 1]


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25], dtype=torch.float64))
    assert kept(warp(logits, params(top_p=0.45))) == [1]
    assert kept(warp(logits, params(top_p=0.7))) == [1, 3]
    assert kept(warp(logits, params(top_p=0.8))) == [1, 2, 3]
    assert kept(warp(logits, params(top_p=1e-9))) == [1]


def test_top_p_acts_on_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64))
    assert kept(warp(logits, params(top_k=2, top_p=0.5))) == [0]  # 0.4 / 0.7 holds the half that 0.4 / 1.0 does not


def test_min_p_keeps_a_share_of_the_most_likely() -> None:
    logits = torch.log(torch.tensor([0.3, 0.5, 0.05, 0.15], dtype=torch.float64))
    assert kept(warp(logits, params(min_p=0.29))) == [0, 1, 3]
    assert kept(warp(logits, params(min_p=0.31))) == [0, 1]
    assert kept(warp(logits, params(min_p=1.0))) == [1]
    assert kept(warp(torch.zeros(4), params(min_p=1.0))) == [0, 1, 2, 3]
    assert kept(warp(logits, params(min_p=0.29, top_k=2))) == [0, 1]
    # Without min-p the mass before token 3 is 0.8; with it, 0.8 / 0.95 exceeds top_p.
    assert kept(warp(logits, params(min_p=0.29, top_p=0.82))) == [0, 1]
    assert kept(warp(logits, params(top_p=0.82))) == [0, 1, 3]
    assert kept(warp(logits, params(min_p=0.29, temperature=0.5))) == [0, 1]  # after the temperature: 0.09 / 0.25, 0.0225 / 0.25


def test_warp_agrees_with_transformers() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    generator = torch.Generator().manual_seed(0)
    for top_k, top_p, temperature in [(5, 1.0, 0.5), (0, 0.8, 1.3), (20, 0.6, 0.9)]:
        logits = torch.randn(1, 50, generator=generator)
        expected = TemperatureLogitsWarper(temperature)(None, logits)
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        expected = TopPLogitsWarper(top_p)(None, expected)
        ours = warp(logits[0], SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
        assert torch.equal(torch.isfinite(ours), torch.isfinite(expected[0]))
        assert torch.allclose(torch.softmax(ours, -1), torch.softmax(expected[0], -1))


def test_temperature_zero_is_the_first_argmax() -> None:
    assert choose(torch.tensor([1.0, 3.0, 3.0]), SamplingParams(), 4) == 1
    for temperature in (1e-320, 1e-30, 1e-6):  # logits divided by it are not finite
        assert choose(torch.tensor([1.0, 3.0, 2.0]), params(temperature=temperature), 4) == 1


def naive_rules(
    logits: list[float], settings: SamplingParams, prompt: list[int], output: list[int], barred: set[int]
) -> list[np.float64]:
    """The rules for one token at a time, in vLLM's order."""
    scores = []
    for token, logit in enumerate(logits):
        score = np.float64(logit) + dict(settings.logit_bias).get(token, 0.0)
        if token in barred:
            score = np.float64(-np.inf)
        if token in prompt or token in output:
            score = score / settings.repetition_penalty if score > 0 else score * settings.repetition_penalty
        count = output.count(token)
        score = score - settings.frequency_penalty * count
        scores.append(score - settings.presence_penalty if count else score)
    return scores


def naive_warp(scores: list[float], settings: SamplingParams) -> list[float]:
    """Min-p, top-k and top-p, each on what the one before left; excluded tokens have -inf."""

    def probs() -> list[float]:
        weights = [math.exp(score - max(scores)) for score in scores]
        return [weight / sum(weights) for weight in weights]

    bar = settings.min_p * max(probs())
    scores = [score if prob >= bar else -math.inf for score, prob in zip(scores, probs(), strict=True)]
    if settings.top_k:
        least = sorted(scores, reverse=True)[: settings.top_k][-1]
        scores = [score if score >= least else -math.inf for score in scores]
    mass, found = 0.0, probs()
    for token in sorted(range(len(scores)), key=lambda candidate: -scores[candidate]):
        if mass >= settings.top_p < 1.0:
            scores[token] = -math.inf
        mass += found[token]
    return scores


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[float], SamplingParams, list[int], list[int], set[int]]:
    vocab = draw(st.integers(1, 6))
    tokens = st.lists(st.integers(0, vocab - 1), max_size=8)
    logits = draw(st.lists(st.floats(-8, 8, width=32), min_size=vocab, max_size=vocab))
    bias = draw(st.dictionaries(st.integers(0, vocab - 1), st.floats(-100, 100), max_size=3))
    settings = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_k=draw(st.integers(0, vocab)),
        top_p=draw(st.sampled_from([1.0, 0.9137, 0.5231])),  # values that no sum of equal probabilities meets
        min_p=draw(st.sampled_from([0.0, 0.1093, 0.9071])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3, 100.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -0.1])),
        logit_bias=tuple(bias.items()),
        seed=draw(st.integers(0, 9)),
    )
    return logits, settings, draw(tokens), draw(tokens), draw(st.sets(st.integers(0, vocab + 2), max_size=2))


@given(chains())
def test_the_chain_is_the_rules_by_the_letter(chain: tuple[list[float], SamplingParams, list[int], list[int], set[int]]) -> None:
    logits, settings, prompt, output, barred = chain
    rules = LogitRules(settings, prompt)
    rules.counts.catch_up(np.array(output, np.int32))
    row = torch.tensor(logits, dtype=torch.float64)
    expected = naive_rules(logits, settings, prompt, output, barred)
    assert rules.apply(row, barred).tolist() == expected
    assert row.tolist() == logits  # the model's own, for log-probabilities and drafters
    if math.isinf(max(expected)):
        return
    token = choose(row, settings, 7, rules, barred)
    if settings.greedy:
        assert token == int(np.argmax(expected))
        return
    scores = naive_warp([score / settings.temperature for score in expected], settings)
    assert warp(rules.apply(row, barred), settings).tolist() == scores
    noise = gumbel_noise(settings.seed, 7, len(scores)).tolist()
    assert token == max(range(len(scores)), key=lambda candidate: scores[candidate] + noise[candidate])


@given(st.lists(st.integers(0, 200), max_size=90), st.lists(st.lists(st.integers(0, 200), max_size=90), max_size=5))
def test_counts_follow_the_output_forwards_and_backwards(prompt: list[int], outputs: list[list[int]]) -> None:
    counts = TokenCounts(prompt)
    kept_before: list[int] = []
    for output in outputs:
        whole = kept_before + output
        for token in output:  # a walk down a tree
            counts.push(token)
        kept_before = whole[: len(whole) * 2 // 3]  # of which a part is committed
        counts.catch_up(np.array(kept_before, np.int32))
        assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
            token: kept_before.count(token) for token in {*prompt, *kept_before}
        }


def test_logprobs_are_the_log_softmax_and_its_best() -> None:
    rows = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 0.0, 0.0, -1.0]], dtype=torch.float64)
    first, second = token_logprobs(rows, [2, 0], 3)
    table = torch.log_softmax(rows, -1)
    assert (first.token_id, second.token_id) == (2, 0)
    assert (first.logprob, second.logprob) == pytest.approx((table[0, 2].item(), table[1, 0].item()), abs=1e-12)
    assert [token for token, _ in first.top] == [1, 3, 2]  # equals by token id
    assert [value for _, value in first.top] == pytest.approx([table[0, token].item() for token in (1, 3, 2)], abs=1e-12)
    assert token_logprobs(rows, [2, 0], 0)[0].top == ()
    assert len(token_logprobs(rows, [2, 0], 20)[0].top) == 4
    assert token_logprobs(rows[:1].to(torch.bfloat16), [1], 1)[0].logprob == pytest.approx(table[0, 1].item(), abs=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("temperature", -0.1), ("temperature", 2.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1),
        ("seed", -1), ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan),
        ("repetition_penalty", 0.0), ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("logprobs", -1), ("logprobs", 21), ("min_tokens", -1),
        ("min_tokens", 257), ("logit_bias", ((-1, 1.0),)), ("logit_bias", ((1, 100.5),)), ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))), ("stop", ("",)),
    ],
)  # fmt: skip
def test_values_out_of_range_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_parameters_are_values() -> None:
    settings = SamplingParams(logit_bias=((3, 1.0),), logprobs=2)
    assert len({settings, SamplingParams(logit_bias=((3, 1.0),), logprobs=2)}) == 1
    assert settings.alters_logits and not settings.penalized
    assert not SamplingParams(temperature=0.5, min_p=0.1, logprobs=3).alters_logits


class Counted(frozenset[int]):
    """Tokens that count how often all of them are looked through."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize("count", [1, 5, 7, 8, 9, 64])
def test_long_lists_of_tokens_are_looked_through_once_and_do_what_short_ones_do(count: int) -> None:
    rng = np.random.default_rng(count)
    tokens = rng.permutation(64)[:count].tolist()
    settings = params(logit_bias=tuple((token, float(rng.uniform(-100, 100))) for token in tokens), presence_penalty=0.5)
    barred, rules = Counted(rng.permutation(70)[:count].tolist()), LogitRules(settings, [])
    for step in range(4):
        logits = rng.normal(size=64).tolist()
        if step % 2:
            expected = naive_rules(logits, settings, [], list(range(step)), barred)
            assert rules.apply(torch.tensor(logits, dtype=torch.float64), barred).tolist() == expected
        else:
            expected = naive_rules(logits, settings, [], list(range(step)), set())
            assert rules.apply(torch.tensor(logits, dtype=torch.float64)).tolist() == expected
        rules.push(step)
    assert barred.times == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_penalties_are_torchs_bit_for_bit(dtype: torch.dtype) -> None:
    """A text once given for a seed must come again: these operations, in these types, are what it was made with."""
    torch.manual_seed(0)
    for repetition, frequency, presence in [(1.1, 0.3, 0.7), (0.7, 0.0, -0.2), (1.0, -1.3, 0.1), (1.3, 0.0, 0.0)]:
        settings = params(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
        rules = LogitRules(settings, [1, 2, 2, 40])
        for token in (3, 3, 2, 7, 3):
            rules.counts.push(token)
        logits = (torch.randn(60) * 4).to(dtype)
        expected = logits.to(torch.promote_types(dtype, torch.float32), copy=True)
        ids = torch.from_numpy(rules.counts.ids)
        counts = torch.from_numpy(rules.counts.counts).to(expected)
        seen = expected[ids]
        if repetition != 1.0:
            seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        seen -= frequency * counts
        seen -= presence * (counts > 0)
        expected[ids] = seen
        assert torch.equal(rules.apply(logits), expected)


def test_rules_of_the_worked_example() -> None:
    rules = LogitRules(SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25), [5, 5])
    rules.counts.catch_up(np.array([6, 6], np.int32))
    scores = rules.apply(torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 3.0, -1.0], dtype=torch.bfloat16))
    assert scores.dtype is torch.float32
    assert scores.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 1.5, -3.25]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_argmax_rows_takes_the_first_of_equals(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 2.0], [-5.0, -4.0, -6.0]], dtype=dtype)
    assert argmax_rows(rows).tolist() == [1, 0, 1] == [choose(row, SamplingParams(), 9) for row in rows]
    assert argmax_rows(rows[:0]).tolist() == []


def test_low_temperature_approaches_the_argmax() -> None:
    logits = torch.tensor([0.0, 1.0, 0.9])
    assert {choose(logits, params(temperature=0.001, seed=seed), 3) for seed in range(50)} == {1}


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=("",))
