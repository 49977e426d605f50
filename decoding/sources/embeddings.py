"""Embeddings that clients send along, as past requests keep them: signs of random projections (Charikar 2002, section 3).

Of two vectors of one length the part of the signs that differ is the angle between them over pi, within about 0.025.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from decoding.tree import Int32Array

MAX_EMBEDDING = 4096  # numbers of an embedding
_BITS, _VALUE_BITS, _WORD_BITS = 384, 24, 48
EMBEDDING = 1 + _BITS // _VALUE_BITS  # values: the embedding's length, and the signs
_LENGTHS = 4  # of which the directions are kept

Int64Array = npt.NDArray[np.int64]


@lru_cache(_LENGTHS)
def _directions(size: int) -> npt.NDArray[np.float32]:
    """[size, _BITS] the same in every process: numpy promises that this generator's numbers never change."""
    return np.random.RandomState(size).standard_normal((size, _BITS)).astype(np.float32)


def signs_of(embedding: Sequence[float]) -> Int32Array:
    """[EMBEDDING] values below 2**24 that stand for an embedding: 1 to ``MAX_EMBEDDING`` finite numbers, not all of them 0."""
    vector = np.asarray(embedding, np.float64)
    signs = (vector / np.abs(vector).max()).astype(np.float32) @ _directions(len(vector)) >= 0
    parts = np.packbits(signs).reshape(-1, 3).astype(np.int32)
    return np.concatenate([np.array([len(vector)], np.int32), parts[:, 0] << 16 | parts[:, 1] << 8 | parts[:, 2]])


def words_of(values: Int32Array) -> Int64Array:
    """[WORDS] the same, as it is compared: the length, and 48 signs a word."""
    wide = values.astype(np.int64)
    return np.concatenate([wide[:1], wide[1::2] << _VALUE_BITS | wide[2::2]])


WORDS = 1 + _BITS // _WORD_BITS


def nearness(distances: Int32Array) -> npt.NDArray[np.float64]:
    """Similarities of requests by the signs in which their embeddings differ: 1 for the same, 0 for a cosine of 1/2 and less.

    Embeddings of texts that have nothing in common point the same way by much, with some models.
    """
    similarities: npt.NDArray[np.float64] = np.maximum(0.0, 2.0 * np.cos(np.pi * distances / _BITS) - 1.0)
    return similarities
