"""Features of a drafted row, in buckets: kind of source, length of agreement, share of occurrences, rank by the target."""

from __future__ import annotations

from outrider.decoding.jit import compiled

# Kinds of features. The first six are occurrences in the request's own texts, in those of similar requests or in the shared
# logs: of the whole path up to the root and beyond, or (_FRESH) of an end of the path only.
NUM_KINDS = 8
COPY, SIMILAR, HISTORY, COPY_FRESH, SIMILAR_FRESH, HISTORY_FRESH, UNIGRAM, RECYCLING = range(NUM_KINDS)
MATCH_BUCKETS, SHARE_BUCKETS, LEVELS = 12, 8, 4
KIND_FEATURES = MATCH_BUCKETS * SHARE_BUCKETS * LEVELS  # features per kind, contiguous
NUM_FEATURES = NUM_KINDS * KIND_FEATURES

# Levels of an occurrence: its rank by the target in a similar context, see ``decoding.sources.ranked.contexts``. The level of a
# ranked token is the number of common context tokens, up to 3; ``ALONE`` if the context is unknown.
UNKNOWN, UNRANKED, RANKED, LIKELY = range(LEVELS)
ALONE = 0

# A ranked token is stored with the bucket of its likelihood in the bits above the token id.
TOKEN_BITS = 24
TOKEN_MASK = (1 << TOKEN_BITS) - 1
EVEN = 4  # last likelihood bucket with a share of at least 0.5


@compiled
def match_bucket(length: int) -> int:
    """Return the bucket of a length of agreement, in twelve steps: 1 .. 6, 8, 12, 16, 24, 48 and more."""
    if length <= 6:
        return max(0, length - 1)
    if length <= 8:
        return 6
    if length <= 12:
        return 7
    if length <= 16:
        return 8
    if length <= 24:
        return 9
    return 10 if length <= 48 else 11


@compiled
def share_bucket(share: float) -> int:
    """Return the bucket of a child's share of its node's occurrence weight, in eight steps; the last one is all of it."""
    if share >= 0.75:
        return 7 if share >= 0.999 else (6 if share >= 0.9 else 5)
    if share >= 0.25:
        return 4 if share >= 0.5 else 3
    return 2 if share >= 0.1 else (1 if share >= 0.03 else 0)


@compiled
def context_bucket(length: int) -> int:
    """Return the bucket of a node's longest agreement, in eight steps, for children without an occurrence; 0 for none."""
    if length <= 5:
        return max(0, length)
    return 6 if length <= 8 else 7


@compiled
def likelihood_bucket(share: float) -> int:
    """Return the bucket (``MATCH_BUCKETS`` steps, 0 is nearly all) of a token's share of the likelihood of the ranked tokens."""
    if share >= 0.5:
        return 0 if share >= 0.97 else (1 if share >= 0.9 else (2 if share >= 0.8 else (3 if share >= 0.65 else EVEN)))
    if share >= 0.1:
        return 5 if share >= 0.35 else (6 if share >= 0.2 else 7)
    return 8 if share >= 0.05 else (9 if share >= 0.02 else (10 if share >= 0.007 else 11))


@compiled
def feature(kind: int, match: int, share: int, level: int) -> int:
    """Return the index of a feature in the acceptance table."""
    return ((kind * MATCH_BUCKETS + match) * SHARE_BUCKETS + share) * LEVELS + level


@compiled
def distance_bucket(distance: int) -> int:
    """Return the bucket of the number of differing signs of two contexts; the last of eight buckets is unknown (-1)."""
    if distance < 0:
        return SHARE_BUCKETS - 1
    if distance <= 32:
        return 0 if distance <= 8 else (1 if distance <= 20 else 2)
    return 3 if distance <= 44 else (4 if distance <= 58 else (5 if distance <= 76 else 6))
