"""The k largest of each row of logits, on a CPU, in one pass over the row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from decoding.jit import NATIVE, compiled
from decoding.tree import Int32Array

_BLOCK = 128  # numbers whose largest is found before any is looked at alone
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@compiled
def _fill_highest(row: npt.NDArray[np.signedinteger], highest: npt.NDArray[np.signedinteger]) -> None:
    """Fills ``highest`` with the largest number of each whole block: a loop of the kind that compilers spread over lanes."""
    for block in range(len(highest)):
        best = row[block * _BLOCK]
        for at in range(_BLOCK):
            number = row[block * _BLOCK + at]
            if number > best:
                best = number
        highest[block] = best


@compiled
def _rank(bits: npt.NDArray[np.signedinteger], sign: int, rows: npt.NDArray[np.int64], best: Int32Array) -> None:
    """Fills [n, k] ``best`` with the places of the largest numbers of each of [n] ``rows``, the largest and of equals the first one
    first.

    ``bits`` [m, vocab] are floating-point numbers as integers of the same size, ``sign`` is the mask of all their bits but the
    sign. Such integers are ordered like the numbers once all bits of the negative ones but the sign are turned round.
    """
    k, vocab = best.shape[1], bits.shape[1]
    keys, highest = np.empty(k, np.int64), np.empty(vocab // _BLOCK, bits.dtype)
    for one in range(len(rows)):
        row, count = bits[rows[one]], 0
        _fill_highest(row, highest)
        for block in range(len(highest) + 1):  # the last one is what is left
            if count == k and block < len(highest) and 0 <= highest[block] <= keys[k - 1]:
                continue
            for at in range(block * _BLOCK, min((block + 1) * _BLOCK, vocab)):
                key = np.int64(row[at])
                if key < 0:
                    key = (key ^ sign) + 1  # of -0.0: 0
                if count == k and key <= keys[k - 1]:
                    continue
                place = count if count < k else k - 1
                while place > 0 and keys[place - 1] < key:
                    keys[place], best[one, place] = keys[place - 1], best[one, place - 1]
                    place -= 1
                keys[place], best[one, place] = key, at
                count = min(count + 1, k)


def top_rows(logits: torch.Tensor, rows: Sequence[int], k: int) -> Int32Array:
    """The k most likely tokens of some rows.

    Args:
        logits: [m, vocab] floating point, on any device.
        rows: [n] of them.
        k: at most ``vocab``.

    Returns:
        [n, k] int32, the most likely first. On a CPU, where numba is installed and the logits are no wider than float32, of equal
        ones the lower id comes first; elsewhere torch does it, which promises no order of equals.
    """
    best = np.empty((len(rows), k), np.int32)
    kind = _BITS.get(logits.dtype)
    if not len(rows) or not k:
        return best
    if not NATIVE or kind is None or logits.device.type != "cpu" or logits.stride(-1) != 1:
        best = logits[list(rows)].float().topk(k, dim=-1).indices.to("cpu").numpy().astype(np.int32)
        return best
    bits = logits.contiguous().view(kind).numpy()
    _rank(bits, int(np.iinfo(bits.dtype).max), np.array(rows, np.int64), best)
    return best


def compile_ranking(dtype: torch.dtype) -> None:
    """Calls what ranks numbers of a type once, so that no request waits for the compiler."""
    top_rows(torch.zeros(1, 2, dtype=dtype), [0], 1)
