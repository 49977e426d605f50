"""The largest numbers of rows against numpy, strange numbers included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.decoding.budget.features import TOKEN_BITS, TOKEN_MASK, likelihood_bucket
from outrider.decoding.sampling.ranking import argmax_rows, ranked_rows, top_rows

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SIZES = [1, 2, 127, 128, 129, 700]  # around whole blocks


def rows_of(kind: str, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """[5, vocab]"""
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randn(5, vocab, generator=generator) * 3
    places = torch.randint(vocab, (5,), generator=generator)
    if kind == "negative":
        rows = -rows.abs()
    elif kind == "zeros":
        rows = torch.where(rows > 0, 0.0, -0.0)
    elif kind == "equal":
        rows = rows.round()
    elif kind == "infinite":
        rows[0], rows[1, places[1]], rows[2, places[2]] = -torch.inf, torch.inf, -torch.inf
    elif kind == "not a number":
        rows[1, places[1]], rows[2, places[2]], rows[2, places[3]] = torch.nan, torch.nan, -torch.nan
    rows = rows.to(dtype)
    if kind == "not a number" and dtype == torch.bfloat16:
        rows.view(torch.int16)[4, places[4]] = -64  # what x86 makes of 0 / 0
    return rows


def as_numpy(logits: torch.Tensor) -> np.ndarray:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["mixed", "negative", "zeros", "equal", "infinite", "not a number"])
def test_argmax_is_numpys(kind: str, dtype: torch.dtype) -> None:
    for vocab in SIZES:
        logits = rows_of(kind, vocab, dtype)
        expected = as_numpy(logits).argmax(-1)
        assert argmax_rows(logits).tolist() == expected.tolist(), vocab
        assert argmax_rows(logits[1:4]).tolist() == expected[1:4].tolist()
        part = torch.cat((logits, logits), dim=1)[:, :vocab]  # rows with gaps between them
        assert argmax_rows(part).tolist() == expected.tolist()
        across = logits.T.contiguous().T  # the numbers of a row are not neighbours
        assert argmax_rows(across).tolist() == expected.tolist()
    assert argmax_rows(torch.zeros(0, 4, dtype=dtype)).tolist() == []


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("kind", ["mixed", "negative", "zeros", "equal", "infinite"])
def test_the_largest_come_first_and_of_equals_the_first(kind: str, dtype: torch.dtype) -> None:
    for vocab in SIZES:
        logits = rows_of(kind, vocab, dtype)
        order = np.argsort(-(as_numpy(logits) + 0.0), axis=-1, kind="stable")
        for k in {1, min(8, vocab), min(40, vocab)}:
            rows = [4, 0, 2, 2]
            assert top_rows(logits, rows, k).tolist() == order[rows, :k].tolist(), (vocab, k)
    assert top_rows(logits, [], 3).shape == (0, 3)


def test_what_compiled_loops_cannot_look_at_is_ranked_too() -> None:
    logits = rows_of("mixed", 300, torch.float64)
    assert top_rows(logits, [3, 1], 5).tolist() == np.argsort(-as_numpy(logits))[[3, 1], :5].tolist()
    across = rows_of("mixed", 300, torch.float32).T.contiguous().T
    assert top_rows(across, [3, 1], 5).tolist() == np.argsort(-as_numpy(across))[[3, 1], :5].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranked_tokens_tell_how_likely_they_are(dtype: torch.dtype) -> None:
    logits = rows_of("mixed", 300, dtype)
    rows, order = [3, 0, 3], np.argsort(-as_numpy(logits), axis=-1, kind="stable")
    ranked = ranked_rows(logits, rows, 5)
    best = order[rows, :5]
    assert (ranked & TOKEN_MASK).tolist() == best.tolist()
    weights = np.exp(np.take_along_axis(as_numpy(logits).astype(np.float64)[rows], best, 1))
    shares = weights / weights.sum(axis=1, keepdims=True)
    assert (ranked >> TOKEN_BITS).tolist() == [[likelihood_bucket(share) for share in row] for row in shares.tolist()]
    assert ranked_rows(logits, [], 3).shape == (0, 3)
