"""The short way to a token against the long one: the same token, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.decoding.arrays import UInt64Array
from outrider.decoding.request import SamplingParams
from outrider.decoding.sampling.philox import fill_raw, fill_stream, raw_stream
from outrider.decoding.sampling.row_draw import LANES, draw_row, fill_weights
from outrider.decoding.sampling.sampler import choose, gumbel, gumbel_noise, warp

TRUNCATIONS: list[dict[str, float]] = [
    {},
    {"top_p": 0.95},
    {"top_p": 0.3},
    {"top_k": 50},
    {"top_k": 3, "top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 0.2, "top_k": 7, "top_p": 0.6},
    {"min_p": 0.001, "top_p": 0.99},
    {"top_p": 1e-9},
    {"top_p": 0.999999},
    {"min_p": 1.0},
    {"min_p": 1e-40},
]


def the_long_way(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    scores = warp(logits, params).to(torch.float64).numpy()
    return int(np.argmax(scores + gumbel_noise(params.seed, position, len(scores))))


def raw_at(seed: int, position: int, places: np.ndarray) -> UInt64Array:
    found = np.zeros(len(places), np.uint64)
    fill_raw(np.uint64(seed), np.uint64(position), places, found)
    return found


def test_numbers_of_a_stream_without_those_before_them() -> None:
    places = np.array([0, 1, 2, 3, 4, 7, 64, 999, 4095, 50_256])
    for seed in (0, 1, 123_456_789, 2**63 - 1):
        for position in (0, 1, 700, 2**40):
            stream = raw_stream(seed, position, 50_257)
            assert (raw_at(seed, position, places) == stream[places]).all()
            assert (gumbel(raw_at(seed, position, places)) == gumbel_noise(seed, position, 50_257)[places]).all()
    assert len(raw_at(1, 2, places[:0])) == 0


def test_a_stream_by_blocks() -> None:
    lanes = np.empty((4, 250), np.uint64)
    for seed, position in ((0, 0), (1, 700), (2**63 - 1, 2**40)):
        fill_stream(np.uint64(seed), np.uint64(position), lanes)
        assert (lanes.T.ravel() == raw_stream(seed, position, 1000)).all()


def test_weights_of_scores() -> None:
    scores = np.linspace(-90.0, 5.0, 10 * LANES, dtype=np.float32)
    weights = np.empty_like(scores)
    total, exact = fill_weights(scores, scores[-1], weights), np.exp(scores.astype(np.float64) - float(scores[-1]))
    assert weights[scores > -60.0] == pytest.approx(exact[scores > -60.0], rel=1e-5)
    assert weights.max() == weights[-1] and weights[0] < 1e-29 and total == pytest.approx(exact.sum(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_call_decides_almost_always(dtype: torch.dtype) -> None:
    """Narrow and wide nuclei, few and many tokens, with and without a rest behind the last whole block."""
    torch.manual_seed(3)
    undecided = 0
    for position in range(300):
        logits = (torch.randn((63, 64, 1000, 4096)[position % 4]) * (0.5, 2.0, 6.0)[position % 3]).to(dtype)
        params = SamplingParams(seed=position, temperature=0.8, top_p=(0.95, 0.5, 1.0)[position % 5 % 3])
        token = draw_row(logits, params, position)
        undecided += token is None
        assert token is None or token == the_long_way(logits, params, position), position
    assert undecided < 10
    strange = torch.full((64,), -torch.inf).to(dtype)
    for unusable in (strange, logits.double(), torch.where(torch.arange(4096) == 7, torch.nan, logits), -strange):
        assert draw_row(unusable, params, 0) is None
    masked = torch.where(torch.arange(4096) % 2 == 0, logits, -torch.inf).to(dtype)  # as barred tokens leave it
    for truncation in TRUNCATIONS:
        sampling = SamplingParams(temperature=0.8, **truncation)  # type: ignore[arg-type]
        assert choose(masked, sampling, 0) == the_long_way(masked, sampling, 0)
    assert draw_row(masked, params, 0) == the_long_way(masked, params, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_token_is_that_of_the_long_way(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    for vocab in (1, 2, 5, 37, 300, 4096):
        for scale in (0.01, 1.0, 3.0, 10.0, 1e6):
            for number, truncation in enumerate(TRUNCATIONS):
                logits = (torch.randn(vocab) * scale).to(dtype)
                if vocab > 4 and number % 3 == 0:
                    logits[:2] = -torch.inf
                seed, temperature = int(rng.integers(2**62)), float(rng.choice([0.3, 0.8, 1.0, 1.5]))
                params = SamplingParams(seed=seed, temperature=temperature, **truncation)  # type: ignore[arg-type]
                for position in range(3):
                    assert choose(logits, params, position) == the_long_way(logits, params, position), (vocab, scale, truncation)


def test_truncations_are_decided_almost_always() -> None:
    torch.manual_seed(2)
    undecided = 0
    for position in range(100):
        logits = torch.randn(4096) * (0.5 + position % 4)
        for truncation in TRUNCATIONS[1:7]:
            undecided += draw_row(logits, SamplingParams(seed=1, temperature=1.0, **truncation), position) is None  # type: ignore[arg-type]
    assert undecided < 60  # of 600: min-p leaves many where all are about as likely


def test_what_is_close_is_left_to_the_long_way() -> None:
    even = torch.zeros(4)  # with top_p 0.5 the mass before the third of four equals is 0.5, more or less
    for position in range(20):
        wins = int(gumbel_noise(0, position, 4).argmax())
        found = draw_row(even, SamplingParams(temperature=1.0, top_p=0.5), position)
        assert found == wins if wins < 2 else found in (None, 0, 1)
        assert (found is None) == (wins == 2 or (wins == 3 and gumbel_noise(0, position, 3).argmax() == 2)), position
    assert draw_row(torch.tensor([0.0, torch.nan]), SamplingParams(temperature=1.0, top_p=0.5), 0) is None
    half = torch.tensor([1.0, 0.5]).log()
    assert draw_row(half, SamplingParams(temperature=1.0, min_p=0.5), 0) is None


def test_a_large_vocabulary_and_a_wide_nucleus() -> None:
    torch.manual_seed(1)
    for scale in (0.5, 2.0):
        logits = torch.randn(50_257) * scale
        for truncation in ({"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.01, "top_p": 0.99}):
            params = SamplingParams(seed=3, temperature=1.0, **truncation)  # type: ignore[arg-type]
            for position in range(4):
                assert choose(logits, params, position) == the_long_way(logits, params, position)
