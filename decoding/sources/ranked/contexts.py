"""Rankings of the target by context, found again by the signs of the last hidden state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider.decoding.arrays import Int32Array, Int64Array, SignedArray
from outrider.decoding.jit import compiled
from outrider.decoding.sources.similar import popcount

# After the same token, the nearer the last hidden states of the rows before, the likelier the target ranks the same tokens. The
# signs of its first numbers carry nearly as much information as the whole state (``experiments/LOG.md``).
SIGNS = 256  # signs per hidden state
WORDS = SIGNS // 64
NO_SIGNS = np.zeros(WORDS, np.int64)  # unknown signs
_PLACES = 1 << 15  # rows to keep
_LOOKED_AT = 16  # latest rows of a token to compare


class Contexts(NamedTuple):
    """Ring of the latest ``_PLACES`` rows that the target computed; a row's place is given by the lower bits of its number."""

    latest: Int64Array  # [vocab] number of the latest row of each token, 0 for none
    numbers: Int64Array  # [1] number of the next row, from 1 on
    previous: Int64Array  # [places] number of the previous row of the same token
    before: Int32Array  # [places, 2] the two tokens before, the nearest first; -1 if there was none
    above: Int64Array  # [places, WORDS] signs of the parent row
    signs: Int64Array  # [places, WORDS] signs of the row
    ranked: Int32Array  # [places, k] ranked next tokens, as ``TargetRows.ranked``

    @classmethod
    def empty(cls, vocab_size: int, width: int, places: int = _PLACES) -> Contexts:
        """Return a table without rows; memory is committed as rows arrive."""
        return cls(
            np.zeros(vocab_size, np.int64), np.ones(1, np.int64), np.zeros(places, np.int64), np.zeros((places, 2), np.int32),
            np.zeros((places, WORDS), np.int64), np.zeros((places, WORDS), np.int64), np.zeros((places, width), np.int32),
        )  # fmt: skip


@compiled
def signs_of(hidden: SignedArray, first: int, count: int) -> Int64Array:
    """Return the signs of [rows, size] hidden states, given as the bits of their numbers: [count, WORDS], 0 beyond their size."""
    signs = np.zeros((count, WORDS), np.int64)
    for row in range(count):
        for at in range(min(SIGNS, hidden.shape[1])):
            signs[row, at // 64] |= np.int64(hidden[first + row, at] < 0) << np.int64(at % 64)
    return signs


NO_CONTEXTS = Contexts.empty(0, 1, 0)
PlainContexts = tuple[Int64Array, Int64Array, Int64Array, Int32Array, Int64Array, Int64Array, Int32Array]


@compiled
def most_alike(contexts: Contexts, token: int, one: int, two: int, above: Int64Array) -> tuple[int, int, int]:
    """Return the stored row of a token whose context is the nearest to a given one.

    Args:
        one, two: the tokens before the row, the nearest first, -1 if there is none.
        above: [WORDS] signs of the row before, all 0 if unknown.

    Returns:
        Place of the row, -1 for none; number of differing signs, -1 if unknown; number of equal last tokens, 1 to 3. Of rows with
        equal distance, the one with more equal tokens is chosen, then the latest.
    """
    best, least, agreed, nearest = -1, 1 << 30, 0, -1
    if token >= len(contexts.latest):
        return best, nearest, agreed
    places = len(contexts.previous)
    number, oldest = contexts.latest[token], contexts.numbers[0] - places
    known = False
    for word in range(WORDS):
        known = known or above[word] != 0
    for _ in range(_LOOKED_AT):
        if number <= 0 or number < oldest:
            break
        place = number & (places - 1)
        distance = 0
        if known:
            for word in range(WORDS):
                distance += popcount(contexts.above[place, word] ^ above[word])
        agrees = 1
        if one >= 0 and contexts.before[place, 0] == one:
            agrees = 3 if two >= 0 and contexts.before[place, 1] == two else 2
        # The number of equal tokens, below 4, only decides between equal distances; the strict comparison prefers the latest row.
        cost = 4 * distance - agrees
        if cost < least:
            best, least, agreed, nearest = place, cost, agrees, distance if known else -1
        number = contexts.previous[place]
    return best, nearest, agreed


@compiled
def keep_row(
    contexts: Contexts, tokens: Int32Array, parents: Int32Array, before: Int32Array, above: Int64Array, row: int,
    signs: Int64Array, ranked: Int32Array,
) -> None:  # fmt: skip
    """Store a row of a tree; see ``keep_tree``."""
    token, parent, number = tokens[row], parents[row], contexts.numbers[0]
    place = number & (len(contexts.previous) - 1)
    contexts.numbers[0] += 1
    contexts.previous[place], contexts.latest[token] = contexts.latest[token], number
    contexts.before[place, 0] = tokens[parent] if parent >= 0 else before[0]
    if parent < 0:
        contexts.before[place, 1] = before[1]
    else:
        contexts.before[place, 1] = tokens[parents[parent]] if parents[parent] >= 0 else before[0]
    for word in range(WORDS):
        contexts.above[place, word] = signs[parent, word] if parent >= 0 else above[word]
        contexts.signs[place, word] = signs[row, word]
    for rank in range(ranked.shape[1]):
        contexts.ranked[place, rank] = ranked[row, rank]


@compiled
def keep_tree(
    plain: PlainContexts, tokens: Int32Array, parents: Int32Array, before: Int32Array, above: Int64Array, accepted: Int32Array,
    signs: Int64Array, ranked: Int32Array,
) -> None:  # fmt: skip
    """Store all rows of a tree; searches prefer accepted rows, then those of the lowest numbers.

    Args:
        before: [2] the tokens before the root, the last one first, -1 if there is none.
        above: [WORDS] signs of the row before the root, ``NO_SIGNS`` if unknown.
        accepted: [m] the root and the accepted rows.
        signs: [n, WORDS].
        ranked: [n, k].
    """
    contexts = Contexts(*plain)
    # Searches begin at the latest row, so that the preferred rows are written last.
    for row in range(len(tokens) - 1, -1, -1):
        was_accepted = False
        for at in range(len(accepted)):
            was_accepted = was_accepted or accepted[at] == row
        if not was_accepted:
            keep_row(contexts, tokens, parents, before, above, row, signs, ranked)
    for at in range(len(accepted)):
        keep_row(contexts, tokens, parents, before, above, accepted[at], signs, ranked)
