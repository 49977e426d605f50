"""Client-supplied embeddings, stored as signs of random projections (Charikar 2002, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from outrider.decoding.arrays import Float32Array, Float64Array, Int32Array, Int64Array

MAX_EMBEDDING = 4096  # maximum length of an embedding
_BITS, _VALUE_BITS, _WORD_BITS = 384, 24, 48
EMBEDDING = 1 + _BITS // _VALUE_BITS  # encoded values: the length of the embedding, then its signs
_LENGTHS = 4  # embedding lengths with cached directions


@lru_cache(_LENGTHS)
def _directions(size: int) -> Float32Array:
    # Equal in every process: numpy guarantees that this generator's stream never changes.
    return np.random.RandomState(size).standard_normal((size, _BITS)).astype(np.float32)


def signs_of(embedding: Sequence[float]) -> Int32Array:
    """Encode an embedding of 1 to ``MAX_EMBEDDING`` finite numbers, not all 0, as [EMBEDDING] values below 2**24."""
    vector = np.asarray(embedding, np.float64)
    signs = (vector / np.abs(vector).max()).astype(np.float32) @ _directions(len(vector)) >= 0
    parts = np.packbits(signs).reshape(-1, 3).astype(np.int32)
    return np.concatenate([np.array([len(vector)], np.int32), parts[:, 0] << 16 | parts[:, 1] << 8 | parts[:, 2]])


def words_of(values: Int32Array) -> Int64Array:
    """Repack the values of ``signs_of`` for comparison, [WORDS]: the length, then 48 signs per word."""
    wide = values.astype(np.int64)
    return np.concatenate([wide[:1], wide[1::2] << _VALUE_BITS | wide[2::2]])


WORDS = 1 + _BITS // _WORD_BITS


def nearness(distances: Int32Array) -> Float64Array:
    """Convert numbers of differing signs to similarities: 1 for equal signs, 0 for a cosine of at most 1/2."""
    # The fraction of differing signs estimates the angle between two vectors of equal length over pi, within about 0.025.
    # Some models give unrelated texts a high cosine, so 1/2 maps to 0.
    similarities: Float64Array = np.maximum(0.0, 2.0 * np.cos(np.pi * distances / _BITS) - 1.0)
    return similarities
