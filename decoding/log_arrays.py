"""The arrays of a token log: made empty, and made larger."""

from __future__ import annotations

import numpy as np

from decoding.chains import BLOCK, WAYS, LogArrays


def _buckets(size: int) -> tuple[int, int, int]:
    """Buckets of 1-, 2- and 4-grams of a log of ``size`` positions."""
    return min(size, 2**17), max(64, size // 4), max(64, size // 2)


def empty_arrays(size: int) -> LogArrays:
    """The arrays of a log of ``size`` positions, a power of two."""
    one, two, four = _buckets(size)
    return LogArrays(
        tokens=np.full(size, -1, np.int32),
        back=np.zeros((3, size), np.int32),
        heads1=np.full(one, -1, np.int64),
        heads2=np.full((two, WAYS), -1, np.int64),
        heads4=np.full((four, WAYS), -1, np.int64),
        counts=np.zeros(size, np.uint8),
        owners=np.full(size // BLOCK, -1, np.int64),
    )


def enlarged(old: LogArrays, size: int) -> LogArrays:
    """The arrays of a log that grows to ``size`` positions, of which none has been taken twice yet.

    An old bucket is the union of new ones, and each of these begins with its chains: what comes is chained by the new buckets,
    what was there stays as findable as it was. So growing costs a copy of the arrays; to chain all anew would take as long as
    writing it did, while requests wait.
    """
    held = len(old.tokens)
    one, two, four = (new // old for new, old in zip(_buckets(size), _buckets(held), strict=True))
    tokens, owners = np.empty(size, np.int32), np.empty(size // BLOCK, np.int64)
    back, counts = np.zeros((3, size), np.int32), np.zeros(size, np.uint8)  # memory is taken where it is written to
    tokens[:held], owners[: len(old.owners)], back[:, :held], counts[:held] = old.tokens, old.owners, old.back, old.counts
    tokens[held:], owners[len(old.owners) :] = -1, -1
    return LogArrays(
        tokens=tokens,
        back=back,
        heads1=np.tile(old.heads1, one),
        heads2=np.tile(old.heads2, (two, 1)),
        heads4=np.tile(old.heads4, (four, 1)),
        counts=counts,
        owners=owners,
    )
