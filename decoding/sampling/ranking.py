"""Argmax and top-k of rows of logits on a CPU, as compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from outrider.decoding.arrays import Float32Array, Int32Array, Int64Array, SignedArray
from outrider.decoding.budget.features import TOKEN_BITS, likelihood_bucket
from outrider.decoding.jit import NATIVE, compiled

_BLOCK = 128  # numbers per block; a block's maximum decides whether its numbers are read
# Floats are compared as integers with the same bits, whose order is equal once the magnitude bits of negative numbers are
# inverted: no conversion is needed and loops vectorise.
# By dtype: zero and the bits of -inf in the integer type of the same size, and the mask of all bits but the sign.
_KINDS: dict[torch.dtype, tuple[Any, Any, int]] = {
    torch.bfloat16: (np.int16(0), np.int16(0x7F80 - 0x8000), 0x7FFF),
    torch.float16: (np.int16(0), np.int16(0x7C00 - 0x8000), 0x7FFF),
    torch.float32: (np.int32(0), np.int32(0x7F800000 - 0x80000000), 0x7FFFFFFF),
}

pointer: Any = None  # (address, number) -> typed pointer; compiled code only
if NATIVE:
    from numba import carray, types
    from numba.extending import intrinsic

    def _as_pointer(typing: Any, address: Any, number: Any) -> Any:
        """Cast an address to a pointer to numbers of the type of ``number``, for ``carray``."""

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        made: Any = types.CPointer
        return made(number)(address, number), build

    pointer = intrinsic(_as_pointer)


@compiled
def _fill_highest(
    row: SignedArray, zero: np.signedinteger, infinity: np.signedinteger, highest: SignedArray
) -> np.signedinteger:  # fmt: skip
    """Fill ``highest`` with the largest integer of each block; return ``infinity``, or a larger integer if the row has a NaN."""
    # zero and infinity (the bits of -inf) have the type of the row, so that the loops vectorise.
    strange, whole = infinity, len(row) // _BLOCK
    for block in range(whole):
        best = row[block * _BLOCK]
        for at in range(_BLOCK):
            number = row[block * _BLOCK + at]
            if number > best:
                best = number
        highest[block] = best
    if whole < len(highest):
        highest[whole] = row[whole * _BLOCK :].max()
    for at in range(len(row)):
        number = row[at] if row[at] < zero else infinity
        if number > strange:
            strange = number
    return strange


@compiled
def _first_largest(
    row: SignedArray, zero: np.signedinteger, infinity: np.signedinteger, sign: int,
    highest: SignedArray,
) -> int:  # fmt: skip
    """Return the index that ``np.argmax`` returns: the first of equal numbers, or the first NaN. Fill ``highest``."""
    strange = _fill_highest(row, zero, infinity, highest)
    first = highest.argmax()
    # The common case: a positive maximum and no NaN, so that the order of the integers is that of the floats.
    if 0 < highest[first] <= infinity & sign and strange == infinity:
        for at in range(first * _BLOCK, len(row)):
            if row[at] == highest[first]:
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


# One compiled call beats several numpy calls, because the instruction cache is cold after a forward.
@compiled
def _fill_first_largest(
    address: int, zero: np.signedinteger, infinity: np.signedinteger, sign: int, stride: int, vocab: int, best: Int32Array,
    highest: SignedArray,
) -> None:  # fmt: skip
    """Fill [n] ``best`` and [n, blocks] ``highest`` for n rows that start ``stride`` numbers apart from ``address`` on."""
    numbers = carray(pointer(address, zero), (len(best) - 1) * stride + vocab)
    for row in range(len(best)):
        best[row] = _first_largest(numbers[row * stride : row * stride + vocab], zero, infinity, sign, highest[row])


@compiled
def _least_of(highest: SignedArray, k: int) -> int:
    """Return the k-th largest block maximum, a lower bound for the top k; -1 if fewer than k maxima are positive or zero."""
    kept, count = np.empty(k, np.int64), 0
    for block in range(len(highest)):
        number = np.int64(highest[block])
        if number < 0 or (count == k and number <= kept[k - 1]):
            continue
        place = count if count < k else k - 1
        while place > 0 and kept[place - 1] < number:
            kept[place] = kept[place - 1]
            place -= 1
        kept[place] = number
        count = min(count + 1, k)
    return int(kept[k - 1]) if count == k else -1


@compiled
def _rank(row: SignedArray, sign: int, highest: SignedArray, best: Int32Array) -> None:
    """Fill [k] ``best`` with the indices of the largest numbers of a row, in descending order and ascending for ties."""
    k, count, least = len(best), 0, _least_of(highest, len(best))
    keys = np.empty(k, np.int64)
    for block in range(len(highest)):
        if least > 0 and highest[block] < least:
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
    address: int, zero: np.signedinteger, infinity: np.signedinteger, sign: int, stride: int, vocab: int,
    rows: Int64Array, best: Int32Array, known: bool, highest: SignedArray,
) -> None:  # fmt: skip
    """Fill [n, k] ``best`` for [n] ``rows`` of a matrix whose rows start ``stride`` numbers apart from ``address`` on."""
    numbers = carray(pointer(address, zero), rows.max() * stride + vocab)
    for one in range(len(rows)):
        row = numbers[rows[one] * stride : rows[one] * stride + vocab]
        # Unknown block maxima are computed into the only row of ``highest``; known ones are [m, blocks] for all rows.
        if not known:
            _fill_highest(row, zero, infinity, highest[0])
        _rank(row, sign, highest[rows[one] if known else 0], best[one])


def blocks_of(logits: torch.Tensor) -> SignedArray | None:
    """Allocate the [n, blocks] block maxima that ``argmax_rows`` fills and ``top_rows`` reuses; None if they are not used."""
    kind = _kind(logits)
    return None if kind is None else _room(kind, *logits.shape)


def _room(kind: tuple[Any, Any, int], rows: int, vocab: int) -> SignedArray:
    return np.empty((rows, -(-vocab // _BLOCK)), type(kind[0]))


def argmax_rows(logits: torch.Tensor, highest: SignedArray | None = None) -> Int32Array:
    """Return the most likely token of each of [n, vocab] logits, of equal ones the lowest; fill ``blocks_of(logits)``."""
    best: Int32Array
    if not logits.is_cpu:
        best = torch.argmax(logits, dim=-1).to("cpu", torch.int32).numpy()
    elif (kind := _kind(logits)) is not None and logits.shape[0]:
        count, vocab = logits.shape
        best = np.empty(count, np.int32)
        room = _room(kind, count, vocab) if highest is None else highest
        _fill_first_largest(logits.data_ptr(), *kind, logits.stride()[0], vocab, best, room)
    else:  # torch's argmax is many times slower than numpy's, especially in bfloat16
        best = logits.to(torch.promote_types(logits.dtype, torch.float32)).numpy().argmax(-1).astype(np.int32)
    return best


def top_rows(logits: torch.Tensor, rows: Sequence[int], k: int, highest: SignedArray | None = None) -> Int32Array:
    """Return the k most likely tokens of rows, [n, k] int32, the likeliest first; ``highest`` as filled by ``argmax_rows``."""
    best = np.empty((len(rows), k), np.int32)
    if not best.size:
        return best
    kind = _kind(logits)
    if kind is None:
        # torch promises no order of ties; the compiled loops return them in order of id.
        best = logits[torch.tensor(rows).to(logits.device)].float().topk(k, dim=-1).indices.to("cpu").numpy().astype(np.int32)
        return best
    vocab, known = logits.shape[1], highest is not None
    assert k <= vocab and max(rows) < logits.shape[0] and min(rows) >= 0, (k, vocab, rows, logits.shape)
    room = _room(kind, 1, vocab) if highest is None else highest
    _fill_ranks(logits.data_ptr(), *kind, logits.stride()[0], vocab, np.array(rows, np.int64), best, known, room)
    return best


@compiled
def _fill_bits(
    address: int, zero: np.signedinteger, stride: int, vocab: int, rows: Int64Array, best: Int32Array, shift: int,
    bits: Int32Array,
) -> None:  # fmt: skip
    """Fill [n, k] ``bits`` with the logits at [n, k] columns of [n] rows (see ``_fill_ranks``), shifted to the left."""
    numbers = carray(pointer(address, zero), rows.max() * stride + vocab)
    for one in range(len(rows)):
        for rank in range(best.shape[1]):
            bits[one, rank] = np.int32(numbers[rows[one] * stride + best[one, rank]]) << shift


@compiled
def _add_buckets(values: Float32Array, best: Int32Array) -> None:
    """Add the bucket of its likelihood to each of [n, k] tokens, given their [n, k] logits, the largest of a row first."""
    for row in range(len(best)):
        total = 0.0
        for rank in range(best.shape[1]):
            total += np.exp(np.float64(values[row, rank]) - np.float64(values[row, 0]))
        for rank in range(best.shape[1]):
            share = np.exp(np.float64(values[row, rank]) - np.float64(values[row, 0])) / total
            best[row, rank] |= likelihood_bucket(share) << TOKEN_BITS


def ranked_rows(logits: torch.Tensor, rows: Sequence[int], k: int, highest: SignedArray | None = None) -> Int32Array:
    """Return ``top_rows`` with, above ``TOKEN_BITS``, the bucket of each token's likelihood relative to the others of its row."""
    best = top_rows(logits, rows, k, highest)
    if not best.size:
        return best
    kind = _kind(logits)
    if kind is None or logits.dtype is torch.float16:
        places = torch.tensor(rows).to(logits.device)[:, None], torch.from_numpy(best).to(logits.device, torch.long)
        values = logits[places].float().cpu().numpy()
    else:  # faster than torch for these few numbers
        bits, shift = np.empty(best.shape, np.int32), 16 if logits.dtype is torch.bfloat16 else 0
        _fill_bits(logits.data_ptr(), kind[0], logits.stride()[0], logits.shape[1], np.array(rows, np.int64), best, shift, bits)
        values = bits.view(np.float32)
    _add_buckets(values, best)
    return best


def _kind(logits: torch.Tensor) -> tuple[Any, Any, int] | None:
    """Return an entry of ``_KINDS``; None if compiled loops cannot read the logits."""
    return _KINDS.get(logits.dtype) if NATIVE and logits.is_cpu and logits.stride()[1] == 1 else None


def compile_ranking(dtype: torch.dtype) -> None:
    """Compile the functions for one dtype before the first request."""
    logits = torch.zeros(1, 2, dtype=dtype)
    highest = blocks_of(logits)
    argmax_rows(logits, highest)
    ranked_rows(logits, [0], 1, highest)
