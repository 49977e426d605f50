"""The largest of each row of logits, and the k largest, on a CPU: compiled loops over the numbers where they lie.

Floating-point numbers are compared as integers of the same bits, which are ordered like them once all bits of the negative ones
but the sign are turned round. So there is no conversion of half-precision types, and many numbers are compared at once. Between
two forwards the processor has forgotten the code of everything else, so one compiled call costs less than a few of numpy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from decoding.jit import NATIVE, compiled
from decoding.tree import Int32Array

_BLOCK = 128  # numbers whose largest is found before any is looked at alone
# By type of the logits: in the integer type of the same size, zero and the bits of negative infinity; all bits but the sign.
_KINDS: dict[torch.dtype, tuple[Any, Any, int]] = {
    torch.bfloat16: (np.int16(0), np.int16(0x7F80 - 0x8000), 0x7FFF),
    torch.float16: (np.int16(0), np.int16(0x7C00 - 0x8000), 0x7FFF),
    torch.float32: (np.int32(0), np.int32(0x7F800000 - 0x80000000), 0x7FFFFFFF),
}

pointer: Any = None  # address and a number: in compiled code, a pointer to numbers of that type
if NATIVE:
    from numba import carray, types
    from numba.extending import intrinsic

    def _as_pointer(typing: Any, address: Any, number: Any) -> Any:
        """An address as a pointer to numbers of the type of ``number``, for ``carray``."""

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        made: Any = types.CPointer
        return made(number)(address, number), build

    pointer = intrinsic(_as_pointer)


@compiled
def _fill_highest(row: npt.NDArray[np.signedinteger], highest: npt.NDArray[np.signedinteger]) -> None:
    """Fills ``highest`` with the largest integer of each whole block: a loop of the kind that compilers spread over lanes."""
    for block in range(len(highest)):
        best = row[block * _BLOCK]
        for at in range(_BLOCK):
            number = row[block * _BLOCK + at]
            if number > best:
                best = number
        highest[block] = best


@compiled
def _first_largest(
    row: npt.NDArray[np.signedinteger], zero: np.signedinteger, infinity: np.signedinteger, sign: int,
    highest: npt.NDArray[np.signedinteger],
) -> int:  # fmt: skip
    """As numpy's argmax of the numbers: the first of equals, and before all others what is not a number.

    ``zero`` and ``infinity``, the bits of the negative one, are of the type of ``row``: a loop over one type is spread over
    lanes.
    """
    strange = infinity  # bits of negative non-numbers are above it, and below zero
    for at in range(len(row)):
        number = row[at] if row[at] < zero else infinity
        if number > strange:
            strange = number
    _fill_highest(row, highest)
    best, first = row[len(highest) * _BLOCK :].max() if len(row) % _BLOCK else zero, len(highest)
    for block in range(len(highest) - 1, -1, -1):
        if highest[block] >= best:
            best, first = highest[block], block
    if 0 < best <= infinity & sign and strange == infinity:
        for at in range(first * _BLOCK, len(row)):
            if row[at] == best:
                return at
    found, largest = 0, np.int64(-sign - 1)
    for at in range(len(row)):
        bits = np.int64(row[at])
        if bits & sign > infinity & sign:
            return at
        key = bits if bits >= 0 else -(bits & sign)  # of -0.0: 0
        if key > largest:
            found, largest = at, key
    return found


@compiled
def _fill_first_largest(
    address: int, zero: np.signedinteger, infinity: np.signedinteger, sign: int, stride: int, vocab: int, best: Int32Array
) -> None:
    """Fills [n] ``best`` for n rows, which lie ``stride`` numbers apart from ``address`` on."""
    numbers = carray(pointer(address, zero), (len(best) - 1) * stride + vocab)
    highest = np.empty(vocab // _BLOCK, numbers.dtype)
    for row in range(len(best)):
        best[row] = _first_largest(numbers[row * stride : row * stride + vocab], zero, infinity, sign, highest)


@compiled
def _rank(row: npt.NDArray[np.signedinteger], sign: int, highest: npt.NDArray[np.signedinteger], best: Int32Array) -> None:
    """Fills [k] ``best`` with the places of the largest numbers of a row, the largest and of equals the first one first."""
    k, count = len(best), 0
    keys = np.empty(k, np.int64)
    _fill_highest(row, highest)
    for block in range(len(highest) + 1):  # the last one is what is left
        if count == k and block < len(highest) and 0 <= highest[block] <= keys[k - 1]:
            continue
        for at in range(block * _BLOCK, min((block + 1) * _BLOCK, len(row))):
            key = np.int64(row[at])
            if key < 0:
                key = -(key & sign)  # of -0.0: 0
            if count == k and key <= keys[k - 1]:
                continue
            place = count if count < k else k - 1
            while place > 0 and keys[place - 1] < key:
                keys[place], best[place] = keys[place - 1], best[place - 1]
                place -= 1
            keys[place], best[place] = key, at
            count = min(count + 1, k)


@compiled
def _fill_ranks(
    address: int, zero: np.signedinteger, sign: int, stride: int, vocab: int, rows: npt.NDArray[np.int64], best: Int32Array
) -> None:
    """Fills [n, k] ``best`` for [n] ``rows`` of those that lie ``stride`` numbers apart from ``address`` on."""
    numbers = carray(pointer(address, zero), rows.max() * stride + vocab)
    highest: Any = np.empty(vocab // _BLOCK, numbers.dtype)
    for one in range(len(rows)):
        start = rows[one] * stride
        _rank(numbers[start : start + vocab], sign, highest, best[one])


def argmax_rows(logits: torch.Tensor) -> Int32Array:
    """The most likely token of each row, the lowest id among equals.

    Args:
        logits: [n, vocab] floating point, on any device.

    Returns:
        [n] int32.
    """
    best: Int32Array
    if not logits.is_cpu:
        best = torch.argmax(logits, dim=-1).to("cpu", torch.int32).numpy()
    elif (kind := _kind(logits)) is not None and logits.shape[0]:
        count, vocab = logits.shape
        best = np.empty(count, np.int32)
        _fill_first_largest(logits.data_ptr(), *kind, logits.stride()[0], vocab, best)
    else:  # torch's own argmax is many times slower than numpy's, above all in bfloat16
        best = logits.to(torch.promote_types(logits.dtype, torch.float32)).numpy().argmax(-1).astype(np.int32)
    return best


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
    if not best.size:
        return best
    kind = _kind(logits)
    if kind is None:
        best = logits[list(rows)].float().topk(k, dim=-1).indices.to("cpu").numpy().astype(np.int32)
        return best
    vocab, (zero, _, sign) = logits.shape[1], kind
    assert k <= vocab and max(rows) < logits.shape[0] and min(rows) >= 0, (k, vocab, rows, logits.shape)
    _fill_ranks(logits.data_ptr(), zero, sign, logits.stride()[0], vocab, np.array(rows, np.int64), best)
    return best


def _kind(logits: torch.Tensor) -> tuple[Any, Any, int] | None:
    """An entry of ``_KINDS``; None where compiled loops cannot look at the numbers."""
    return _KINDS.get(logits.dtype) if NATIVE and logits.is_cpu and logits.stride()[1] == 1 else None


def compile_ranking(dtype: torch.dtype) -> None:
    """Calls what looks at numbers of a type once, so that no request waits for the compiler."""
    logits = torch.zeros(1, 2, dtype=dtype)
    argmax_rows(logits)
    top_rows(logits, [0], 1)
