"""Features of a drafted row, in buckets: kind of source, length of agreement, share of occurrences, what the target ranked."""

from __future__ import annotations

from decoding.jit import compiled

# Kinds of features. The first six are occurrences: in the request's own texts, in those of requests that resemble it or in the
# shared logs, of the whole path up to the root and beyond, or of an end of the path only.
NUM_KINDS = 9
COPY, SIMILAR, HISTORY, COPY_FRESH, SIMILAR_FRESH, HISTORY_FRESH, UNIGRAM, RECYCLING, BIGRAM = range(NUM_KINDS)
MATCH_BUCKETS, SHARE_BUCKETS, LEVELS = 12, 8, 4
KIND_FEATURES = MATCH_BUCKETS * SHARE_BUCKETS * LEVELS  # those of one kind lie side by side
NUM_FEATURES = NUM_KINDS * KIND_FEATURES

# Levels of an occurrence: what the target ranked in a context that is alike, see ``decoding.sources.ranked.contexts``. The level
# of a ranked token is the number of tokens that the contexts have in common, up to 3; ``ALONE`` where the context is not known.
UNKNOWN, UNRANKED, RANKED, LIKELY = range(LEVELS)
ALONE = 0

# A ranked token stands with the bucket of its likelihood in the bits above it.
TOKEN_BITS = 24
TOKEN_MASK = (1 << TOKEN_BITS) - 1
EVEN = 4  # the last bucket of what is more likely than not


@compiled
def match_bucket(length: int) -> int:
    """Lengths of agreement in twelve steps: 1 .. 6, 8, 12, 16, 24, 48 and more."""
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
    """A child's share of the weight of its node's occurrences in eight steps; the last one is all of it."""
    if share >= 0.75:
        return 7 if share >= 0.999 else (6 if share >= 0.9 else 5)
    if share >= 0.25:
        return 4 if share >= 0.5 else 3
    return 2 if share >= 0.1 else (1 if share >= 0.03 else 0)


@compiled
def context_bucket(length: int) -> int:
    """The longest agreement at a node in eight steps, for children that no occurrence backs; 0 for none."""
    if length <= 5:
        return max(0, length)
    return 6 if length <= 8 else 7


@compiled
def likelihood_bucket(share: float) -> int:
    """A token's share of the likelihood of those that are ranked with it in ``MATCH_BUCKETS`` steps, the first one nearly all."""
    if share >= 0.5:
        return 0 if share >= 0.97 else (1 if share >= 0.9 else (2 if share >= 0.8 else (3 if share >= 0.65 else EVEN)))
    if share >= 0.1:
        return 5 if share >= 0.35 else (6 if share >= 0.2 else 7)
    return 8 if share >= 0.05 else (9 if share >= 0.02 else (10 if share >= 0.007 else 11))


@compiled
def feature(kind: int, match: int, share: int, level: int) -> int:
    """The entry of the table for a kind of feature, two buckets and a level."""
    return ((kind * MATCH_BUCKETS + match) * SHARE_BUCKETS + share) * LEVELS + level


@compiled
def distance_bucket(distance: int) -> int:
    """In how many signs contexts differ (``decoding.sources.ranked.contexts``) in eight steps; the last one is not known, -1."""
    if distance < 0:
        return SHARE_BUCKETS - 1
    if distance <= 32:
        return 0 if distance <= 8 else (1 if distance <= 20 else 2)
    return 3 if distance <= 44 else (4 if distance <= 58 else (5 if distance <= 76 else 6))
