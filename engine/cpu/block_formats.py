"""Block-quantized weights of 4 to 8 bits as in GGUF files: their values, and their memory layout for compiled code.

A weight is ``scale * (code - offset)``, or ``scale * code + minimum``, with a scale, and a minimum, for each group of adjacent
numbers of a row. Its value is rounded to the model's dtype, as dequantization defines it (github.com/ggml-org/llama.cpp,
gguf-py/gguf/quants.py): a product of packed weights has the bits of the product of the same weights unpacked, on every processor
and for any number of rows.

Memory holds panels of ``PANEL`` outputs, as in ``PanelWeight``, and in each panel the blocks of its numbers in order:

    scales       PANEL float16, then as many minima if the format has them
    for each group: if scales are bytes, PANEL of them, then those of the minima; then for each 16 numbers of a row (a set)
        codes        in vectors of 16 numbers, in the order in which unpacked panels have them, 32 vectors in a set. Words of 32
                     bits hold the low 4 bits of vectors w, w + 4, w + 8, ..., four words a lane, and then two (one) whose two
                     bits (bit) above those are of vectors w, w + 2, ... (of each vector); codes of 8 bits take eight words
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PANEL = 32  # adjacent outputs: two vectors of ``engine.cpu.simd``
SET = 16  # numbers of a row whose codes share words
_LANES, _VECTORS = 16, 32  # of a set

Codes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Quantized rows: codes [rows, size], with scales and minima per group or block."""

    codes: Codes
    scales: npt.NDArray[np.float16]  # [rows, size / block]
    minima: npt.NDArray[np.float16] | None = None  # shaped like the scales
    scale_bytes: Codes | None = None  # [rows, size / group]: factor of the block's scale for the group
    minimum_bytes: Codes | None = None  # like ``scale_bytes``


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Parameters of a quantization format."""

    number: int  # identifies the format in compiled code
    bits: int  # per code
    offset: int = 0  # subtracted from codes
    minimum: bool = False
    block: int = 32  # numbers per block
    group: int = 32
    byte_scales: bool = False  # a group's scale is its block's times a byte; minima are subtracted
    signed: bool = False  # whether such bytes are signed

    @property
    def high_bits(self) -> int:
        """Return the bits of a code above the low four."""
        return self.bits - 4 if self.bits in (5, 6) else 0

    @property
    def set_bytes(self) -> int:
        """Return the bytes of a set's codes in a panel."""
        return SET * PANEL * self.bits // 8

    @property
    def group_bytes(self) -> int:
        """Return the bytes of a group in a panel."""
        return PANEL * (1 + self.minimum) * self.byte_scales + self.group // SET * self.set_bytes

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block in a panel."""
        return 2 * PANEL * (1 + self.minimum) + self.block // self.group * self.group_bytes


FORMATS = {
    "Q4_0": BlockFormat(1, 4, offset=8),
    "Q4_1": BlockFormat(2, 4, minimum=True),
    "Q5_0": BlockFormat(3, 5, offset=16),
    "Q5_1": BlockFormat(4, 5, minimum=True),
    "Q8_0": BlockFormat(5, 8, offset=128),
    "Q4_K": BlockFormat(6, 4, minimum=True, block=256, byte_scales=True),
    "Q5_K": BlockFormat(7, 5, minimum=True, block=256, byte_scales=True),
    "Q6_K": BlockFormat(8, 6, offset=32, block=256, group=16, byte_scales=True, signed=True),
}


def packed(blocks: Blocks, form: BlockFormat, pair: int) -> Codes:
    """Pack rows into [panels, size / block, ``form.block_bytes``]; ``pair``: adjacent numbers of an output in unpacked panels."""
    rows, size = blocks.codes.shape
    count, made = size // form.block, []

    def halves(numbers: Numbers) -> Codes:
        return _by_panel(numbers).view(np.uint8)

    made.append(halves(blocks.scales))
    if blocks.minima is not None:
        made.append(halves(blocks.minima))
    panels = made[0].shape[0]
    groups = form.block // form.group
    per_group = []
    for numbers in (blocks.scale_bytes, blocks.minimum_bytes):
        if numbers is not None:
            per_group.append(_by_panel(numbers).reshape(panels, count, groups, PANEL))
    codes = _words(_vectors(blocks.codes, pair), form)  # [panels, sets, bytes]
    per_group.append(codes.reshape(panels, count, groups, -1))
    made.append(np.concatenate(per_group, axis=-1).reshape(panels, count, -1))
    found = np.concatenate(made, axis=-1)
    assert found.shape == (panels, count, form.block_bytes), (found.shape, form, rows)
    return found


def _filled(numbers: Numbers) -> Numbers:
    missing = -len(numbers) % PANEL
    filled = np.concatenate((numbers, np.zeros((missing, *numbers.shape[1:]), numbers.dtype))) if missing else numbers
    return filled.reshape(-1, PANEL, numbers.shape[1])


def _by_panel(numbers: Numbers) -> Numbers:
    return np.ascontiguousarray(_filled(numbers).swapaxes(1, 2))


def _vectors(codes: Codes, pair: int) -> Codes:
    """Reshape [rows, size] to [panels, sets, vectors, lanes], in the order of unpacked panels: [size / pair, PANEL, pair]."""
    panels = _filled(codes).view(np.dtype(f"u{pair}"))  # adjacent codes move as one
    return np.ascontiguousarray(panels.swapaxes(1, 2)).view(np.uint8).reshape(len(panels), -1, _VECTORS, _LANES)


def _words(vectors: Codes, form: BlockFormat) -> Codes:
    if not form.high_bits:
        return _word(vectors, form.bits)
    return np.concatenate((_word(vectors & np.uint8(15), 4), _word(vectors >> np.uint8(4), form.high_bits)), axis=-1)


def _word(numbers: Codes, bits: int) -> Codes:
    """Pack vectors of ``bits``-bit numbers into 32-bit words: vector ``t * bits + w`` at bit ``t * bits`` of word ``w``."""
    panels, sets = numbers.shape[:2]
    several = numbers.reshape(panels, sets, 4, 8 // bits, bits * _LANES)  # the numbers of each byte of a word
    octets = several[:, :, :, 0].copy()
    for turn in range(1, 8 // bits):
        octets |= several[:, :, :, turn] << np.uint8(turn * bits)
    return np.ascontiguousarray(octets.swapaxes(2, 3)).reshape(panels, sets, -1)


def taken_apart(raw: Codes, name: str) -> Blocks:
    """Decode a matrix of a GGUF file, [rows, bytes of a row]."""
    form = FORMATS[name]
    rows = len(raw)
    of_block = _FILE_BYTES[name]
    blocks = raw.reshape(rows, -1, of_block)
    count = blocks.shape[1]

    def half(at: int) -> npt.NDArray[np.float16]:
        return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[..., 0]

    def nibbles(at: int, run: int) -> Codes:
        """Return the low halves of ``run`` bytes, then their high halves, and so on, for half a block's bytes."""
        own = blocks[:, :, at : at + form.block // 2].reshape(rows, count, -1, 1, run)
        return np.concatenate((own & np.uint8(15), own >> np.uint8(4)), axis=3).reshape(rows, count, form.block)

    def codes(numbers: Codes) -> Codes:
        return numbers.reshape(rows, count * form.block)

    if name == "Q8_0":
        return Blocks(codes(blocks[:, :, 2:] ^ np.uint8(128)), half(0))  # signed bytes
    if name in ("Q4_0", "Q5_0", "Q4_1", "Q5_1"):
        at, minima = (4, half(2)) if form.minimum else (2, None)
        if form.bits == 4:
            return Blocks(codes(nibbles(at, 16)), half(0), minima)
        high = np.unpackbits(blocks[:, :, at : at + 4], axis=-1, bitorder="little")
        return Blocks(codes(nibbles(at + 4, 16) | high << np.uint8(4)), half(0), minima)
    if name in ("Q4_K", "Q5_K"):
        scale_bytes, minimum_bytes = _k_scales(blocks[:, :, 4:16])
        low = nibbles(16 if form.bits == 4 else 48, 32)
        if form.bits == 5:
            bits = blocks[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
            low = low | bits.reshape(rows, count, form.block) << np.uint8(4)
        return Blocks(codes(low), half(0), half(2), scale_bytes.reshape(rows, -1), minimum_bytes.reshape(rows, -1))
    assert name == "Q6_K", name
    low = blocks[:, :, :128].reshape(rows, count, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    high = blocks[:, :, 128:192].reshape(rows, count, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    merged = low.reshape(rows, count, form.block) | high.reshape(rows, count, form.block) << np.uint8(4)
    return Blocks(codes(merged), half(208), None, np.ascontiguousarray(blocks[:, :, 192:208]).reshape(rows, -1))


def _k_scales(taken: Codes) -> tuple[Codes, Codes]:
    """Decode [..., 12] bytes to 8 scales and 8 minima of six bits each."""
    a, b, c = (taken[..., at : at + 4] for at in (0, 4, 8))
    low, high = np.uint8(15), np.uint8(4)
    scales = np.concatenate((a & np.uint8(63), c & low | a >> np.uint8(6) << high), axis=-1)
    minima = np.concatenate((b & np.uint8(63), c >> high | b >> np.uint8(6) << high), axis=-1)
    return scales, minima


_FILE_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def quantized(numbers: npt.NDArray[np.float32], name: str) -> Blocks:
    """Quantize [rows, size] to nearest, with a scale per group: Q8_0, Q4_0 or Q4_1."""
    form = FORMATS[name]
    groups = numbers.reshape(len(numbers), -1, form.group)
    if form.minimum:
        lowest, highest = groups.min(-1), groups.max(-1)
        minima = lowest.astype(np.float16)
        scales = ((highest - minima.astype(np.float32)) / np.float32(15)).astype(np.float16)
    else:
        at = np.abs(groups).argmax(-1)[..., None]
        # Scales are rounded to half precision before the codes, so that codes are nearest for the stored scale.
        extreme = np.take_along_axis(groups, at, -1)[..., 0]
        scales = (np.abs(extreme) / np.float32(127) if form.bits == 8 else extreme / np.float32(-8)).astype(np.float16)
        minima = None
    # ``where`` computes both branches: a scale of 0 is divided by and not used.
    with np.errstate(divide="ignore"):
        inverse = np.where(scales == 0, np.float32(0), np.float32(1) / scales.astype(np.float32))[..., None]
    above = groups if minima is None else groups - minima.astype(np.float32)[..., None]
    rounded = np.rint(above * inverse)
    # Codes of 8 bits begin at 1, which is -127.
    codes = (rounded + np.float32(form.offset)).clip(form.bits == 8, (1 << form.bits) - 1).astype(np.uint8)
    return Blocks(codes.reshape(numbers.shape), scales, minima)
