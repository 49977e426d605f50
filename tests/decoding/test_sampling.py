"""Choices: their law, and what they are a function of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decoding.request import SamplingParams
from decoding.sampling import argmax_rows, choose, gumbel_noise, warp


def params(**changes: float) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **changes})  # type: ignore[arg-type]


def kept(scores: torch.Tensor) -> list[int]:
    return torch.isfinite(scores).nonzero().flatten().tolist()


def test_noise_is_a_function_of_seed_and_position() -> None:
    assert np.array_equal(gumbel_noise(3, 10, 50), gumbel_noise(3, 10, 50))
    assert np.array_equal(gumbel_noise(3, 10, 50)[:20], gumbel_noise(3, 10, 20))
    assert not np.array_equal(gumbel_noise(3, 10, 50), gumbel_noise(3, 11, 50))
    assert not np.array_equal(gumbel_noise(3, 10, 50), gumbel_noise(4, 10, 50))


def test_noise_of_one_position_is_pinned() -> None:
    """A text once given for a seed must come again after an upgrade: these numbers may never change."""
    assert gumbel_noise(1, 2, 3) == pytest.approx([2.8850203336334097, 1.0120580066182074, -0.8122408019672243], abs=1e-12)


def test_noise_of_neighbouring_positions_is_independent() -> None:
    rows = np.stack([gumbel_noise(5, position, 4000) for position in range(4)])
    correlation = np.corrcoef(rows)[np.triu_indices(4, 1)]
    assert np.abs(correlation).max() < 0.08  # 5 standard deviations of the correlation of 4000 independent pairs
    assert np.abs(rows.mean() - 0.5772) < 0.05


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    law = torch.softmax(logits / 0.7, -1).numpy()
    draws = 20000
    counts = np.bincount([choose(logits, params(temperature=0.7, seed=9), position) for position in range(draws)], minlength=5)
    statistic = float((((counts - draws * law) ** 2) / (draws * law)).sum())
    assert statistic < 27.9  # chi-squared, 4 degrees of freedom, p = 1e-5; the draws are fixed by the seed


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_argmax_rows_takes_the_first_of_equals(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 2.0], [-5.0, -4.0, -6.0]], dtype=dtype)
    assert argmax_rows(rows).tolist() == [1, 0, 1] == [choose(row, SamplingParams(), 9) for row in rows]
    assert argmax_rows(rows[:0]).tolist() == []


def test_low_temperature_approaches_the_argmax() -> None:
    logits = torch.tensor([0.0, 1.0, 0.9])
    assert {choose(logits, params(temperature=0.001, seed=seed), 3) for seed in range(50)} == {1}


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -0.1), ("temperature", 2.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("seed", -1)],
)
def test_values_out_of_range_name_the_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=("",))
